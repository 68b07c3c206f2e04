"""Reads a whole model output; see `glm53.chat.stream` for how it is split."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from glm53.chat.stream import ContentDelta, ReasoningDelta, StreamingParser, ToolCall


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

    Any text is a message: what has the form of no tool call is reasoning or content.

    Args:
        text: The output, without the stop token.
        tools: The tools that the prompt offered, see `check_tools`.
        starts_in_reasoning: Whether the prompt ended in `<think>`.

    Raises:
        ValueError: A tool is malformed.
    """
    parser = StreamingParser(tools, starts_in_reasoning=starts_in_reasoning)
    deltas = parser.push(text) + parser.finish()
    reasoning = "".join(delta.text for delta in deltas if isinstance(delta, ReasoningDelta))
    content = "".join(delta.text for delta in deltas if isinstance(delta, ContentDelta))
    return ParsedMessage(reasoning or None, content or None, tuple(parser.tool_calls))
