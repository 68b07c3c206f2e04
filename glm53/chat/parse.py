"""Reads a whole model output; see `glm53.chat.stream` for how it is split."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from glm53.chat.deltas import ContentDelta, ReasoningDelta, ToolCall
from glm53.chat.stream import StreamingParser
from glm53.chat.tags import THINK_CLOSE, THINK_OPEN


@dataclasses.dataclass(frozen=True)
class ParsedMessage:
    """An assistant's message.

    Attributes:
        reasoning: The reasoning, None if there is none.
        content: The text for the user, None if there is none.
        tool_calls: The tool calls, in order.
    """

    reasoning: str | None
    content: str | None
    tool_calls: tuple[ToolCall, ...]


def parse(
    text: str, tools: Sequence[Any] | None = None, *, starts_in_reasoning: bool = True
) -> ParsedMessage:
    """Returns the message in a model's output.

    Any text is a message: what has the form of no tool call is reasoning or content. Without
    `tools` no text has that form, so that calls are returned as content: pass the tools that the
    prompt offered.

    Args:
        text: The output, without the stop token.
        tools: The tools that the prompt offered, see `check_tools`.
        starts_in_reasoning: Whether the prompt ended within reasoning, see `ends_in_reasoning`.

    Raises:
        ValueError: A tool is malformed.
    """
    parser = StreamingParser(tools, starts_in_reasoning=starts_in_reasoning)
    deltas = parser.push(text) + parser.finish()
    reasoning = "".join(delta.text for delta in deltas if isinstance(delta, ReasoningDelta))
    content = "".join(delta.text for delta in deltas if isinstance(delta, ContentDelta))
    return ParsedMessage(reasoning or None, content or None, tuple(parser.tool_calls))


def ends_in_reasoning(prompt: str) -> bool:
    """Returns whether a rendered prompt ends within an assistant's reasoning."""
    turn = prompt.rpartition("<|assistant|>")[2]
    return turn.startswith(THINK_OPEN) and THINK_CLOSE not in turn
