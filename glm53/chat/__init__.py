"""The chat format: conversations to prompts, and outputs back to messages."""

from glm53.chat.deltas import ContentDelta, Delta, ReasoningDelta, ToolCall, ToolCallDelta
from glm53.chat.messages import read_messages
from glm53.chat.parse import ParsedMessage, ends_in_reasoning, parse
from glm53.chat.render import render
from glm53.chat.stream import StreamingParser
from glm53.chat.templates import TEMPLATES, Template

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
    "ends_in_reasoning",
    "parse",
    "read_messages",
    "render",
]
