"""Parts that both routes share: fields of a body, and parts of a response."""

import dataclasses
import re
import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from glm53.tokenizer import Tokenizer
from serving.requests.input_processor import Prompt
from serving.requests.outputs import RequestOutput, TokenLogprobs
from serving.requests.sampling_params import MAX_LOGPROBS, SamplingParams

ErrorCode = Literal["invalid_request", "model_not_found"]

MAX_CHOICES = 128
"""Most sequences of a prompt, `n`."""

_LEAST_LOGPROB = -9999.0  # In place of -inf, which JSON does not have; vLLM's value.

_SAMPLING_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "min_tokens",
    "allowed_token_ids",
    "bad_words",
    "skip_special_tokens",
)
# Bookkeeping of the caller's, which changes no output.
_IGNORED_FIELDS = ("user", "metadata", "store", "service_tier")
# Fields of which only some values can be honoured.
_LIMITED_FIELDS: Mapping[str, tuple[Any, ...]] = {
    "stream": (False,),
    "stream_options": (),
    "response_format": ({"type": "text"},),
}
_SHARED_FIELDS = (
    "model",
    "n",
    "max_tokens",
    "logit_bias",
    "logprobs",
    "prompt_logprobs",
    *_SAMPLING_FIELDS,
    *_IGNORED_FIELDS,
    *_LIMITED_FIELDS,
)

Respond = Callable[[Sequence[RequestOutput], Tokenizer, str, int], dict[str, Any]]
"""Makes a response's body of: an output a prompt, the model's tokenizer, letters that no other
response has, and the time in seconds since 1970."""


class RequestError(ValueError):
    """A request that is refused.

    Attributes:
        code: what kind of fault it is.
    """

    def __init__(self, message: str, code: ErrorCode = "invalid_request") -> None:
        super().__init__(message)
        self.code: ErrorCode = code


@dataclasses.dataclass(frozen=True)
class APIRequest:
    """A body, understood.

    Attributes:
        prompts: what is to be continued.
        params: how, for all of them.
        respond: makes the response's body of their outputs.
    """

    prompts: Sequence[Prompt]
    params: SamplingParams
    respond: Respond


def read_fields(
    body: Any, further: Sequence[str], limited: Mapping[str, tuple[Any, ...]]
) -> dict[str, Any]:
    """The fields of a body that are there and not null, which means the same as left out.

    Args:
        body: the body.
        further: names of the route's own fields.
        limited: those of which only the values given are honoured.

    Raises:
        RequestError: the body is no object, or has a field or a value that is not known.
    """
    if not isinstance(body, Mapping):
        raise RequestError(f"body must be an object, got {reprlib.repr(body)}")
    known = {*_SHARED_FIELDS, *further, *limited}
    for name in body:
        if name not in known:
            raise RequestError(f"unknown field {reprlib.repr(name)}")
    fields = {name: value for name, value in body.items() if value is not None}
    for name, accepted in {**_LIMITED_FIELDS, **limited}.items():
        if name in fields and not any(_same(fields[name], value) for value in accepted):
            hint = f": it may only be {accepted[0]!r}" if accepted else ""
            raise RequestError(f"{name} {reprlib.repr(fields[name])} is not supported{hint}")
    return fields


def read_model(fields: Mapping[str, Any], served_model_names: Sequence[str]) -> str:
    """The name of the model that a request asks for, the first one that is served by default.

    Raises:
        RequestError: it is not served; the code is "model_not_found" then.
    """
    model = fields.get("model", served_model_names[0])
    if not isinstance(model, str):
        raise RequestError(f"model must be a string, got {reprlib.repr(model)}")
    if model not in served_model_names:
        served = ", ".join(repr(name) for name in served_model_names)
        raise RequestError(
            f"model {reprlib.repr(model)} is not served, only {served}", "model_not_found"
        )
    return model


def read_bool(fields: Mapping[str, Any], name: str) -> bool:
    """A field that is true or false, false by default."""
    value = fields.get(name, False)
    if not isinstance(value, bool):
        raise RequestError(f"{name} must be true or false, got {reprlib.repr(value)}")
    return value


def read_int(fields: Mapping[str, Any], name: str, low: int, high: int | None = None) -> int | None:
    """A field that is an integer in a range, None by default."""
    value = fields.get(name)
    if value is None:
        return None
    is_int = isinstance(value, int) and not isinstance(value, bool)
    if not is_int or value < low or (high is not None and value > high):
        bounds = f"of at least {low}" if high is None else f"from {low} to {high}"
        raise RequestError(f"{name} must be an integer {bounds}, got {reprlib.repr(value)}")
    return value


def read_sampling(
    fields: Mapping[str, Any],
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> SamplingParams:
    """The parameters that both routes have, with those that each reads in its own way.

    Raises:
        ValueError: a value is refused; the message names its field.
    """
    given = {name: fields[name] for name in _SAMPLING_FIELDS if name in fields}
    return SamplingParams(
        **given,
        n=read_int(fields, "n", 1, MAX_CHOICES) or 1,
        logit_bias=_logit_bias(fields.get("logit_bias")),
        max_tokens=max_tokens,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def read_prompt_logprobs(fields: Mapping[str, Any]) -> int | None:
    """The field `prompt_logprobs`."""
    return read_int(fields, "prompt_logprobs", 0, MAX_LOGPROBS)


def usage(outputs: Sequence[RequestOutput]) -> dict[str, int]:
    """Tokens of prompts, each counted once, and of their outputs."""
    read = sum(len(output.prompt_token_ids) for output in outputs)
    written = sum(len(part.token_ids) for output in outputs for part in output.outputs)
    return {
        "prompt_tokens": read,
        "completion_tokens": written,
        "total_tokens": read + written,
    }


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """A token's text; `bytes:` and its bytes, as OpenAI has it, if it is part of a character."""
    data = tokenizer.token_bytes(token_id, skip_special_tokens=False)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def finite(logprob: float) -> float:
    """A log-probability that JSON can hold."""
    return max(float(logprob), _LEAST_LOGPROB)


def prompt_logprobs_json(
    positions: Sequence[TokenLogprobs | None] | None,
) -> list[dict[str, Any] | None] | None:
    """Log-probabilities of a prompt by token id, as vLLM's `prompt_logprobs`."""
    if positions is None:
        return None
    return [
        None
        if position is None
        else {
            str(token): {
                "logprob": finite(entry.logprob),
                "rank": entry.rank,
                "decoded_token": entry.decoded_token,
            }
            for token, entry in position.items()
        }
        for position in positions
    ]


def _same(value: Any, accepted: Any) -> bool:
    """Equality that tells 1 from true."""
    return type(value) is type(accepted) and value == accepted


def _logit_bias(value: Any) -> dict[int, float] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise RequestError(f"logit_bias must be an object, got {reprlib.repr(value)}")
    for key in value:
        if not re.fullmatch("0|[1-9][0-9]{0,17}", key):
            raise RequestError(f"logit_bias has key {reprlib.repr(key)}, which is no token id")
    return {int(key): bias for key, bias in value.items()}
