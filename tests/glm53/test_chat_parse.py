import dataclasses
import itertools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm53.chat import (
    ContentDelta,
    Delta,
    ReasoningDelta,
    StreamingParser,
    ToolCall,
    ToolCallDelta,
    parse,
)
from glm53.chat.tools import decode_argument

DATA = Path(__file__).parent.parent / "data" / "chat"
CASES = [json.loads(line) for line in (DATA / "parse_cases.jsonl").read_text("utf-8").splitlines()]
TOOLS = CASES[0]["tools"]

# The data holds two readings of each output, "expected" and, where it differs, "vllm". For each
# output on which they differ: the one to follow, or a third reading.
READINGS: dict[str, str | dict[str, Any]] = {
    # Reasoning and content are verbatim, and no text is lost.
    "newlines_kept": "expected",
    "second_close_tag": "expected",
    "open_tag_in_content": "expected",
    "two_calls_newline_between": "expected",
    "call_inside_reasoning": "expected",
    # A call ends the reasoning, a mention of its tag does not.
    "mention_in_reasoning_then_close": "expected",
    "call_in_reasoning_then_close": {
        "reasoning": "I should ",
        "content": "done",
        "tool_calls": [{"name": "now", "arguments": {}}],
    },
    # Names are stripped, strings are not.
    "zero_arg_newline": "vllm",
    "name_newline_args": "vllm",
    "string_with_quotes": "vllm",
    # JSON, not Python; and JSON wherever the schema does not ask for a string.
    "object_single_quotes": "vllm",
    "no_type_in_schema": "expected",
    "param_not_in_schema": "expected",
    # Without tools there are no calls; with them a call whose name is complete is one.
    "no_tools_given": "expected",
    "unterminated_call": "vllm",
    "unterminated_after_complete": "vllm",
}


def joined(deltas: Iterable[Delta]) -> dict[str, Any]:
    """Returns the message that a client puts together from deltas, in the form of the data."""
    reasoning, content = "", ""
    names: list[str] = []
    arguments: list[str] = []
    for delta in deltas:
        match delta:
            case ReasoningDelta(text):
                assert text
                assert not content, "reasoning after content"
                assert not names, "reasoning after a call"
                reasoning += text
            case ContentDelta(text):
                assert text
                content += text
            case ToolCallDelta(index, name, text):
                if name is not None:
                    names.append(name)
                    arguments.append("")
                assert index == len(names) - 1, "a delta of a call that is not the newest"
                arguments[index] += text
    calls = []
    for name, text in zip(names, arguments, strict=True):
        try:
            calls.append({"name": name, "arguments": json.loads(text)})
        except ValueError:
            whole = text + "}" if text else "{}"
            calls.append({"name": name, "arguments": json.loads(whole), "complete": False})
    return {"reasoning": reasoning, "content": content, "tool_calls": calls}


def stream(pieces: Iterable[str], tools: list[Any] | None, **options: Any) -> Iterator[Delta]:
    """Yields the deltas of an output given in pieces."""
    parser = StreamingParser(tools, **options)
    for piece in pieces:
        yield from parser.push(piece)
    yield from parser.finish()


def whole(text: str, tools: list[Any] | None, **options: Any) -> dict[str, Any]:
    """Returns a parsed message in the form of `joined`."""
    message = parse(text, tools, **options)
    assert message.reasoning != ""
    assert message.content != ""
    calls = [
        {"name": call.name, "arguments": call.arguments}
        | ({} if call.complete else {"complete": False})
        for call in message.tool_calls
    ]
    return {
        "reasoning": message.reasoning or "",
        "content": message.content or "",
        "tool_calls": calls,
    }


def test_every_difference_is_decided() -> None:
    """An output that the two readings disagree on, without a decision."""
    assert {case["id"] for case in CASES if not case["agree"]} == READINGS.keys()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_golden(case: dict[str, Any]) -> None:
    """An output read otherwise than its decided reading."""
    reading = READINGS.get(case["id"], "expected")
    expected = case[reading] if isinstance(reading, str) else reading
    found = whole(case["text"], case["tools"])
    for call in found["tool_calls"]:
        call.pop("complete", None)
    assert found == expected
    # 1 == 1.0 == True in Python, not in JSON.
    assert json.dumps(found["tool_calls"]) == json.dumps(expected["tool_calls"])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_golden_splits(case: dict[str, Any]) -> None:
    """A split in two, or into characters, that changes the message."""
    text, tools = case["text"], case["tools"]
    expected = whole(text, tools)
    assert joined(stream(text, tools)) == expected
    for place in range(len(text) + 1):
        assert joined(stream([text[:place], text[place:]], tools)) == expected


PARTS = [
    *("<think>", "</think>", "<tool_call>", "</tool_call>"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    *("now", "typed", "get_weather", "no_such", "s", "i", "any", "city", "o"),
    *("<", "/", ">", "</", "tool_call", " ", "\n", "a", "é", "1", "-2.5", "true", "None", '"', "{"),
    *('["x", 1]', "NaN", "1e999", '["\\ud800"]', "text with words"),
]
TEXTS = st.lists(st.sampled_from(PARTS) | st.text(max_size=3), max_size=40).map("".join)


def calls_of(values: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """Returns calls that are well-formed but for what their values hold."""
    pair = st.tuples(st.sampled_from(["s", "i", "os", "any", "o"]), values).map(
        lambda pair: f"<arg_key>{pair[0]}</arg_key><arg_value>{pair[1]}</arg_value>"
    )
    body = st.lists(pair, max_size=3).map("".join)
    return body.map(lambda pairs: f"<tool_call>typed{pairs}</tool_call>")


OUTPUTS = st.lists(TEXTS | calls_of(TEXTS) | st.just("</think>"), max_size=6).map("".join)


@st.composite
def split_outputs(draw: st.DrawFn) -> list[str]:
    """Draws an output in pieces."""
    text = draw(TEXTS | OUTPUTS)
    places = sorted(draw(st.lists(st.integers(0, len(text)), max_size=8)))
    bounds = [0, *places, len(text)]
    return [text[start:end] for start, end in itertools.pairwise(bounds)]


@given(pieces=split_outputs(), tools=st.sampled_from([TOOLS, None]), reasoning=st.booleans())
def test_any_text_in_any_split(pieces: list[str], tools: list[Any] | None, reasoning: bool) -> None:
    """A text that breaks the parser, or whose message depends on how it was split."""
    options = {"starts_in_reasoning": reasoning}
    text = "".join(pieces)
    expected = whole(text, tools, **options)
    assert joined(stream(pieces, tools, **options)) == expected
    assert joined(stream(text, tools, **options)) == expected


@given(text=OUTPUTS, place=st.integers(0, 200))
def test_what_is_emitted_stands(text: str, place: int) -> None:
    """A delta, such as half a tag, that what follows shows to be wrong."""
    parser = StreamingParser(TOOLS)
    sent = joined(parser.push(text[:place]))
    final = whole(text, TOOLS)
    assert final["reasoning"].startswith(sent["reasoning"])
    assert final["content"].startswith(sent["content"])
    for early, late in zip(sent["tool_calls"], final["tool_calls"], strict=False):
        assert early["name"] == late["name"]
    assert len(sent["tool_calls"]) <= len(final["tool_calls"])


@given(text=OUTPUTS)
def test_no_text_is_lost_without_tools(text: str) -> None:
    """Text that is neither reasoning nor content though no call can be meant."""
    found = whole(text, None)
    rest = text.removeprefix("<think>")
    assert found["reasoning"] == rest.partition("</think>")[0]
    assert found["content"] == rest.partition("</think>")[2]


def test_arguments_are_emitted_one_by_one() -> None:
    """A call that is held back until it is complete."""
    parser = StreamingParser(TOOLS)
    assert parser.push("r</think>x \n<tool_ca") == [ReasoningDelta("r"), ContentDelta("x")]
    assert parser.push("ll>typed") == []
    assert parser.push("<arg_key>s</arg_key>") == [ToolCallDelta(0, "typed", "")]
    assert parser.push("<arg_value>1</arg_value") == []
    assert parser.push(">") == [ToolCallDelta(0, None, '{"s": "1"')]
    assert parser.push("<arg_key>i</arg_key><arg_value>2</arg_value></tool_call>") == [
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
        # A call to no known tool goes, unless it turns out to be no call.
        ("</think>a<tool_call>no<arg_key>x</arg_key></tool_call>b", "ab", []),
        ("</think>a<tool_call>no<arg_key>x</arg_k", "a<tool_call>no<arg_key>x</arg_k", []),
        # Values without a key, keys without a value, and text between them.
        (
            "</think><tool_call>typed<arg_key>i</arg_key><arg_value>1</arg_value>"
            "<arg_value>2</arg_value></tool_call>",
            None,
            [{"i": 1}],
        ),
        (
            "</think><tool_call>typed<arg_key> </arg_key><arg_value>1</arg_value></tool_call>",
            None,
            [{}],
        ),
        (
            "</think><tool_call>typed<arg_key>s</arg_key>x<arg_key>i</arg_key>y"
            "<arg_value>1</arg_value>z</tool_call>",
            None,
            [{"i": 1}],
        ),
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


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("42", {"type": ["string"]}, "42"),
        ("42", {"type": ["string", "null"]}, "42"),
        ("null", {"anyOf": [{"type": "string"}, {"type": "null"}]}, None),
        ("None", {"type": ["string", "null"]}, None),
        ("true", {"type": ["string", "integer"]}, "true"),
        ("3", {"type": ["string", "number"]}, 3),
        ("3.5", {"type": ["string", "integer"]}, "3.5"),
        ("[1]", {"oneOf": [{"type": "array"}, {"type": "string"}]}, [1]),
        ("5", {"anyOf": [{"type": "string"}, {"$ref": "#/x"}]}, 5),
        ("7", {"enum": ["7", "8"]}, "7"),
        ("7", {"enum": [7, 8]}, 7),
        ("null", {"enum": [None, True, 1.5, [], {}]}, None),
        ('"x"', {}, '"x"'),
        ("7", True, 7),
        (" 7\n", None, 7),
        ("", {"type": "integer"}, ""),
        ("NaN", {"type": "number"}, "NaN"),
        ("1e999", {"type": "number"}, "1e999"),
        ('["\\ud800"]', {"type": "array"}, '["\\ud800"]'),
        ("9" * 5000, {"type": "integer"}, "9" * 5000),
        ("[" * 100_000, {"type": "array"}, "[" * 100_000),
        ("[" * 100_000 + "]" * 100_000, {"type": "array"}, "[" * 100_000 + "]" * 100_000),
    ],
    ids=lambda part: repr(part)[:40],
)
def test_argument_types(text: str, schema: Any, value: Any) -> None:
    """A string taken for another type, or a value that JSON or UTF-8 cannot hold."""
    found, encoded = decode_argument(text, schema)
    assert found == value
    assert type(found) is type(value)
    assert json.loads(encoded.encode()) == value


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
