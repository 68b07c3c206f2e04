import collections
import contextlib
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

DATA = Path(__file__).parents[2] / "data" / "chat"
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
    "unterminated_call": {
        "reasoning": "r",
        "content": "Going.",
        "tool_calls": [{"name": "get_weather", "arguments": {"city": "Os"}}],
    },
    "unterminated_after_complete": {
        "reasoning": "r",
        "content": "<arg_key>city</arg_key>",
        "tool_calls": [
            {"name": "now", "arguments": {}},
            {"name": "get_weather", "arguments": {}},
        ],
    },
}

# Of malformed outputs both readings lose text, and in one case a call: the fields that differ here.
KEPT: dict[str, dict[str, Any]] = {
    "unknown_tool": {
        "content": "pre <tool_call>no_such_tool<arg_key>a</arg_key><arg_value>1</arg_value>"
        "</tool_call> post"
    },
    "unknown_and_known_tool": {"content": "<tool_call>no_such_tool</tool_call>"},
    "missing_value": {"content": "<arg_key>city</arg_key>"},
    "missing_arg_value_close": {
        "tool_calls": [{"name": "get_weather", "arguments": {"city": "Oslo"}}]
    },
    "empty_name": {"content": "<tool_call></tool_call>rest"},
    "open_tag_twice": {
        "content": "<tool_call>",
        "tool_calls": [{"name": "now", "arguments": {}}],
    },
    "text_between_args": {"content": " and"},
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
        decoded, complete = completed(text)
        calls.append({"name": name, "arguments": decoded} | ({} if complete else CUT))
    return {"reasoning": reasoning, "content": content, "tool_calls": calls}


CUT = {"complete": False}


def completed(arguments: str, **options: Any) -> tuple[Any, bool]:
    """Returns the arguments in JSON text that may be cut short, and whether it is not."""
    for end in ("", "}", '"}'):
        with contextlib.suppress(ValueError):
            return json.loads(arguments + end if arguments else "{}", **options), not end and bool(
                arguments
            )
    raise AssertionError(f"{arguments!r} begins no JSON object")


def arguments_of(deltas: Iterable[Delta]) -> str:
    """Returns the JSON text of all calls' arguments, joined."""
    return "".join(delta.arguments for delta in deltas if isinstance(delta, ToolCallDelta))


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
        {"name": call.name, "arguments": call.arguments} | ({} if call.complete else CUT)
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
    expected = expected | KEPT.get(case["id"], {})
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
    *("u", "nul", "12 ", "."),
    *('["x", 1]', "NaN", "1e999", '["\\ud800"]', "text with words"),
]
TEXTS = st.lists(st.sampled_from(PARTS) | st.text(max_size=3), max_size=40).map("".join)


def calls_of(values: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """Returns calls that are well-formed but for what their values hold."""
    pair = st.tuples(st.sampled_from(["s", "i", "os", "any", "u", "o"]), values).map(
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
    deltas = [list(stream(parts, tools, **options)) for parts in (pieces, text, [text])]
    assert all(joined(each) == expected for each in deltas)
    assert arguments_of(deltas[0]) == arguments_of(deltas[1]) == arguments_of(deltas[2])


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


STRINGS = {"additionalProperties": {"type": "string"}}
STRING_TOOLS = [{"name": name, "parameters": STRINGS} for name in ("now", "typed", "typed_too")]


def letters(text: str) -> collections.Counter[str]:
    """Returns how often a text has each character but whitespace."""
    return collections.Counter("".join(text.split()))


def markup(calls: list[tuple[str, list[Any], bool]], ended: int, tags: str) -> str:
    """Returns the text of calls apart from keys and values, `ended` values having an end tag."""
    parts = [tags, "</arg_value>" * ended]
    for name, pairs, complete in calls:
        parts += ["<tool_call>", name, "<arg_key></arg_key><arg_value>" * len(pairs)]
        parts += ["</tool_call>"] * complete
    return "".join(parts)


@given(pieces=split_outputs())
def test_no_character_is_lost(pieces: list[str]) -> None:
    """A character of a malformed output that is in no part of the message, or in two.

    All arguments are strings here, which are verbatim; the deltas have those of repeated keys too.
    """
    text = "".join(pieces)
    deltas = list(stream(pieces, STRING_TOOLS))
    reasoning = "".join(delta.text for delta in deltas if isinstance(delta, ReasoningDelta))
    content = "".join(delta.text for delta in deltas if isinstance(delta, ContentDelta))
    calls: list[tuple[str, list[Any], bool]] = []
    for _, group in itertools.groupby(
        (delta for delta in deltas if isinstance(delta, ToolCallDelta)), lambda delta: delta.index
    ):
        parts = list(group)
        arguments = "".join(part.arguments for part in parts)
        pairs, complete = completed(arguments, object_pairs_hook=list)
        assert parts[0].name is not None
        calls.append((parts[0].name, pairs, complete))
    strings = [string for _, pairs, _ in calls for pair in pairs for string in pair]
    found = letters("".join([reasoning, content, *strings]))
    expected = [
        letters(markup(calls, ended, tags))
        for ended in range(sum(len(pairs) for _, pairs, _ in calls) + 1)
        for tags in ("", "<think>", "</think>", "<think></think>")
    ]
    assert letters(text) - found in expected
    assert not found - letters(text)
    rest = iter(text)
    assert all(character in rest for character in reasoning + content), "out of order"
    if not calls:
        text = text.removeprefix("<think>")
        assert text in (reasoning + content, f"{reasoning}</think>{content}")


WORDS = st.lists(st.sampled_from(["a", "1", " ", "\n", "now", "<", ">", "</", '"', "é"])).map(
    "".join
)
CALLS = st.tuples(
    st.sampled_from(["now", "typed"]), st.dictionaries(st.sampled_from(["s", "k l"]), WORDS)
)


def call_text(call: tuple[str, dict[str, str]]) -> str:
    """Returns a call as a model writes it."""
    name, arguments = call
    pairs = [
        f"<arg_key>{key}</arg_key><arg_value>{value}</arg_value>"
        for key, value in arguments.items()
    ]
    return f"<tool_call>{name}{''.join(pairs)}</tool_call>"


HELD = ["<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "</think>", "no_such"]
# An </arg_value> that no tag of a call follows: else it may end the value that all before it is in.
STRAY = [*HELD, "<arg_value>", "</arg_value>x"]
BROKEN_OFF = st.builds(lambda call, place: call_text(call)[:place], CALLS, st.integers(0, 80))


@given(
    parts=st.lists(WORDS | CALLS | BROKEN_OFF | st.sampled_from(STRAY)),
    reasoning=st.booleans(),
)
def test_malformed_output_costs_no_call(parts: list[Any], reasoning: bool) -> None:
    """A call that is lost, or merged with one before it that was broken off at any place."""
    text = "".join(part if isinstance(part, str) else call_text(part) for part in parts)
    found = parse(text, STRING_TOOLS, starts_in_reasoning=reasoning).tool_calls
    made = iter((call.name, call.arguments) for call in found if call.complete)
    assert all(part in made for part in parts if not isinstance(part, str))


@given(
    values=st.lists(
        st.lists(WORDS | CALLS.map(call_text) | st.sampled_from(HELD)).map("".join), max_size=2
    )
)
def test_strings_may_hold_calls(values: list[str]) -> None:
    """A file with tags, or whole calls, that is cut, or whose calls are made."""
    calls = [("typed", {"s": value, "k": value}) for value in values]
    found = parse("</think>" + "".join(map(call_text, calls)), STRING_TOOLS)
    assert [(call.name, call.arguments) for call in found.tool_calls] == calls
    assert found.content is None


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
