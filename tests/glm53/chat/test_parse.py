import collections
import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm53.chat import (
    ContentDelta,
    ReasoningDelta,
    StreamingParser,
    ToolCallDelta,
    parse,
)
from tests.glm53.chat.parsed import (
    CASES,
    STRING_TOOLS,
    TOOLS,
    arguments_of,
    completed,
    joined,
    stream,
    whole,
)

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
