"""What a request's `tools` say: function names, and the type of each argument."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

_PYTHON_WORDS = {"True": True, "False": False, "None": None}


def check_tools(tools: Any) -> Sequence[Mapping[str, Any]]:
    """Returns the tools of a request, having checked their form.

    Args:
        tools: None, or a list of `{"type": "function", "function": {"name": ...}}` objects; the
            inner object may also stand alone.

    Raises:
        ValueError: A tool is malformed; the message has its index and field.
    """
    if tools is None:
        return ()
    if not isinstance(tools, list | tuple):
        raise ValueError(f"tools: expected a list, got {type(tools).__name__}")
    for index, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise ValueError(f"tools[{index}]: expected an object, got {type(tool).__name__}")
        field = f"tools[{index}].function" if "function" in tool else f"tools[{index}]"
        function = tool_function(tool)
        if not isinstance(function, Mapping):
            raise ValueError(f"{field}: expected an object, got {type(function).__name__}")
        if not isinstance(function.get("name"), str) or not function["name"]:
            raise ValueError(f"{field}.name: expected a string that is not empty")
    return tools


def tool_function(tool: Mapping[str, Any]) -> Any:
    """Returns the object with the name and parameters of a tool."""
    return tool.get("function", tool)


def parameter_schemas(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the JSON schema of each argument of a tool, empty if the tool gives none."""
    parameters = tool_function(tool).get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    return properties if isinstance(properties, Mapping) else {}


def decode_argument(text: str, schema: Any) -> tuple[Any, str]:
    """Returns the value of an argument as the model wrote it, and that value as JSON.

    The chat template writes strings bare and all other values as JSON. So the text is the value
    where the schema allows only strings. Elsewhere it is JSON if it reads as JSON that is no
    string and, in a union with strings, has a type that the union allows. `True`, `False` and
    `None` count as JSON. All else is a string, verbatim.

    Args:
        text: What stands between the value's tags.
        schema: The argument's JSON schema; anything but an object counts as unknown.
    """
    types = _schema_types(schema)
    if types != {"string"}:
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            value = _PYTHON_WORDS.get(text.strip(), text)
        if not isinstance(value, str) and _fits(value, types):
            try:
                encoded = json.dumps(value, ensure_ascii=False, allow_nan=False)
                encoded.encode()
                return value, encoded
            except (ValueError, RecursionError):
                pass  # Python reads more than JSON has: infinities, and halves of characters.
    return text, json.dumps(text, ensure_ascii=False)


def _fits(value: Any, types: set[str] | None) -> bool:
    """Returns whether a value may stand where a bare string of the same letters may not."""
    if types is None or "string" not in types:
        return True
    return _json_type(value) in types or (_json_type(value) == "integer" and "number" in types)


def _schema_types(schema: Any) -> set[str] | None:
    """Returns the names of the JSON types that a schema allows, None if it does not say."""
    if not isinstance(schema, Mapping):
        return None
    declared = schema.get("type")
    if isinstance(declared, str):
        return {declared}
    if isinstance(declared, list):
        return {name for name in declared if isinstance(name, str)}
    for union in (schema.get("anyOf"), schema.get("oneOf")):
        if isinstance(union, list):
            members = [_schema_types(member) for member in union]
            known = [types for types in members if types is not None]
            return set().union(*known) if len(known) == len(members) else None
    if isinstance(schema.get("enum"), list):
        return {_json_type(value) for value in schema["enum"]}
    return None


def _json_type(value: Any) -> str:
    """Returns the name that JSON schema has for the type of a decoded JSON value."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
        case _:
            return "object"
