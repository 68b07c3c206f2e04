"""The chat format: conversations to prompts, and outputs back to messages."""

from glm53.chat.deltas import ContentDelta, Delta, ReasoningDelta, ToolCall, ToolCallDelta
from glm53.chat.parse import ParsedMessage, parse
from glm53.chat.render import TEMPLATES, Template, render
from glm53.chat.stream import StreamingParser

__all__ = [
    "TEMPLATES",
    "ContentDelta",
    "Delta",
    "ParsedMessage",
    "ReasoningDelta",
    "StreamingParser",
    "Template",
    "ToolCall",
    "ToolCallDelta",
    "parse",
    "render",
]
