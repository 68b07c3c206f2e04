"""Writes a conversation as the prompt that GLM-5.3, and GLM-5.2, 5.1 and 5, were trained on.

One renderer serves the four models; `TEMPLATES` lists what differs.

Decisions, where public descriptions of the official templates are silent or disagree:
* GLM-5.2 with thinking off has no effort line: the line steers thinking alone.
* GLM-5 strips the reasoning that it repeats; the later models repeat it verbatim.
* GLM-5.1 writes `<think></think>` in turns after the last user message that have no reasoning,
  unless thinking is off; GLM-5 writes `</think>` there as in all other turns.
* The reminder for parts that are not text, the order of tool results, tool references and the
  empty rendering of null content are those of GLM-5.3 in all four.
* What a template drops without a word (unknown roles and part types, options that the model does
  not have) is dropped with a logged warning. A tool reference to no known tool is an error.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from glm53.chat.templates import TEMPLATES
from glm53.chat.tools import check_tools, tool_function

logger = logging.getLogger(__name__)


_TOOLS_HEAD = """<|system|>
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
"""
_TOOLS_TAIL = """</tools>

For each function call, output the function name and arguments within the following XML format:
<tool_call>{function-name}<arg_key>{arg-key-1}</arg_key><arg_value>{arg-value-1}</arg_value>\
<arg_key>{arg-key-2}</arg_key><arg_value>{arg-value-2}</arg_value>...</tool_call>"""
_HIDDEN_TOOL_KEYS = ("defer_loading", "strict")

_MEDIA = {
    "image": "image",
    "image_url": "image",
    "video": "video",
    "video_url": "video",
    "audio": "audio",
    "audio_url": "audio",
    "input_audio": "audio",
}


def render(
    messages: Sequence[Any],
    tools: Sequence[Any] | None = None,
    *,
    model: str = "glm-5.3",
    add_generation_prompt: bool = False,
    continue_final_message: bool = False,
    reasoning_effort: Any = None,
    clear_thinking: Any = None,
    enable_thinking: Any = None,
    **unknown: Any,
) -> str:
    """Returns the prompt for a conversation.

    A model's answer to a prompt that ends in `<think>` starts inside its reasoning; see
    `StreamingParser`.

    Args:
        messages: Objects with a `role` (system, user, assistant or tool) and a `content` (string,
            null, or a list of strings and part objects). Assistant messages may have
            `reasoning_content` and `tool_calls`, whose arguments are objects. Tool messages may
            have `tool_call_id`. `read_messages` makes them of the forms that the OpenAI API has.
        tools: Tool definitions, see `check_tools`.
        model: A key of `TEMPLATES`.
        add_generation_prompt: Whether to open the assistant's next turn.
        continue_final_message: Whether the model is to go on with the last message, in its content
            or, if it is an assistant's without content, in its reasoning. It may have no tool calls
            and be no tool's. An assistant's content is stripped, as the template does it.
        reasoning_effort: One of the model's effort levels; anything else means the highest.
        clear_thinking: Whether to leave out the reasoning of turns before the last user message;
            a bool, or None for what the model's template has.
        enable_thinking: Whether the model is to think; a bool, or None for yes. GLM-5.3 always
            thinks: there the option is ignored with a warning.
        **unknown: Refused.

    Raises:
        ValueError: An unknown model or option, options that contradict each other, or a malformed
            message or tool; the message has its index and field.
    """
    if unknown:
        raise ValueError(f"unknown option of the chat template: {', '.join(sorted(unknown))}")
    if model not in TEMPLATES:
        raise ValueError(f"model: expected one of {', '.join(TEMPLATES)}, got {model!r}")
    template = TEMPLATES[model]
    for option, value in (("clear_thinking", clear_thinking), ("enable_thinking", enable_thinking)):
        if value is not None and not isinstance(value, bool):
            raise ValueError(f"{option}: expected a bool, got {value!r}")
    if add_generation_prompt and continue_final_message:
        raise ValueError(
            "add_generation_prompt and continue_final_message are both true: to continue the last "
            "message, pass add_generation_prompt=False"
        )
    if enable_thinking is not None and template.thinking_off is None:
        logger.warning("enable_thinking is ignored: %s always thinks", model)
    if reasoning_effort is not None and not template.effort_levels:
        logger.warning("reasoning_effort is ignored: %s has no effort levels", model)
    opening = "<think>"
    if enable_thinking is False and template.thinking_off is not None:
        opening = template.thinking_off
    thinking = opening == "<think>"
    if clear_thinking is None:
        clear_thinking = template.clear_thinking
    tools = check_tools(tools)
    roles = [_role(message, f"messages[{index}]") for index, message in enumerate(messages)]
    last_user = max((index for index, role in enumerate(roles) if role == "user"), default=-1)
    if continue_final_message:
        _check_open_end(messages, roles)

    prompt = ["[gMASK]<sop>"]
    if template.effort_levels and thinking:
        effort = reasoning_effort if reasoning_effort in template.effort_levels else "max"
        prompt.append(f"<|system|>Reasoning Effort: {effort.capitalize()}")
    if tools:
        prompt += [_TOOLS_HEAD, *_tool_lines(tools, template.unwrap_tools), _TOOLS_TAIL]
    for index, (message, role) in enumerate(zip(messages, roles, strict=True)):
        where = f"messages[{index}]"
        if role in ("system", "user"):
            prompt.append(f"<|{role}|>{_text(message.get('content'), f'{where}.content')}")
        elif role == "assistant":
            empty = template.empty_thinking
            if index > last_user and thinking:
                empty = template.empty_thinking_now
            keep = index > last_user or not clear_thinking
            turn = _assistant(message, where, empty, keep, template.strip_reasoning)
            if continue_final_message and index == len(messages) - 1:
                turn = _open_end(message, turn, opening)
            prompt.append(turn)
        elif role == "tool":
            if index == 0 or roles[index - 1] != "tool":
                prompt.append(_observation(messages, roles, index, tools))
        else:
            logger.warning("%s is ignored: no role %r in the template", where, role)
    if add_generation_prompt:
        prompt.append(f"<|assistant|>{opening}")
    return "".join(prompt)


def _role(message: Any, where: str) -> str:
    """Returns the role of a message."""
    if not isinstance(message, Mapping):
        raise ValueError(f"{where}: expected an object, got {type(message).__name__}")
    role = message.get("role")
    if not isinstance(role, str):
        raise ValueError(f"{where}.role: expected a string, got {type(role).__name__}")
    return role


def _text(content: Any, where: str) -> str:
    """Returns content as text; `where` names its place in an error."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise ValueError(
            f"{where}: expected a string, a list of parts or null, got {type(content).__name__}"
        )
    return "".join(_part(part, f"{where}[{index}]") for index, part in enumerate(content))


def _part(part: Any, where: str) -> str:
    """Returns one part of a content list as text."""
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise ValueError(f"{where}: expected a string or an object, got {type(part).__name__}")
    kind = part.get("type")
    if not isinstance(kind, str):
        raise ValueError(f"{where}.type: expected a string, got {type(kind).__name__}")
    if kind == "text":
        if not isinstance(part.get("text"), str):
            raise ValueError(f"{where}.text: expected a string")
        return part["text"]
    if kind in _MEDIA:
        return (
            f"<reminder>You are unable to process this {_MEDIA[kind]} because you don't have "
            "multi-modal input ability. Try different methods.</reminder>"
        )
    logger.warning("%s is ignored: no part type %r in the template", where, kind)
    return ""


def _json(value: Any, where: str) -> str:
    """Returns a value as JSON; `where` names its place in an error."""
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not a JSON value: {error}") from error


def _tool_line(tool: Mapping[str, Any], where: str) -> str:
    """Returns the line that describes a tool, its keys unescaped as the template has them."""
    items = [
        f'"{key}": {_json(value, f"{where}.{key}")}'
        for key, value in tool_function(tool).items()
        if key not in _HIDDEN_TOOL_KEYS
    ]
    return f"{{{', '.join(items)}}}\n"


def _tool_lines(tools: Sequence[Mapping[str, Any]], unwrap: bool) -> list[str]:
    """Returns the lines of the tools that a prompt lists."""
    if not unwrap:
        return [_json(tool, f"tools[{index}]") + "\n" for index, tool in enumerate(tools)]
    return [
        _tool_line(tool, f"tools[{index}]")
        for index, tool in enumerate(tools)
        if not tool_function(tool).get("defer_loading")
    ]


def _assistant(message: Mapping[str, Any], where: str, empty: str, keep: bool, strip: bool) -> str:
    """Returns an assistant's turn.

    Args:
        message: The message.
        where: Its place, for errors.
        empty: What stands for reasoning that is absent or not kept.
        keep: Whether to keep the reasoning.
        strip: Whether to strip it.
    """
    content = _text(message.get("content"), f"{where}.content")
    reasoning = message.get("reasoning_content")
    if reasoning is None:
        before, tag, _ = content.partition("</think>")
        if tag:
            reasoning = before.rpartition("<think>")[2]
            content = content.rpartition("</think>")[2]
    elif not isinstance(reasoning, str):
        raise ValueError(
            f"{where}.reasoning_content: expected a string, got {type(reasoning).__name__}"
        )
    if reasoning and keep:
        thinking = f"<think>{reasoning.strip() if strip else reasoning}</think>"
    else:
        thinking = empty
    calls = "".join(_tool_call(call, field) for field, call in _tool_calls(message, where))
    return f"<|assistant|>{thinking}{content.strip()}{calls}"


def _check_open_end(messages: Sequence[Any], roles: Sequence[str]) -> None:
    """Refuses a last message that cannot be continued."""
    if not roles:
        raise ValueError("continue_final_message: there is no message to continue")
    if roles[-1] not in ("system", "user", "assistant"):
        raise ValueError(
            f"continue_final_message: the last message has role {roles[-1]!r}, which cannot be "
            "continued"
        )
    if messages[-1].get("tool_calls"):
        raise ValueError(
            f"continue_final_message: messages[{len(messages) - 1}].tool_calls end the message"
        )


def _open_end(message: Mapping[str, Any], turn: str, opening: str) -> str:
    """Returns an assistant's turn so that the model goes on with it."""
    if message.get("content") is not None:
        return turn
    if message.get("reasoning_content"):
        return turn.removesuffix("</think>")
    return f"<|assistant|>{opening}"


def _tool_calls(message: Mapping[str, Any], where: str) -> list[tuple[str, Mapping[str, Any]]]:
    """Returns the tool calls of an assistant message, each with its place."""
    calls: Any = message.get("tool_calls") or ()
    if not isinstance(calls, list | tuple):
        raise ValueError(f"{where}.tool_calls: expected a list, got {type(calls).__name__}")
    placed = [(f"{where}.tool_calls[{index}]", call) for index, call in enumerate(calls)]
    for field, call in placed:
        if not isinstance(call, Mapping):
            raise ValueError(f"{field}: expected an object, got {type(call).__name__}")
    return placed


def _tool_call(call: Mapping[str, Any], where: str) -> str:
    """Returns a tool call; its name and arguments may stand in a `function` object."""
    if call.get("function"):
        call, where = call["function"], f"{where}.function"
        if not isinstance(call, Mapping):
            raise ValueError(f"{where}: expected an object, got {type(call).__name__}")
    name, arguments = call.get("name"), call.get("arguments")
    if not isinstance(name, str) or not name:
        raise ValueError(f"{where}.name: expected a string that is not empty")
    if not isinstance(arguments, Mapping):
        hint = "; see read_messages" if isinstance(arguments, str) else ""
        raise ValueError(
            f"{where}.arguments: expected an object, got {type(arguments).__name__}{hint}"
        )
    pairs = []
    for key, value in arguments.items():
        if not isinstance(value, str):
            value = _json(value, f"{where}.arguments.{key}")
        pairs.append(f"<arg_key>{key}</arg_key><arg_value>{value}</arg_value>")
    return f"<tool_call>{name}{''.join(pairs)}</tool_call>"


def _observation(
    messages: Sequence[Mapping[str, Any]],
    roles: Sequence[str],
    start: int,
    tools: Sequence[Mapping[str, Any]],
) -> str:
    """Returns the run of tool messages that starts at `start`.

    The results are put in the order of the calls they answer if every call of the assistant
    message before them and every result has an id, all are distinct, and each result's is known.
    """
    results: list[tuple[Any, str]] = []
    for index in range(start, len(messages)):
        if roles[index] != "tool":
            break
        results += _tool_results(messages[index], f"messages[{index}]", tools)
    if start and roles[start - 1] == "assistant":
        calls = _tool_calls(messages[start - 1], f"messages[{start - 1}]")
        order = {_call_id(call): place for place, (_, call) in enumerate(calls)}
        known = len(order) == len(calls) and all(order)
        answered = {call_id for call_id, _ in results}
        if known and len(answered) == len(results) and answered <= order.keys():
            results.sort(key=lambda result: order[result[0]])
    return "<|observation|>" + "".join(text for _, text in results)


def _tool_results(
    message: Mapping[str, Any], where: str, tools: Sequence[Mapping[str, Any]]
) -> list[tuple[Any, str]]:
    """Returns the id and text of each result in a tool message.

    A message is one result, or a list of objects with an `output` and an id of its own each.
    """
    content: Any = message.get("content")
    where = f"{where}.content"
    if not _first_has(content, "output"):
        return [(_call_id(message), _tool_response(content, where, tools))]
    results = []
    for index, item in enumerate(content):
        if not isinstance(item, Mapping) or "output" not in item:
            raise ValueError(f"{where}[{index}].output: missing, the first item has one")
        output = _tool_response(item["output"], f"{where}[{index}].output", tools)
        results.append((_call_id(item), output))
    return results


def _call_id(item: Mapping[str, Any]) -> str | None:
    """Returns the id of a call, or of the call that a result answers; None if it has none."""
    call_id = item.get("tool_call_id") or item.get("id")
    return call_id if isinstance(call_id, str) else None


def _first_has(content: Any, key: str) -> bool:
    """Returns whether content is a list whose first item is an object with a certain key."""
    if not isinstance(content, list | tuple) or not content:
        return False
    return isinstance(content[0], Mapping) and key in content[0]


def _tool_response(content: Any, where: str, tools: Sequence[Mapping[str, Any]]) -> str:
    """Returns one tool result: text, or the definitions of the tools it refers to."""
    if not (_first_has(content, "type") and content[0]["type"] == "tool_reference"):
        return f"<tool_response>{_text(content, where)}</tool_response>"
    lines = []
    for index, reference in enumerate(content):
        name = reference.get("name") if isinstance(reference, Mapping) else None
        named = [(i, tool) for i, tool in enumerate(tools) if tool_function(tool)["name"] == name]
        if not named:
            raise ValueError(f"{where}[{index}].name: tools has no {name!r}")
        lines += [_tool_line(tool, f"tools[{i}]") for i, tool in named]
    return f"<tool_response><tools>\n{''.join(lines)}</tools></tool_response>"
