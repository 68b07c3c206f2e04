"""Tools that a request offers, checked for their form."""

from collections.abc import Mapping, Sequence
from typing import Any


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
