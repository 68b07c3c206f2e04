"""Outputs with stray, broken or unfinished calls, and deltas as they grow."""

import dataclasses
import json
from typing import Any

import pytest

from glm53.chat import (
    ContentDelta,
    ReasoningDelta,
    StreamingParser,
    ToolCall,
    ToolCallDelta,
    parse,
)
from tests.glm53.chat.parsed import (
    STRING_TOOLS,
    TOOLS,
    arguments_of,
    joined,
    stream,
)

OSLO = "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Oslo</arg_value></tool_call>"


@pytest.mark.parametrize("reasoning", [True, False])
@pytest.mark.parametrize(
    "text",
    [
        "text <tool_call>",
        "I will issue a <tool_call> now. ",
        "<tool_call>now <tool_call>now.",
        "<tool_call>no_such<arg_key>x</arg_key><arg_value>1</arg_value></tool_call>",
        "<tool_call></tool_call>",
    ],
)
def test_text_with_tags_before_a_call(text: str, reasoning: bool) -> None:
    """A mention of the tag that costs the call behind it, within reasoning or content."""
    message = parse(text + OSLO, TOOLS, starts_in_reasoning=reasoning)
    found = message.reasoning if reasoning else message.content
    assert found == text if reasoning else found == text.rstrip()
    assert message.tool_calls == (ToolCall("get_weather", {"city": "Oslo"}),)


@pytest.mark.parametrize(
    ("text", "content", "arguments"),
    [
        ("<arg_key>i</arg_key><arg_value>1</arg_value>", None, {"i": 1}),
        ("<arg_key>s</arg_key><arg_value>a", None, {"s": "a"}),
        ("<arg_key>i</arg_key> <arg_value>1", "<arg_key>i</arg_key><arg_value>1", {}),
        ("<arg_key>os</arg_key><arg_value>nulla", None, {"os": "nulla"}),
        ("<arg_key>os</arg_key><arg_value>nul", "<arg_key>os</arg_key><arg_value>nul", {}),
        ("<arg_key>any</arg_key><arg_value>a b", None, {"any": "a b"}),
        ("<arg_key>any</arg_key><arg_value>[a", "<arg_key>any</arg_key><arg_value>[a", {}),
        ("<arg_key>i</arg_", "<arg_key>i</arg_", {}),
        ("<arg_key>i</arg_key>x", "<arg_key>i</arg_key>x", {}),
    ],
)
def test_call_that_the_next_breaks_off(
    text: str, content: str | None, arguments: dict[str, Any]
) -> None:
    """An unclosed call that takes the next one for its own text, or loses what it has."""
    broken = ToolCall("typed", arguments, complete=False)
    whole_call = ToolCall("get_weather", {"city": "Oslo"})
    for rest, calls in (("", (broken,)), (OSLO, (broken, whole_call))):
        message = parse(f"</think><tool_call>typed{text}{rest}", TOOLS)
        assert (message.content, message.tool_calls) == (content, calls)


def test_value_without_an_end() -> None:
    """A call that is closed though its value is not, taken for open or left without the value."""
    text = "</think><tool_call>typed<arg_key>{key}</arg_key><arg_value>1</tool_call>"
    for key, value in (("s", "1"), ("i", 1)):
        for rest, calls in ((" x", 1), (OSLO, 2)):
            message = parse(text.replace("{key}", key) + rest, TOOLS)
            assert message.tool_calls[0] == ToolCall("typed", {key: value})
            assert len(message.tool_calls) == calls
            assert message.content == (rest if calls == 1 else None)


def test_stray_end_of_a_value() -> None:
    """A tag that ends no value, which makes calls before it the text of an unclosed one."""
    text = f"</think><tool_call>typed<arg_key>s</arg_key><arg_value>1{OSLO}{OSLO}"
    for stray in ("x</arg_value>x", "x</arg_value> <tool_call>", "</arg_value></arg_value>x"):
        message = parse(text + stray, TOOLS)
        assert len(message.tool_calls) == 3
        assert message.content == stray
    for end in ("</arg_value>", "</arg_value> </tool_call>", "x</arg_value>x</arg_value>"):
        (call,) = parse(text + end, TOOLS).tool_calls
        assert call.arguments == {"s": f"1{OSLO}{OSLO}{end.rpartition('</arg_value>')[0]}"}
        assert call.complete == ("</tool_call>" in end)


def test_values_within_values_without_end() -> None:
    """A model that repeats itself, which recursion would not survive."""
    text = "</think>" + "<tool_call>typed<arg_key>s</arg_key><arg_value>" * 2000
    calls = parse(text + OSLO, TOOLS).tool_calls
    assert len(calls) == 2001
    assert calls[-1] == ToolCall("get_weather", {"city": "Oslo"})


def test_strings_are_emitted_as_they_grow() -> None:
    """A file that a model writes, held back until its end."""
    parser = StreamingParser(STRING_TOOLS)
    parser.push("</think><tool_call>typed<arg_key>s</arg_key><arg_value>")
    file = 'def f():\n\treturn "<tool_call> é"\n' * 20
    sent = "".join(
        delta.arguments
        for character in file
        for delta in parser.push(character)
        if isinstance(delta, ToolCallDelta)
    )
    assert json.loads(f'"{sent}"') == file
    assert parser.push("</arg_value></tool_call>") == [
        ToolCallDelta(0, None, '"'),
        ToolCallDelta(0, None, "}"),
    ]
    assert parser.tool_calls == [ToolCall("typed", {"s": file})]


# Values, and the most characters of each that wait for what tells their type.
OPTIONAL_STRINGS = {
    'Say "hello" to all\nof them.': 0,
    "31 apples": 0,
    '{"a": 1} is an object': 0,
    "nulls and ones": 4,
    "None of them": 5,
}
STRINGS_OF_ANY_TYPE = {
    "Say hello to all of them.": 0,
    "the whole": 1,
    "31 apples": 3,
    "2026-05-01": 4,
}


@pytest.mark.parametrize(
    ("schema", "values"),
    [
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, OPTIONAL_STRINGS),
        ({"type": ["string", "null"]}, OPTIONAL_STRINGS),
        ({}, STRINGS_OF_ANY_TYPE),
        (None, STRINGS_OF_ANY_TYPE),
    ],
)
def test_strings_are_emitted_where_other_types_may_stand(
    schema: Any, values: dict[str, int]
) -> None:
    """An optional string that is held back though nothing else can come of it."""
    function = {} if schema is None else {"parameters": {"properties": {"x": schema}}}
    for value, max_held in values.items():
        parser = StreamingParser([{"name": "f", **function}], starts_in_reasoning=False)
        parser.push("<tool_call>f<arg_key>x</arg_key><arg_value>")
        sent, held = "", []
        for end, character in enumerate(value, 1):
            sent += arguments_of(parser.push(character))
            string = json.loads(sent + '"}')["x"] if sent else ""
            assert value.startswith(string)
            held.append(end - len(string))
        assert max(held) == max_held
        assert held[-1] == 0
        assert arguments_of(parser.push("</arg_value></tool_call>")) == '"}'
        assert parser.tool_calls == [ToolCall("f", {"x": value})]


def test_arguments_are_emitted_one_by_one() -> None:
    """A call, or an argument of which part is known, that is held back until it is complete."""
    parser = StreamingParser(TOOLS)
    assert parser.push("r</think>x \n<tool_ca") == [ReasoningDelta("r"), ContentDelta("x")]
    assert parser.push("ll>typed") == []
    assert parser.push("<arg_key>s</arg_key>") == [ToolCallDelta(0, "typed", "")]
    assert parser.push("<arg_value>1</arg_value") == [
        ToolCallDelta(0, None, '{"s": "'),
        ToolCallDelta(0, None, "1"),
    ]
    assert parser.push(">") == [ToolCallDelta(0, None, '"')]
    assert parser.push("<arg_key>i</arg_key><arg_value>2") == []
    assert parser.push("</arg_value></tool_call>") == [
        ToolCallDelta(0, None, ', "i": 2'),
        ToolCallDelta(0, None, "}"),
    ]
    assert parser.tool_calls == [ToolCall("typed", {"s": "1", "i": 2})]
    assert parser.push("<tool_call>now</tool_call>") == [
        ToolCallDelta(1, "now", ""),
        ToolCallDelta(1, None, "{}"),
    ]
    assert parser.finish() == []


def test_output_that_ends_in_a_call() -> None:
    """A call cut short that looks complete, alone or after its first argument."""
    text = "</think><tool_call>typed<arg_key>i</arg_key><arg_value>1</arg_value><arg_key>s"
    assert parse(text, TOOLS).tool_calls == (ToolCall("typed", {"i": 1}, complete=False),)
    assert joined(stream(text, TOOLS))["tool_calls"][0]["complete"] is False
    assert parse("</think><tool_call>now", TOOLS).content == "<tool_call>now"
    assert parse("<tool_call>now", TOOLS).reasoning == "<tool_call>now"


@pytest.mark.parametrize(
    ("text", "content", "arguments"),
    [
        # Of the tags that close reasoning, one is dropped after a call that ended it.
        ("r<tool_call>now</tool_call>b</think>c</think>d", "bc</think>d", [{}]),
        ("r</think><tool_call>now</tool_call>b</think>c", "b</think>c", [{}]),
        # A call to no known tool is text.
        (
            "</think>a<tool_call>no<arg_key>x</arg_key></tool_call>b",
            "a<tool_call>no<arg_key>x</arg_key></tool_call>b",
            [],
        ),
        # Values without a key, keys without a value, and text between them.
        (
            "</think><tool_call>typed<arg_key>i</arg_key><arg_value>1</arg_value>"
            "<arg_value>2</arg_value></tool_call>",
            "<arg_value>2</arg_value>",
            [{"i": 1}],
        ),
        (
            "</think><tool_call>typed<arg_key> </arg_key><arg_value>1</arg_value></tool_call>",
            "<arg_key> </arg_key><arg_value>1</arg_value>",
            [{}],
        ),
        (
            "</think><tool_call>typed<arg_key>s</arg_key>x<arg_key>i</arg_key>y"
            "<arg_value>1</arg_value>z</tool_call>",
            "<arg_key>s</arg_key>xyz",
            [{"i": 1}],
        ),
        # A call ends the reasoning wherever the tag that closes it stands.
        ("r<tool_call>now<arg_key>x</think>c", "<arg_key>xc", [{}]),
    ],
)
def test_odd_outputs(text: str, content: str | None, arguments: list[dict[str, Any]]) -> None:
    """An output against the grammar that is read otherwise than documented."""
    message = parse(text, TOOLS)
    assert message.content == content
    assert [call.arguments for call in message.tool_calls] == arguments


@pytest.mark.parametrize("mention", ["<tool_call> tag", "<tool_call>nothing", "<tool_call>now or"])
def test_reasoning_goes_on_after_a_mention(mention: str) -> None:
    """Reasoning that stops streaming because the model wrote of a tag."""
    parser = StreamingParser(TOOLS)
    assert joined(parser.push(f"the {mention}"))["reasoning"] == f"the {mention}"
    assert parser.push(" <tool_call>now</tool_call>") == [
        ReasoningDelta(" "),
        ToolCallDelta(0, "now", ""),
        ToolCallDelta(0, None, "{}"),
    ]


def test_output_after_a_prompt_without_thinking() -> None:
    """An answer taken for reasoning where the prompt has closed it."""
    message = parse("Hi<tool_call>now</tool_call>", TOOLS, starts_in_reasoning=False)
    assert dataclasses.astuple(message) == (None, "Hi", (("now", {}, True),))


def test_call_with_types_behind_references() -> None:
    """A string of digits that becomes a number since its type is not found."""
    parameters = {
        "properties": {"x": {"$ref": "#/$defs/Color"}},
        "$defs": {"Color": {"enum": ["1", "2"]}},
    }
    text = "</think><tool_call>f<arg_key>x</arg_key><arg_value>1</arg_value></tool_call>"
    (call,) = parse(text, [{"name": "f", "parameters": parameters}]).tool_calls
    assert call.arguments == {"x": "1"}


def test_parameters_may_be_missing() -> None:
    """A tool without a schema, or with an odd one, that breaks the parser."""
    for parameters in ({}, {"parameters": None}, {"parameters": {"properties": []}}):
        text = "</think><tool_call>f<arg_key>x</arg_key><arg_value>1</arg_value></tool_call>"
        assert parse(text, [{"name": "f", **parameters}]).tool_calls[0].arguments == {"x": 1}


def test_malformed_tool() -> None:
    """Tools that cannot be read, taken for none."""
    with pytest.raises(ValueError, match=r"tools\[0\]\.name"):
        StreamingParser([{"type": "function"}])
    with pytest.raises(ValueError, match=r"tools\[0\]\.name"):
        parse("text", [{"type": "function"}])
