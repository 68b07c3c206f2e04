"""Splits a model's output into reasoning, content and tool calls while it comes in.

The output is `reasoning</think>content<tool_call>name<arg_key>key</arg_key><arg_value>value
</arg_value>...</tool_call>...`, without the line break. The prompt has already opened the
reasoning. The parser follows the text once, piece by piece, and emits a part as soon as nothing
that may follow can change it. So every split of a text into pieces gives the same result, and
`parse` is this parser fed one piece.

Decisions, where SGLang 0.5.23 and vLLM 0.33.0 read an output differently:
* Reasoning and content are verbatim, inner tags and whitespace included: a client that sends them
  back gets the prompt whose prefix is cached. One exception, which both make: whitespace at the
  end of the content is dropped if there are tool calls.
* Text after a tool call is content too.
* A call inside reasoning ends the reasoning once its name is complete and is a tool's; a
  `</think>` after it is then dropped. A `<tool_call>` with anything else behind it is reasoning.
* A function's name is stripped, a string argument never; `decode_argument` has the rules of types.
* A call to no known tool is dropped. Without tools there are no calls, all tags are text.
* A value without a key, and any text between keys and values, is dropped.
* An output that ends within a call reports the call with the arguments that are complete, and
  marks it; one that ends before the name is complete has the text in the content.

An argument is emitted when its closing tag is there, not letter by letter: `</tool_call>` inside
a value ends the call and takes the value back, which JSON that is already sent cannot do.
"""

import dataclasses
import enum
import functools
import json
import re
from collections.abc import Sequence
from typing import Any

from glm53.chat.tools import check_tools, decode_argument, parameter_schemas, tool_function

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
KEY_OPEN, KEY_CLOSE = "<arg_key>", "</arg_key>"
VALUE_OPEN, VALUE_CLOSE = "<arg_value>", "</arg_value>"


@dataclasses.dataclass(frozen=True)
class ReasoningDelta:
    """More text of the reasoning; never empty."""

    text: str


@dataclasses.dataclass(frozen=True)
class ContentDelta:
    """More text of the content; never empty."""

    text: str


@dataclasses.dataclass(frozen=True)
class ToolCallDelta:
    """A new tool call, or more of its arguments.

    Attributes:
        index: Number of the call within the message, from 0.
        name: The function's name in a call's first delta, None in the others.
        arguments: More of the arguments' JSON text. Joined over a call's deltas it is a JSON
            object, in which a key that the model repeats appears each time, the last one counting.
            The closing brace of a call that the output breaks off never comes.
    """

    index: int
    name: str | None
    arguments: str


Delta = ReasoningDelta | ContentDelta | ToolCallDelta


@dataclasses.dataclass(frozen=True)
class ToolCall:
    """A call of a tool.

    Attributes:
        name: The function's name, one of the tools given.
        arguments: The arguments by name, decoded, as the chat template takes them back.
        complete: False if the output ended within the call, so that arguments may be missing.
    """

    name: str
    arguments: dict[str, Any]
    complete: bool = True


class _State(enum.Enum):
    """What the text at hand is."""

    REASONING = enum.auto()
    CONTENT = enum.auto()
    NAME = enum.auto()  # Of a function; until it is complete this may be no call.
    UNKNOWN = enum.auto()  # The rest of a call to no known tool.
    ARGUMENTS = enum.auto()  # Between keys and values; text here has no meaning.
    KEY = enum.auto()
    VALUE = enum.auto()


class StreamingParser:
    """Parses one output, given in pieces.

    Attributes:
        tool_calls: The calls so far.
    """

    def __init__(
        self, tools: Sequence[Any] | None = None, *, starts_in_reasoning: bool = True
    ) -> None:
        """Starts before the first token of an output.

        Args:
            tools: The tools that the prompt offered, see `check_tools`.
            starts_in_reasoning: Whether the prompt ended in `<think>`. GLM-5.3's always do; those
                of the earlier models do unless thinking is off.

        Raises:
            ValueError: A tool is malformed.
        """
        self._schemas = {
            tool_function(tool)["name"]: parameter_schemas(tool) for tool in check_tools(tools)
        }
        self.tool_calls: list[ToolCall] = []
        self._deltas: list[Delta] = []  # What the current push or finish has found.
        self._buffer = ""  # Text not looked at yet; between pushes, what may become a tag.
        self._before_think_open = starts_in_reasoning
        self._state = _State.REASONING if starts_in_reasoning else _State.CONTENT
        self._outer = self._state  # Where the text belongs if a <tool_call> begins no call.
        self._late_close = False  # Whether a call ended the reasoning, so a </think> may follow.
        self._space = ""  # Whitespace at the end of the content so far, not emitted yet.
        self._held: list[str] = []  # Text of the name, key, value or unknown call so far.
        self._key = ""

    def push(self, text: str) -> list[Delta]:
        """Takes more of the output and returns what it settles."""
        self._buffer += text
        if self._before_think_open:
            # A model may repeat the tag that the prompt ends in.
            if self._buffer != THINK_OPEN and THINK_OPEN.startswith(self._buffer):
                return []
            self._buffer = self._buffer.removeprefix(THINK_OPEN)
            self._before_think_open = False
        start = 0
        while tag := _pattern(self._tags()).search(self._buffer, start):
            self._take_text(self._buffer[start : tag.start()])
            self._take_tag(tag.group())
            start = tag.end()
        end = _settled(self._buffer, start, self._tags())
        self._take_text(self._buffer[start:end])
        self._buffer = self._buffer[end:]
        if self._state is _State.NAME and self._outer is _State.REASONING:
            self._reject_name()
        return self._take_deltas()

    def finish(self) -> list[Delta]:
        """Returns what the end of the output settles. The parser takes nothing after it."""
        if self._state in (_State.NAME, _State.UNKNOWN):
            self._state, text = self._outer, CALL_OPEN + "".join(self._held)
            self._take_text(text)
        self._take_text(self._buffer)
        if self._space and not self.tool_calls:
            self._deltas.append(ContentDelta(self._space))
        return self._take_deltas()

    def _take_deltas(self) -> list[Delta]:
        """Returns the deltas found and starts a new list."""
        deltas, self._deltas = self._deltas, []
        return deltas

    def _tags(self) -> tuple[str, ...]:
        """Returns the tags that mean something in the current state."""
        calls = (CALL_OPEN,) if self._schemas else ()
        match self._state:
            case _State.REASONING:
                return (THINK_CLOSE, *calls)
            case _State.CONTENT:
                return (THINK_CLOSE, *calls) if self._late_close else calls
            case _State.NAME:
                name_ends = (KEY_OPEN, CALL_CLOSE)
                in_reasoning = self._outer is _State.REASONING
                return (*name_ends, THINK_CLOSE, CALL_OPEN) if in_reasoning else name_ends
            case _State.UNKNOWN:
                return (CALL_CLOSE,)
            case _State.ARGUMENTS:
                return (KEY_OPEN, VALUE_OPEN, CALL_CLOSE)
            case _State.KEY:
                return (KEY_CLOSE, CALL_CLOSE)
            case _State.VALUE:
                return (VALUE_CLOSE, CALL_CLOSE)

    def _take_text(self, text: str) -> None:
        """Handles text without tags."""
        match self._state:
            case _State.REASONING:
                if text:
                    self._deltas.append(ReasoningDelta(text))
            case _State.CONTENT:
                text = self._space + text
                visible = text.rstrip()
                self._space = text[len(visible) :]
                if visible:
                    self._deltas.append(ContentDelta(visible))
            case _State.ARGUMENTS:
                pass
            case _:
                self._held.append(text)

    def _take_tag(self, tag: str) -> None:
        """Handles a tag of the current state."""
        match self._state, tag:
            case ((_State.REASONING | _State.CONTENT), _):
                if tag == CALL_OPEN:
                    self._outer, self._state, self._held = self._state, _State.NAME, []
                else:
                    self._state, self._late_close = _State.CONTENT, False
            case _State.NAME, _:
                self._end_name(tag)
            case _State.UNKNOWN, _:
                self._state = _State.CONTENT
            case _ if tag == CALL_CLOSE:
                self._end_call()
            case _State.ARGUMENTS, _:
                if tag == KEY_OPEN or self._key:
                    self._state = _State.KEY if tag == KEY_OPEN else _State.VALUE
                    self._held = []
            case _State.KEY, _:
                self._key, self._state = "".join(self._held).strip(), _State.ARGUMENTS
            case _:
                self._end_value()

    def _end_name(self, tag: str) -> None:
        """Handles the tag behind what may be a function's name."""
        text = "".join(self._held)
        name = text.strip()
        if tag in (KEY_OPEN, CALL_CLOSE) and name in self._schemas:
            self._late_close |= self._outer is _State.REASONING
            self.tool_calls.append(ToolCall(name, {}, complete=False))
            self._emit_call(name, "")
            if tag == CALL_CLOSE:
                self._end_call()
            else:
                self._state, self._held = _State.KEY, []
        elif self._outer is _State.REASONING:
            self._state = _State.REASONING
            self._take_text(CALL_OPEN + text)
            if tag in self._tags():
                self._take_tag(tag)
            else:
                self._take_text(tag)
        elif tag == CALL_CLOSE:
            self._state = _State.CONTENT
        else:
            self._state = _State.UNKNOWN
            self._held.append(tag)

    def _reject_name(self) -> None:
        """Gives text back to the reasoning as soon as it can become no tool's name."""
        text = "".join(self._held)
        if not any(name.startswith(text.strip()) for name in self._schemas):
            self._state = _State.REASONING
            self._take_text(CALL_OPEN + text)

    def _end_value(self) -> None:
        """Adds an argument to the open call."""
        call = self.tool_calls[-1]
        schema = self._schemas[call.name].get(self._key)
        value, encoded = decode_argument("".join(self._held), schema)
        key = json.dumps(self._key, ensure_ascii=False)
        self._emit_call(None, f"{', ' if call.arguments else '{'}{key}: {encoded}")
        call.arguments[self._key] = value
        self._key, self._state = "", _State.ARGUMENTS

    def _end_call(self) -> None:
        """Completes the open call."""
        call = self.tool_calls[-1]
        self._emit_call(None, "}" if call.arguments else "{}")
        self.tool_calls[-1] = dataclasses.replace(call, complete=True)
        self._state = _State.CONTENT

    def _emit_call(self, name: str | None, arguments: str) -> None:
        """Adds a delta of the newest call."""
        self._deltas.append(ToolCallDelta(len(self.tool_calls) - 1, name, arguments))


@functools.cache
def _pattern(tags: tuple[str, ...]) -> re.Pattern[str]:
    """Returns what finds the first of some tags; with no tags it finds nothing."""
    return re.compile("|".join(map(re.escape, tags)) or r"(?!)")


def _settled(text: str, start: int, tags: tuple[str, ...]) -> int:
    """Returns the end of the part of `text[start:]` that no tag can begin in.

    No tag has a second "<", so only the last one can begin a tag that the text breaks off.
    """
    place = text.rfind("<", start)
    if place >= 0 and any(tag.startswith(text[place:]) for tag in tags):
        return place
    return len(text)
