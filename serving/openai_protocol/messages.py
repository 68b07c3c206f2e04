"""Messages as the OpenAI API has them, turned into those that `glm53.chat.render` takes."""

import reprlib
from collections.abc import Mapping
from typing import Any

from serving.openai_protocol.common import RequestError
from serving.openai_protocol.strict_json import read_json

_ROLES = ("system", "user", "assistant", "tool")
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
    """The messages of a request, with `reasoning` and tool arguments as the template has them.

    Args:
        messages: the field of a body.

    Raises:
        RequestError: a message has what would get lost in the prompt, such as an image or an
            unknown role, or its form is wrong; the message names the place.
    """
    if not isinstance(messages, list) or not messages:
        raise RequestError(
            f"messages must be a list of at least one message, got {reprlib.repr(messages)}"
        )
    return [_message(message, f"messages[{place}]") for place, message in enumerate(messages)]


def _message(message: Any, where: str) -> dict[str, Any]:
    fields = _present(message, where)
    role = fields.get("role")
    if role not in _ROLES:
        raise RequestError(
            f"{where}.role must be one of {', '.join(_ROLES)}, got {reprlib.repr(role)}"
        )
    if "reasoning" in fields:
        reasoning = fields.pop("reasoning")
        if fields.setdefault("reasoning_content", reasoning) != reasoning:
            raise RequestError(f"{where}.reasoning and {where}.reasoning_content differ")
    for name in fields:
        if name not in _FIELDS:
            raise RequestError(f"{where} has unknown field {reprlib.repr(name)}")
    if isinstance(fields.get("content"), list):
        for place, part in enumerate(fields["content"]):
            _check_part(part, f"{where}.content[{place}]")
    calls = fields.get("tool_calls")
    if isinstance(calls, list):
        fields["tool_calls"] = [
            _tool_call(call, f"{where}.tool_calls[{place}]") for place, call in enumerate(calls)
        ]
    return fields


def _check_part(part: Any, where: str) -> None:
    """Refuses a part that the template cannot show; one without a type is left to the template."""
    if isinstance(part, Mapping) and part.get("type", "text") not in _PARTS:
        raise RequestError(
            f"{where}.type {reprlib.repr(part['type'])} is not supported: the model reads text only"
        )


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    fields = _present(call, where)
    if "function" in fields:
        fields["function"] = _function(fields["function"], f"{where}.function")
        return fields
    return _function(fields, where)


def _function(function: Any, where: str) -> dict[str, Any]:
    fields = _present(function, where)
    arguments = fields.get("arguments")
    if isinstance(arguments, str):
        arguments, fault = read_json(arguments)
        if fault is not None:
            raise RequestError(f"{where}.arguments: {fault}")
        if not isinstance(arguments, dict):
            raise RequestError(
                f"{where}.arguments must be an object in JSON, got {reprlib.repr(arguments)}"
            )
        fields["arguments"] = arguments
    return fields


def _present(value: Any, where: str) -> dict[str, Any]:
    """A copy of an object without what is null, which means the same as left out."""
    if not isinstance(value, Mapping):
        raise RequestError(f"{where} must be an object, got {reprlib.repr(value)}")
    return {name: field for name, field in value.items() if field is not None}
