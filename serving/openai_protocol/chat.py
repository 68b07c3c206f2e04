"""`/v1/chat/completions`: conversations, continued with the assistant's next message."""

import dataclasses
import json
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from glm53.chat import ParsedMessage, ToolCall, ends_in_reasoning, parse
from glm53.tokenizer import Tokenizer
from serving.openai_protocol.common import (
    APIRequest,
    RequestError,
    finite,
    prompt_logprobs_json,
    read_bool,
    read_fields,
    read_int,
    read_model,
    read_prompt_logprobs,
    read_sampling,
    token_text,
    usage,
)
from serving.requests.outputs import CompletionOutput, RequestOutput, TokenLogprobs
from serving.requests.sampling_params import MAX_LOGPROBS

_FIELDS = (
    "messages",
    "tools",
    "tool_choice",
    "max_completion_tokens",
    "top_logprobs",
    "add_generation_prompt",
    "continue_final_message",
    "reasoning_effort",
    "chat_template_kwargs",
)
# The model cannot be held to a single call.
_LIMITED: Mapping[str, tuple[Any, ...]] = {"parallel_tool_calls": (True,)}


def read_chat_request(body: Any, served_model_names: Sequence[str]) -> APIRequest:
    """Understands a body, but for its conversation, which is read as all conversations are.

    Args:
        body: the decoded JSON.
        served_model_names: values of `model` that are accepted, at least one.

    Raises:
        ValueError: something is refused; the message names the field and its value.
    """
    fields = read_fields(body, _FIELDS, _LIMITED)
    model = read_model(fields, served_model_names)
    tools = _tools(fields)
    logprobs = _logprobs(fields)
    params = read_sampling(
        fields,
        max_tokens=_max_tokens(fields),
        logprobs=logprobs,
        prompt_logprobs=read_prompt_logprobs(fields),
    )
    prompt = {
        "messages": fields.get("messages"),
        "tools": tools,
        "chat_template_kwargs": _template_options(fields),
    }
    for name in ("add_generation_prompt", "continue_final_message"):
        if name in fields:
            prompt[name] = read_bool(fields, name)
    return APIRequest([prompt], params, ChatResponder(model=model, tools=tools).body)


def _max_tokens(fields: Mapping[str, Any]) -> int | None:
    old = read_int(fields, "max_tokens", 1)
    new = read_int(fields, "max_completion_tokens", 1)
    if old is not None and new is not None and old != new:
        raise RequestError(f"max_tokens {old} and max_completion_tokens {new} differ")
    return old if new is None else new


def _logprobs(fields: Mapping[str, Any]) -> int | None:
    wanted = read_bool(fields, "logprobs")
    top = read_int(fields, "top_logprobs", 0, MAX_LOGPROBS)
    if top is not None and not wanted:
        raise RequestError(f"top_logprobs {top} needs logprobs: true")
    return (top or 0) if wanted else None


def _tools(fields: Mapping[str, Any]) -> list[Any] | None:
    """The tools that the model is offered."""
    choice = fields.get("tool_choice", "auto")
    if choice not in ("auto", "none"):
        raise RequestError(
            f"tool_choice {reprlib.repr(choice)} is not supported: it may be 'auto' or 'none'"
        )
    tools = fields.get("tools")
    if tools is not None and not isinstance(tools, list):
        raise RequestError(f"tools must be a list, got {reprlib.repr(tools)}")
    return tools if choice == "auto" else None


def _template_options(fields: Mapping[str, Any]) -> dict[str, Any]:
    options = fields.get("chat_template_kwargs", {})
    if not isinstance(options, Mapping):
        raise RequestError(f"chat_template_kwargs must be an object, got {reprlib.repr(options)}")
    effort = fields.get("reasoning_effort", options.get("reasoning_effort"))
    if effort is None:
        return dict(options)
    if not isinstance(effort, str):
        raise RequestError(f"reasoning_effort must be a string, got {reprlib.repr(effort)}")
    other = options.get("reasoning_effort")
    if other is not None and other != effort:
        raise RequestError(
            f"reasoning_effort {effort!r} and chat_template_kwargs.reasoning_effort "
            f"{reprlib.repr(other)} differ"
        )
    return {**options, "reasoning_effort": effort}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatResponder:
    """Parts of a request that its response depends on, besides the outputs.

    Attributes:
        model: the name that the request gave the model.
        tools: the tools that the model was offered.
    """

    model: str
    tools: Sequence[Any] | None

    def body(
        self, outputs: Sequence[RequestOutput], tokenizer: Tokenizer, unique: str, created: int
    ) -> dict[str, Any]:
        """The body of a response; see `Respond`."""
        (output,) = outputs
        starts_in_reasoning = ends_in_reasoning(output.prompt or "")
        choices = [
            self._choice(part, tokenizer, f"{unique}{part.index:03d}", starts_in_reasoning)
            for part in output.outputs
        ]
        body: dict[str, Any] = {
            "id": f"chatcmpl-{unique}",
            "object": "chat.completion",
            "created": created,
            "model": self.model,
            "choices": choices,
            "usage": usage(outputs),
        }
        if output.prompt_logprobs is not None:
            body["prompt_logprobs"] = prompt_logprobs_json(output.prompt_logprobs)
        return body

    def _choice(
        self, part: CompletionOutput, tokenizer: Tokenizer, unique: str, starts_in_reasoning: bool
    ) -> dict[str, Any]:
        parsed = parse(part.text, self.tools, starts_in_reasoning=starts_in_reasoning)
        # A call that the output breaks off is shown, but is not to be made.
        called = bool(parsed.tool_calls) and all(call.complete for call in parsed.tool_calls)
        stopped = part.finish_reason == "stop"
        content = None
        if part.logprobs is not None:
            content = [_token_logprobs(tokenizer, entry) for entry in part.logprobs]
        return {
            "index": part.index,
            "message": _message(parsed, unique),
            "logprobs": None if content is None else {"content": content},
            "finish_reason": "tool_calls" if called and stopped else part.finish_reason,
            "stop_reason": part.stop_reason,
        }


def _message(parsed: ParsedMessage, unique: str) -> dict[str, Any]:
    message: dict[str, Any] = {
        "role": "assistant",
        "content": parsed.content,
        "reasoning": parsed.reasoning,
    }
    if parsed.tool_calls:
        message["tool_calls"] = [
            _tool_call(call, f"call_{unique}{number:03d}")
            for number, call in enumerate(parsed.tool_calls)
        ]
    return message


def _tool_call(call: ToolCall, call_id: str) -> dict[str, Any]:
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": call.name, "arguments": arguments},
    }


def _token_logprobs(tokenizer: Tokenizer, entry: TokenLogprobs) -> dict[str, Any]:
    best = zip(entry.best_ids.tolist(), entry.best_logprobs.tolist(), strict=True)
    return {
        **_token_logprob(tokenizer, entry.token_id, entry.token_logprob),
        "top_logprobs": [_token_logprob(tokenizer, token, logprob) for token, logprob in best],
    }


def _token_logprob(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    return {
        "token": token_text(tokenizer, token_id),
        "logprob": finite(logprob),
        "bytes": list(tokenizer.token_bytes(token_id, skip_special_tokens=False)),
    }
