"""`/v1/completions`: texts or token ids, continued as they are."""

import dataclasses
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from glm53.tokenizer import IncrementalDetokenizer, Tokenizer, decode_prompt
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
from serving.requests.input_processor import Prompt
from serving.requests.outputs import CompletionOutput, RequestOutput, TokenLogprobs
from serving.requests.sampling_params import MAX_LOGPROBS

MAX_PROMPTS = 2048
"""Most prompts of a request."""

_DEFAULT_MAX_TOKENS = 16
_FIELDS = ("prompt", "echo")
_LIMITED: Mapping[str, tuple[Any, ...]] = {"suffix": (), "best_of": (1,)}


def read_completion_request(body: Any, served_model_names: Sequence[str]) -> APIRequest:
    """Understands a body.

    `max_tokens` 0 needs `echo`: the prompt and its log-probabilities are the answer then.

    Args:
        body: the decoded JSON.
        served_model_names: values of `model` that are accepted, at least one.

    Raises:
        ValueError: something is refused; the message names the field and its value.
    """
    fields = read_fields(body, _FIELDS, _LIMITED)
    model = read_model(fields, served_model_names)
    echo = read_bool(fields, "echo")
    logprobs = read_int(fields, "logprobs", 0, MAX_LOGPROBS)
    prompt_logprobs = read_prompt_logprobs(fields)
    if echo and logprobs is not None:
        if prompt_logprobs is not None:
            raise RequestError(
                f"prompt_logprobs {prompt_logprobs} with echo and logprobs: these give the prompt's"
            )
        prompt_logprobs = logprobs
    max_tokens = read_int(fields, "max_tokens", 0)
    if max_tokens is None:
        max_tokens = _DEFAULT_MAX_TOKENS
    if max_tokens == 0 and not echo:
        raise RequestError("max_tokens must be at least 1 without echo, got 0")
    params = read_sampling(
        fields,
        max_tokens=max_tokens,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )
    responder = CompletionResponder(
        model=model,
        echo=echo,
        with_logprobs=logprobs is not None,
        skip_special_tokens=params.skip_special_tokens,
    )
    return APIRequest(_prompts(fields.get("prompt")), params, responder.body)


def _prompts(value: Any) -> list[Prompt]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        kinds = {type(item) for item in value}
        if kinds == {int}:
            return [{"prompt_token_ids": value}]
        if len(value) > MAX_PROMPTS:
            raise RequestError(f"prompt has {len(value)} prompts, the limit is {MAX_PROMPTS}")
        if kinds == {str}:
            return value
        if kinds == {list}:
            return [{"prompt_token_ids": token_ids} for token_ids in value]
    raise RequestError(
        "prompt must be a text, a list of texts, a list of token ids or a list of such lists, got "
        f"{reprlib.repr(value)}"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompletionResponder:
    """Parts of a request that its response depends on, besides the outputs.

    Attributes:
        model: the name that the request gave the model.
        echo: put the prompt before each output.
        with_logprobs: give log-probabilities.
        skip_special_tokens: whether special tokens are left out of the output's text.
    """

    model: str
    echo: bool
    with_logprobs: bool
    skip_special_tokens: bool

    def body(
        self, outputs: Sequence[RequestOutput], tokenizer: Tokenizer, unique: str, created: int
    ) -> dict[str, Any]:
        """The body of a response; see `Respond`."""
        choices = [self._choice(output, part, tokenizer) for output, part in _parts(outputs)]
        return {
            "id": f"cmpl-{unique}",
            "object": "text_completion",
            "created": created,
            "model": self.model,
            "choices": [{"index": index, **choice} for index, choice in enumerate(choices)],
            "usage": usage(outputs),
        }

    def _choice(
        self, output: RequestOutput, part: CompletionOutput, tokenizer: Tokenizer
    ) -> dict[str, Any]:
        echoed = ""
        if self.echo and output.prompt is not None:
            echoed = output.prompt
        elif self.echo:
            echoed = decode_prompt(
                tokenizer, output.prompt_token_ids, part.token_ids, self.skip_special_tokens
            )
        text = echoed + part.text
        choice = {
            "text": text,
            "logprobs": None,
            "finish_reason": part.finish_reason,
            "stop_reason": part.stop_reason,
        }
        if self.with_logprobs:
            choice["logprobs"] = self._logprobs(output, part, tokenizer, len(echoed), len(text))
        elif output.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs_json(output.prompt_logprobs)
        return choice

    def _logprobs(
        self,
        output: RequestOutput,
        part: CompletionOutput,
        tokenizer: Tokenizer,
        start: int,
        end: int,
    ) -> dict[str, Any]:
        """Log-probabilities by token, those of the prompt first if it is echoed.

        Args:
            output: the prompt's output.
            part: one output.
            tokenizer: the model's.
            start: where the output starts in the choice's text.
            end: where it ends.
        """
        token_ids: list[int] = []
        entries: list[TokenLogprobs | None] = []
        offsets: list[int] = []
        if self.echo:
            token_ids += output.prompt_token_ids
            entries += output.prompt_logprobs or ()
            offsets += _offsets(IncrementalDetokenizer(tokenizer, False), output.prompt_token_ids)
        token_ids += part.token_ids
        entries += part.logprobs or ()
        detokenizer = IncrementalDetokenizer(
            tokenizer, self.skip_special_tokens, prompt_ids=output.prompt_token_ids
        )
        within = _offsets(detokenizer, part.token_ids)
        # What stopped the output has tokens, but no text.
        offsets += [min(start + offset, end) for offset in within]
        return {
            "tokens": [token_text(tokenizer, token) for token in token_ids],
            "token_logprobs": [
                None if entry is None else finite(entry.token_logprob) for entry in entries
            ],
            "top_logprobs": [
                None if entry is None else _by_text(tokenizer, entry) for entry in entries
            ],
            "text_offset": offsets,
        }


def _parts(
    outputs: Sequence[RequestOutput],
) -> Iterator[tuple[RequestOutput, CompletionOutput]]:
    for output in outputs:
        for part in output.outputs:
            yield output, part


def _offsets(detokenizer: IncrementalDetokenizer, token_ids: Sequence[int]) -> list[int]:
    """Number of characters that are complete before each token."""
    length, offsets = 0, []
    for token in token_ids:
        offsets.append(length)
        length += len(detokenizer.push(token))
    return offsets


def _by_text(tokenizer: Tokenizer, entry: TokenLogprobs) -> dict[str, float]:
    """The best tokens and the token itself; of those with the same text, the best."""
    found: dict[str, float] = {}
    for token, logprob in entry.items():
        found.setdefault(token_text(tokenizer, token), finite(logprob.logprob))
    return found
