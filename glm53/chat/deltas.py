"""Parts of an assistant's message, as they come in and as they are in the end."""

import dataclasses
from typing import Any


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
            Of a call that is broken off the closing brace never comes, nor the closing quotation
            mark of a string that is broken off.
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
        complete: False if the call was broken off, by the end of the output or by the next call.
            Arguments may be missing then, and the last one, if it is a string, may be cut short.
    """

    name: str
    arguments: dict[str, Any]
    complete: bool = True
