"""Messages as callers write them, turned into those that the chat template takes.

Taken alike wherever a conversation comes in:
* Null means the same as left out, so content may be null.
* Role `developer` is OpenAI's later name of `system`.
* An assistant's reasoning is in `reasoning` or `reasoning_content`.
* The arguments of a tool call are an object or its JSON text. Empty, null and absent mean none.
* A tool call is such an object or, as `parse` returns it, a `ToolCall`. One that was broken off
  becomes a whole one, with the arguments that it has.

What the template would lose is refused: an image, an unknown role, an unknown field.
"""

import json
import reprlib
from collections.abc import Mapping
from typing import Any

from glm53.chat.deltas import ToolCall

_ROLES = ("system", "developer", "user", "assistant", "tool")
# The template knows the first six; the others say who spoke, or link to sources.
_FIELDS = (
    "role",
    "content",
    "reasoning_content",
    "tool_calls",
    "tool_call_id",
    "id",
    "name",
    "annotations",
)
_PARTS = ("text", "tool_reference")


def read_messages(messages: Any) -> list[dict[str, Any]]:
    """Returns a conversation's messages as `render` takes them.

    Args:
        messages: The messages; they are left as they are.

    Raises:
        ValueError: A message has what would get lost in the prompt, or its form is wrong; the error
            names the field and its value.
    """
    if not isinstance(messages, list | tuple) or not messages:
        raise ValueError(
            f"messages must be a list of at least one message, got {reprlib.repr(messages)}"
        )
    return [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _message(message: Any, where: str) -> dict[str, Any]:
    fields = _present(message, where)
    role = fields.get("role")
    if role not in _ROLES:
        raise ValueError(
            f"{where}.role must be one of {', '.join(_ROLES)}, got {reprlib.repr(role)}"
        )
    if role == "developer":
        fields["role"] = "system"
    if "reasoning" in fields:
        reasoning = fields.pop("reasoning")
        if fields.setdefault("reasoning_content", reasoning) != reasoning:
            raise ValueError(f"{where}.reasoning and {where}.reasoning_content differ")
    for name in fields:
        if name not in _FIELDS:
            raise ValueError(f"{where} has unknown field {reprlib.repr(name)}")
    if isinstance(fields.get("content"), list | tuple):
        for index, part in enumerate(fields["content"]):
            _check_part(part, f"{where}.content[{index}]")
    calls = fields.get("tool_calls")
    if isinstance(calls, list | tuple):
        fields["tool_calls"] = [
            _tool_call(call, f"{where}.tool_calls[{index}]") for index, call in enumerate(calls)
        ]
    return fields


def _check_part(part: Any, where: str) -> None:
    """Refuses a part that the template cannot show; one without a type is left to the template."""
    if isinstance(part, Mapping) and part.get("type", "text") not in _PARTS:
        raise ValueError(
            f"{where}.type {reprlib.repr(part['type'])} is not supported: the model reads text only"
        )


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    if isinstance(call, ToolCall):
        return {"name": call.name, "arguments": call.arguments}
    fields = _present(call, where)
    if "function" in fields:
        fields["function"] = _function(fields["function"], f"{where}.function")
        return fields
    return _function(fields, where)


def _function(function: Any, where: str) -> dict[str, Any]:
    fields = _present(function, where)
    return {**fields, "arguments": _arguments(fields.get("arguments"), f"{where}.arguments")}


def _arguments(arguments: Any, where: str) -> Mapping[str, Any]:
    """Returns a call's arguments by name."""
    found = arguments
    if isinstance(arguments, str):
        try:
            found = json.loads(arguments) if arguments.strip() else None
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"{where}: not JSON: {error}, got {reprlib.repr(arguments)}"
            ) from error
    if found is None:
        return {}
    if not isinstance(found, Mapping):
        raise ValueError(f"{where} must be an object or its JSON, got {reprlib.repr(arguments)}")
    return found


def _present(value: Any, where: str) -> dict[str, Any]:
    """Returns a copy of an object without what is null, which means the same as left out."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{where} must be an object, got {reprlib.repr(value)}")
    return {name: field for name, field in value.items() if field is not None}
