"""Splits a model's output into reasoning, content and tool calls while it comes in.

The output is `reasoning</think>content<tool_call>name<arg_key>key</arg_key><arg_value>value
</arg_value>...</tool_call>...`, without the line break. The prompt has already opened the
reasoning. The parser follows the text once, piece by piece, so every split of a text into pieces
gives the same result, and `parse` is this parser fed one piece.

Two guarantees hold for any text. Nothing that a model says is lost: what is not of a call's form is
reasoning or content, verbatim, but for the whitespace and the two tags that the decisions below
drop. And what is malformed costs no well-formed call behind it.

Decisions, where the format or SGLang 0.5.23 and vLLM 0.33.0 leave a choice:
* Reasoning and content are verbatim, inner tags and whitespace included: a client that sends them
  back gets the prompt whose prefix is cached.
* Whitespace is a call's layout, and dropped, between the call's tags, around its name and its keys,
  and at the end of the content if there are calls.
* Text after a tool call is content too.
* `<tool_call>` begins a call if the name of a known tool and `<arg_key>` or `</tool_call>` follow,
  else it is text: within reasoning, content and calls alike. Without tools all tags are text.
* A `<think>` that repeats the prompt's is dropped. A call inside reasoning ends the reasoning; a
  `</think>` after it is then dropped.
* A function's name is stripped, a string argument never; `decode_argument` has the rules of types.
* What has no place in a call (a key without a value, a value without a key, text between them) is
  content, tags included, and the call goes on.
* A call ends with `</tool_call>`. The next call, or the end of the output, breaks it off. What is
  complete of it stays, and so does a string as far as it has come; other unfinished parts are
  content.
* A value ends with `</arg_value>`, so it may hold other tags, and even calls. Where `</tool_call>`
  or a call stands in it, the model may as well have left the `</arg_value>` out. What follows
  decides: an `</arg_value>` with `<arg_key>` or `</tool_call>` behind it, which closes no later
  `<arg_value>`, makes all of it the value; if the output ends without one, the value ended there.

Strings are emitted as they grow, other arguments with their closing tag. Only what may still be
read in two ways waits: part of a tag, a name, a key, a value behind a doubtful end, and the start
of a value that may be a string or of another type, see `starts_string`.
"""

import dataclasses
import enum
import json
from collections.abc import Sequence
from typing import Any

from glm53.chat.argument_types import ArgumentTypes, Types, decode_argument, starts_string
from glm53.chat.deltas import ContentDelta, Delta, ReasoningDelta, ToolCall, ToolCallDelta
from glm53.chat.tags import (
    CALL_CLOSE,
    CALL_OPEN,
    CALL_TAGS,
    KEY_CLOSE,
    KEY_OPEN,
    THINK_CLOSE,
    THINK_OPEN,
    VALUE_CLOSE,
    VALUE_OPEN,
    end_of_text,
    tag_pattern,
)
from glm53.chat.tools import check_tools, tool_function

_BEHIND_VALUE = (KEY_OPEN, CALL_CLOSE)
"""Tags that follow a whole value; the end of the output may stand for one."""


class _State(enum.Enum):
    """Place in the grammar."""

    REASONING = enum.auto()
    CONTENT = enum.auto()
    NAME = enum.auto()  # Behind <tool_call>; until a known name is complete this may be no call.
    ARGUMENTS = enum.auto()  # Of a call, between its arguments.
    KEY = enum.auto()
    KEY_ENDED = enum.auto()  # Between a key and its value.
    VALUE = enum.auto()
    DOUBT = enum.auto()  # Within a value that may have ended before.


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
            tools: The tools that the prompt offered, see `check_tools`. Without them there are no
                calls: their text is reasoning or content.
            starts_in_reasoning: Whether the prompt ended within reasoning, see
                `ends_in_reasoning`. GLM-5.3's always do; those of the earlier models do unless
                thinking is off.

        Raises:
            ValueError: A tool is malformed.
        """
        functions = [tool_function(tool) for tool in check_tools(tools)]
        self._types = {
            function["name"]: ArgumentTypes(function.get("parameters")) for function in functions
        }
        self.tool_calls: list[ToolCall] = []
        self._deltas: list[Delta] = []  # What the current push or finish has found.
        self._buffer = ""  # Text not looked at yet; between pushes, what may become a tag.
        self._before_think_open = starts_in_reasoning
        self._state = _State.REASONING if starts_in_reasoning else _State.CONTENT
        self._late_close = False  # Whether a call ended the reasoning, so a </think> may follow.
        self._space = ""  # Whitespace at the end of the content so far, not emitted yet.
        self._outer = self._state  # Where the text belongs if a <tool_call> begins no call.
        self._name: list[str] = []  # Text of what may be a name.
        self._stray: list[str] = []  # Text and tags between arguments.
        self._argument: list[str] = []  # Text of an argument from its <arg_key>, if not emitted.
        self._key = ""
        self._value: list[str] = []
        self._streams: bool | None = None  # Whether that is emitted as it comes: `starts_string`.
        self._doubtful: list[str] = []  # Text and tags of a value from its doubtful end.
        self._depth = 0  # Values opened and not closed in there.
        self._may_close = False  # Whether its last tag is an </arg_value>, to be told by the next.
        self._goes_on: bool | None = None  # Whether the open value does, once the output has ended.

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
        while tag := tag_pattern(self._tags()).search(self._buffer, start):
            self._take_text(self._buffer[start : tag.start()])
            self._take_tag(tag.group())
            start = tag.end()
        end = end_of_text(self._buffer, start, self._tags())
        self._take_text(self._buffer[start:end])
        self._buffer = self._buffer[end:]
        return self._take_deltas()

    def finish(self) -> list[Delta]:
        """Returns what the end of the output settles. The parser takes nothing after it."""
        self._take_text(self._buffer)
        if self._state is _State.DOUBT and not (self._may_close and not self._depth):
            self._read_again()
        if self._state is _State.DOUBT:
            self._go_on()
        if self._state is _State.NAME:
            self._reject_name()
        if self.tool_calls and not self.tool_calls[-1].complete:
            self._break_off()
        if self._space and not self.tool_calls:
            self._deltas.append(ContentDelta(self._space))
        return self._take_deltas()

    def _take_deltas(self) -> list[Delta]:
        """Returns the deltas found and starts a new list."""
        deltas, self._deltas = self._deltas, []
        return deltas

    def _tags(self) -> tuple[str, ...]:
        """Returns the tags that mean something in the current state."""
        if not self._types:
            return (THINK_CLOSE,) if self._state is _State.REASONING else ()
        match self._state:
            case _State.NAME:
                return (*CALL_TAGS, THINK_CLOSE)
            case _State.VALUE:
                return (VALUE_CLOSE, CALL_OPEN, CALL_CLOSE)
            case _State.DOUBT:
                return (*CALL_TAGS, THINK_CLOSE)
            case _State.CONTENT:
                return (CALL_OPEN, THINK_CLOSE) if self._late_close else (CALL_OPEN,)
            case _State.REASONING:
                return (CALL_OPEN, THINK_CLOSE)
            case _:
                return (*CALL_TAGS, THINK_CLOSE) if self._late_close else CALL_TAGS

    def _take_text(self, text: str) -> None:
        """Handles text without tags that mean something here."""
        if not text:
            return
        match self._state:
            case _State.REASONING:
                self._deltas.append(ReasoningDelta(text))
            case _State.CONTENT:
                self._add_content(text)
            case _State.ARGUMENTS:
                self._stray.append(text)
            case _State.NAME:
                self._name.append(text)
                name = "".join(self._name).strip()
                if not any(known.startswith(name) for known in self._types):
                    self._reject_name()
            case _State.KEY | _State.KEY_ENDED:
                self._argument.append(text)
            case _State.VALUE:
                self._add_to_value(text)
            case _State.DOUBT:
                self._doubtful.append(text)
                self._may_close &= text.isspace()

    def _take_tag(self, tag: str) -> None:
        """Handles a tag; one that means nothing here is text."""
        if tag not in self._tags():
            self._take_text(tag)
            return
        match self._state, tag:
            case _State.DOUBT, _:
                self._resolve(tag)
            case _State.NAME, _:
                self._end_name(tag)
            case _State.VALUE, _ if tag == VALUE_CLOSE:
                self._end_value()
            case _State.VALUE, _ if tag == CALL_CLOSE:
                if self._goes_on is False:
                    self._end_value()
                    self._end_call()
                else:
                    self._doubt([tag])
            case (_State.KEY, _) if tag == KEY_CLOSE and self._key_text().strip():
                self._key = self._key_text().strip()
                self._argument.append(tag)
                self._state = _State.KEY_ENDED
            case (_State.KEY_ENDED, _) if tag == VALUE_OPEN:
                self._begin_value()
            case ((_State.KEY | _State.KEY_ENDED), _):
                self._reject_argument()
                self._take_tag(tag)
            case _ if tag == CALL_OPEN:
                self._outer, self._state, self._name = self._state, _State.NAME, []
            case _ if tag == THINK_CLOSE:
                if self._state is _State.REASONING:
                    self._state = _State.CONTENT
                self._late_close = False
            case _ if tag == CALL_CLOSE:
                self._end_call()
            case _ if tag == KEY_OPEN:
                self._give_up_stray()
                self._argument, self._state = [tag], _State.KEY
            case _:
                self._stray.append(tag)

    def _add_content(self, text: str) -> None:
        """Emits content, but for whitespace at its end."""
        text = self._space + text
        visible = text.rstrip()
        self._space = text[len(visible) :]
        if visible:
            self._deltas.append(ContentDelta(visible))

    def _end_name(self, tag: str) -> None:
        """Handles the tag behind what may be a function's name."""
        name = "".join(self._name).strip()
        if tag not in (KEY_OPEN, CALL_CLOSE) or name not in self._types:
            self._reject_name()
            self._take_tag(tag)
        elif self._outer is _State.VALUE and self._goes_on is not False:
            self._doubt([CALL_OPEN, *self._name, tag])
        else:
            self._state = self._outer
            self._break_off()
            self._late_close |= self._outer is _State.REASONING
            self.tool_calls.append(ToolCall(name, {}, complete=False))
            self._emit_call(name, "")
            self._state = _State.ARGUMENTS
            self._take_tag(tag)

    def _reject_name(self) -> None:
        """Gives the text behind a <tool_call> back, which begins no call."""
        self._state = self._outer
        self._take_text(CALL_OPEN + "".join(self._name))

    def _key_text(self) -> str:
        """Returns the text of the open key."""
        return "".join(self._argument[1:])

    def _reject_argument(self) -> None:
        """Makes the text from an <arg_key> on, which begins no argument, stray text."""
        self._stray += self._argument
        self._argument, self._state = [], _State.ARGUMENTS

    def _give_up_stray(self) -> None:
        """Gives the text between arguments to the content, unless it is layout."""
        text = "".join(self._stray)
        if text.strip():
            self._add_content(text)
        self._stray = []

    def _begin_value(self) -> None:
        """Starts the value of the open key."""
        place = self._argument.index(KEY_CLOSE) + 1
        self._stray = self._argument[place:]
        self._give_up_stray()
        self._argument = [*self._argument[:place], VALUE_OPEN]
        self._value, self._state, self._streams = [], _State.VALUE, None
        self._stream_string()

    def _add_to_value(self, text: str) -> None:
        """Adds text to the open value, which it may show to be a string."""
        self._value.append(text)
        if self._streams:
            self._emit_string(text)
        elif self._streams is None:
            self._stream_string()

    def _stream_string(self) -> None:
        """Begins to emit the open value if what has come of it tells that it is a string."""
        text = "".join(self._value)
        self._streams = starts_string(text, self._value_types())
        if self._streams:
            self._emit_argument('"')
            self._emit_string(text)

    def _value_types(self) -> Types:
        """Returns the types of the open value."""
        return self._types[self.tool_calls[-1].name].of(self._key)

    def _end_value(self) -> None:
        """Adds an argument to the open call."""
        call, text = self.tool_calls[-1], "".join(self._value)
        if self._streams:
            call.arguments[self._key] = text
            self._emit_call(None, '"')
        else:
            value, encoded = decode_argument(text, self._value_types())
            self._emit_argument(encoded)
            call.arguments[self._key] = value
        self._argument, self._state = [], _State.ARGUMENTS

    def _end_call(self) -> None:
        """Completes the open call."""
        self._give_up_stray()
        call = self.tool_calls[-1]
        self._emit_call(None, "}" if call.arguments else "{}")
        self.tool_calls[-1] = dataclasses.replace(call, complete=True)
        self._state = _State.CONTENT

    def _break_off(self) -> None:
        """Leaves the open call, if there is one, as far as it has come."""
        if self._argument and self._state is _State.VALUE and self._streams:
            self.tool_calls[-1].arguments[self._key] = "".join(self._value)
        elif self._argument:
            value = self._value if self._state is _State.VALUE else []
            self._stray += [*self._argument, *value]
        self._argument = []
        self._give_up_stray()

    def _doubt(self, doubtful: list[str]) -> None:
        """Waits for what tells whether a value goes on behind its doubtful end."""
        self._doubtful, self._state = doubtful, _State.DOUBT
        self._depth, self._may_close = 0, False

    def _resolve(self, tag: str) -> None:
        """Takes a tag behind the doubtful end of a value, which may decide that it goes on."""
        closes = self._may_close and tag in _BEHIND_VALUE
        if closes and not self._depth:
            self._go_on()
            self._take_tag(tag)
            return
        self._depth += (tag == VALUE_OPEN) - closes
        self._doubtful.append(tag)
        self._may_close = tag == VALUE_CLOSE

    def _go_on(self) -> None:
        """Takes a value's doubtful end for text of the value, which the last tag closes."""
        place = len(self._doubtful) - self._doubtful[::-1].index(VALUE_CLOSE)
        self._state = _State.VALUE
        self._take_text("".join(self._doubtful[: place - 1]))
        self._end_value()
        self._take_text("".join(self._doubtful[place:]))

    def _read_again(self) -> None:
        """Takes a value's doubtful end for its end: the output is over, and nothing closed it."""
        tokens, lowest, goes_on, following = self._doubtful, 0, [], CALL_CLOSE
        for token in reversed(tokens):
            # A value goes on behind a token if a later tag closes one more than are opened.
            goes_on.append(lowest < 0)
            closes = token == VALUE_CLOSE and following in _BEHIND_VALUE
            lowest = min(0, lowest + (token == VALUE_OPEN) - closes)
            following = following if token.isspace() else token
        self._state = _State.VALUE
        for token, self._goes_on in zip(tokens, reversed(goes_on), strict=True):
            self._take_tag(token)

    def _emit_argument(self, start: str) -> None:
        """Adds a delta of the newest call with the open key and the start of its value."""
        key = json.dumps(self._key, ensure_ascii=False)
        self._emit_call(None, f"{', ' if self.tool_calls[-1].arguments else '{'}{key}: {start}")

    def _emit_string(self, text: str) -> None:
        """Adds a delta of the newest call with more of a string."""
        if text:
            self._emit_call(None, json.dumps(text, ensure_ascii=False)[1:-1])

    def _emit_call(self, name: str | None, arguments: str) -> None:
        """Adds a delta of the newest call."""
        self._deltas.append(ToolCallDelta(len(self.tool_calls) - 1, name, arguments))
