import copy
import re
from typing import Any

import pytest

from glm53.chat import parse, read_messages, render

USER = {"role": "user", "content": "q"}
STRING_CITY = {"city": {"type": "string"}}
CALL = "<tool_call>weather<arg_key>city</arg_key><arg_value>Köln</arg_value></tool_call>"


def test_messages_become_those_of_the_template() -> None:
    """A message as the OpenAI API has it that does not render, or is changed in place."""
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "Be "}, "brief"]},
        {"role": "user", "content": "Weather?", "name": "Ann"},
        {
            "role": "assistant",
            "content": None,
            "reasoning": "Look it up.",
            "refusal": None,
            "tool_calls": [
                {
                    "id": "c1",
                    "type": "function",
                    "function": {"name": "weather", "arguments": '{"city": "Köln"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    ]
    before = copy.deepcopy(messages)
    assert render(read_messages(messages)).endswith(
        f"<|system|>Be brief<|user|>Weather?<|assistant|><think>Look it up.</think>{CALL}"
        "<|observation|><tool_response>rain</tool_response>"
    )
    assert messages == before


@pytest.mark.parametrize("end", ["</arg_value></tool_call>", ""])
@pytest.mark.parametrize("start", ["r</think>c", "r</think>", "</think>"])
def test_parsed_messages_go_back_into_the_conversation(start: str, end: str) -> None:
    """A model's own output, whole or broken off, that is refused or renders otherwise."""
    text = start + CALL.removesuffix("</arg_value></tool_call>")
    parsed = parse(text + end, [{"name": "weather", "parameters": {"properties": STRING_CITY}}])
    assert parsed.tool_calls[0].complete == bool(end)
    message = {
        "role": "assistant",
        "content": parsed.content,
        "reasoning": parsed.reasoning,
        "tool_calls": parsed.tool_calls,
    }
    prompt = render([USER], add_generation_prompt=True)
    assert render(read_messages([USER, message])) == f"{prompt}{text}</arg_value></tool_call>"
    without = {**message, "tool_calls": parse(start).tool_calls}
    assert render(read_messages([USER, without])) == prompt + start


@pytest.mark.parametrize(
    "fields", [{"arguments": text} for text in ("", " ", "{}", "null", None, {})] + [{}]
)
@pytest.mark.parametrize("nested", [True, False])
def test_call_without_arguments(fields: dict[str, Any], nested: bool) -> None:
    """A past call without arguments that is refused for how it says so."""
    call = {"name": "now", **fields}
    message = {"role": "assistant", "tool_calls": [{"function": call} if nested else call]}
    assert render(read_messages([message])).endswith("</think><tool_call>now</tool_call>")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            {"s": "1", "i": 1},
            "<arg_key>s</arg_key><arg_value>1</arg_value><arg_key>i</arg_key><arg_value>1",
        ),
        (' {"s": "1"}\n', "<arg_key>s</arg_key><arg_value>1"),
        # The last one counts, as in the arguments that a `StreamingParser` emits.
        ('{"s": "1", "s": "2"}', "<arg_key>s</arg_key><arg_value>2"),
        (
            '{"s": ' + "[" * 500 + "]" * 500 + "}",
            "<arg_key>s</arg_key><arg_value>" + "[" * 500 + "]" * 500,
        ),
    ],
    ids=["object", "text", "repeated", "deep"],
)
def test_arguments_as_text(arguments: Any, text: str) -> None:
    """Arguments as an object or as its JSON that do not give the same prompt."""
    message = {"role": "assistant", "tool_calls": [{"name": "f", "arguments": arguments}]}
    prompt = render(read_messages([message]))
    assert prompt.endswith(f"<tool_call>f{text}</arg_value></tool_call>")


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_names_of_reasoning(name: str) -> None:
    """Past reasoning that is lost for the name of its field."""
    message = {"role": "assistant", "content": "a", name: "r", "tool_calls": None}
    assert render(read_messages([message])).endswith("<think>r</think>a")
    both = {**message, "reasoning": "r", "reasoning_content": "r"}
    assert read_messages([both]) == read_messages([message])
    with pytest.raises(ValueError, match=r"messages\[0\]\.reasoning and .*_content differ"):
        read_messages([{**message, "reasoning": "a", "reasoning_content": "b"}])


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool"])
def test_content_may_be_null(role: str) -> None:
    """A message without content that is refused, or shows the word for it."""
    rendered = [
        render(read_messages([{"role": role, **content}])) for content in ({}, {"content": None})
    ]
    assert rendered[0] == rendered[1] == render(read_messages([{"role": role, "content": ""}]))


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        (None, "messages must be a list of at least one message, got None"),
        ([], "messages must be a list of at least one message, got []"),
        ("Hi", "messages must be a list of at least one message, got 'Hi'"),
        (["Hi"], "messages[0] must be an object, got 'Hi'"),
        ([USER, {"content": "x"}], "messages[1].role must be one of system, developer, user"),
        ([{"role": []}], "messages[0].role must be one of"),
        ([{"role": "critic"}], "got 'critic'"),
        ([{"role": "user", "audio": {}}], "messages[0] has unknown field 'audio'"),
    ],
)
def test_refused(messages: Any, message: str) -> None:
    """A message that would get lost in the prompt, or an error without its place."""
    with pytest.raises(ValueError, match=re.escape(message)):
        read_messages(messages)


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file", None, 5])
def test_parts_that_the_model_cannot_read(kind: Any) -> None:
    """An image that is left out of the prompt."""
    content = [{"type": "text", "text": "See:"}, {"type": kind}]
    place = f"messages[1].content[1].type {kind!r} is not supported"
    with pytest.raises(ValueError, match=re.escape(place)):
        read_messages([USER, {"role": "user", "content": content}])


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            {"arguments": "{'city': 1}"},
            ".arguments: not JSON: Expecting property name enclosed in double quotes: "
            "line 1 column 2 (char 1), got \"{'city': 1}\"",
        ),
        ({"arguments": "[" * 100_000}, ".arguments: not JSON"),
        ({"arguments": "[1]"}, ".arguments must be an object or its JSON, got '[1]'"),
        ({"arguments": [1]}, ".arguments must be an object or its JSON, got [1]"),
        (
            {"arguments": "Oslo " * 1000},
            ".arguments: not JSON: Expecting value: line 1 column 1 (char 0), "
            "got 'Oslo Oslo Os...lo Oslo Oslo '",
        ),
        (5, " must be an object, got 5"),
    ],
)
def test_tool_arguments_that_are_no_object(function: Any, message: str) -> None:
    """Arguments that make no call, or an error without the place of theirs."""
    messages = [USER, {"role": "assistant", "tool_calls": [{"function": function}]}]
    where = f"messages[1].tool_calls[0].function{message}"
    with pytest.raises(ValueError, match=re.escape(where)):
        read_messages(messages)
