"""Turns prompts and parameters into requests, and refuses what cannot be served."""

import dataclasses
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from glm53 import chat
from glm53.tokenizer import Tokenizer
from kvcache import EncodedTokens
from serving.generation_config import GenerationConfig
from serving.output_text import OutputText
from serving.request import Continuation, Request
from serving.sampling.state import SlotSampling
from serving.sampling_params import SamplingParams

Prompt = str | Mapping[str, Any]
"""Text, or a dict with `prompt`, `prompt_token_ids`, or `messages` and what `LLM.chat` takes."""

_ENDS = {"add_generation_prompt": True, "continue_final_message": False}
"""Fields that say how a conversation's text ends, with their defaults."""

_BEYOND_GREEDY = {
    "repetition_penalty": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "min_tokens": 0,
}

_NUMBERS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)


@dataclasses.dataclass(frozen=True)
class RequestReader:
    """The limits and texts of one model.

    Attributes:
        tokenizer: None if the model has none.
        generation_config: the model's own choices.
        eos_token_ids: ids that end an output.
        vocab_size: ids of the model.
        max_model_len: longest prompt and output together, in tokens.
        rows_per_page: tokens of a page.
        device_pages: pages of the store on the device.
        host_pages: pages of the store in host memory that a running sequence may have.
        enable_prefix_caching: whether requests continue from rows of others.
    """

    tokenizer: Tokenizer | None
    generation_config: GenerationConfig
    eos_token_ids: frozenset[int]
    vocab_size: int
    max_model_len: int
    rows_per_page: int
    device_pages: int
    host_pages: int
    enable_prefix_caching: bool = True

    def read(
        self, request_id: str, prompt: Prompt, params: SamplingParams, priority: int = 0
    ) -> Request:
        """The request for a prompt. Any thread may call it.

        Raises:
            ValueError, TypeError: something is refused.
        """
        if not isinstance(priority, int) or isinstance(priority, bool):
            raise TypeError(f"priority must be an integer, got {priority!r}")
        if not isinstance(params, SamplingParams):
            raise TypeError(f"parameters must be SamplingParams, got {type(params).__name__}")
        text, token_ids = self._token_ids(prompt)
        params = params.filled(self.generation_config.sampling)
        self._check_ids(token_ids, params)
        room = self.max_model_len - len(token_ids)
        needed = 0 if params.max_tokens == 0 else 1
        if room < needed:
            raise ValueError(
                f"the prompt has {len(token_ids)} tokens, which leaves no room for output within "
                f"max_model_len {self.max_model_len}"
            )
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        if params.min_tokens > max_tokens:
            raise ValueError(
                f"min_tokens {params.min_tokens} is more than the {max_tokens} tokens for which "
                f"max_tokens and max_model_len {self.max_model_len} leave room"
            )
        # Without output a token is sampled all the same; no row is written for it.
        num_sampled = max(max_tokens, 1)
        self._check_pages(len(token_ids), num_sampled, params)
        parts = [
            self._continuation(token_ids, _numbered(params, number), num_sampled, priority)
            for number in range(params.n)
        ]
        encoded = None
        if self.enable_prefix_caching:
            # It takes tens of milliseconds for a million tokens: no step should wait for it.
            encoded = EncodedTokens(token_ids)
            encoded.encode_pages(self.rows_per_page)
        return Request(request_id, text, parts, encoded=encoded)

    def _token_ids(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, str):
            prompt = {"prompt": prompt}
        if not isinstance(prompt, Mapping):
            raise TypeError(f"the prompt must be text or a dict, got {type(prompt).__name__}")
        if "messages" in prompt:
            text = _render(prompt)
            return text, self._checked_ids(self._encode("the conversation", text))
        unknown = set(prompt) - {"prompt", "prompt_token_ids"}
        if unknown:
            raise ValueError(f"the prompt has unknown field {min(unknown, key=str)!r}")
        text, token_ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
        if token_ids is not None:
            is_array = isinstance(token_ids, np.ndarray) and token_ids.ndim == 1
            if not is_array and not isinstance(token_ids, list | tuple):
                raise TypeError("prompt_token_ids must be a list of ids")
            if text is not None and not isinstance(text, str):
                raise TypeError(f"prompt must be text, got {type(text).__name__}")
            return text, self._checked_ids(token_ids)
        if not isinstance(text, str):
            raise ValueError("the prompt needs 'prompt' text or 'prompt_token_ids'")
        return text, self._checked_ids(self._encode("the prompt", text))

    def _encode(self, what: str, text: str) -> list[int]:
        if self.tokenizer is None:
            raise ValueError(f"{what} is text, but the model has no tokenizer.json: pass token ids")
        try:
            return self.tokenizer.encode(text)
        except UnicodeEncodeError as error:
            raise ValueError(f"{what} is not valid Unicode: {error}") from error

    def _checked_ids(self, token_ids: Sequence[Any] | np.ndarray) -> list[int]:
        if not len(token_ids):
            raise ValueError("the prompt is empty: it needs at least one token")
        for token in token_ids:
            is_id = isinstance(token, int | np.integer) and not isinstance(token, bool)
            if not is_id or not 0 <= token < self.vocab_size:
                raise ValueError(
                    f"the prompt holds token id {token!r}, which is not in 0..{self.vocab_size - 1}"
                )
        return [int(token) for token in token_ids]

    def _check_ids(self, token_ids: list[int], params: SamplingParams) -> None:
        """Ids in the parameters are tokens of the model, and leave something to generate."""
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            for token in getattr(params, name) or ():
                if token >= self.vocab_size:
                    raise ValueError(
                        f"{name} holds token id {token}, which is not in 0..{self.vocab_size - 1}"
                    )
        allowed = params.allowed_token_ids
        if params.min_tokens and allowed and not set(allowed) - self._stop_ids(params):
            raise ValueError(
                f"allowed_token_ids are all stop ids, which min_tokens {params.min_tokens} excludes"
            )
        if params.stop and self.tokenizer is None:
            raise ValueError("stop is text, but the model has no tokenizer.json")

    def _check_pages(self, prompt_tokens: int, max_tokens: int, params: SamplingParams) -> None:
        needed = -(-(prompt_tokens + max_tokens - 1) // self.rows_per_page)
        if needed > self.device_pages + self.host_pages:
            raise ValueError(
                f"the prompt with max_tokens {params.max_tokens} needs {needed} pages, "
                f"device_pages is {self.device_pages} and host_memory_gib holds {self.host_pages}"
            )

    def _stop_ids(self, params: SamplingParams) -> frozenset[int]:
        eos = frozenset() if params.ignore_eos else self.eos_token_ids
        return eos | frozenset(params.stop_token_ids or ())

    def _continuation(
        self, token_ids: list[int], params: SamplingParams, max_tokens: int, priority: int
    ) -> Continuation:
        text = None
        if self.tokenizer is not None and params.detokenize:
            text = OutputText(
                self.tokenizer,
                stop=tuple(params.stop or ()),
                include_stop=params.include_stop_str_in_output,
                skip_special_tokens=params.skip_special_tokens,
                prompt_ids=token_ids,
            )
        stop_ids = self._stop_ids(params)
        return Continuation(
            token_ids,
            params,
            max_tokens,
            stop_ids,
            self._sampling(token_ids, params, stop_ids),
            text,
            priority,
            self.enable_prefix_caching,
        )

    def _sampling(
        self, token_ids: list[int], params: SamplingParams, stop_ids: frozenset[int]
    ) -> SlotSampling | None:
        plain = all(getattr(params, name) == off for name, off in _BEYOND_GREEDY.items())
        listed = params.logit_bias or params.allowed_token_ids or params.bad_words
        if params.temperature == 0 and plain and not listed:
            return None
        return SlotSampling(
            **{name: float(getattr(params, name)) for name in _NUMBERS},
            top_k=max(params.top_k or 0, 0),
            seed=secrets.randbits(63) if params.seed is None else params.seed,
            min_tokens=params.min_tokens,
            # Masked only while fewer than min_tokens are there.
            stop_ids=sorted(stop_ids) if params.min_tokens else (),
            logit_bias={token: float(bias) for token, bias in (params.logit_bias or {}).items()},
            allowed_token_ids=params.allowed_token_ids,
            bad_words=self._bad_words(params),
            prompt_token_ids=token_ids,
        )

    def _bad_words(self, params: SamplingParams) -> list[list[int]]:
        """Ids of each bad word as the start of a text and, where that differs, behind a space."""
        found = []
        for word in params.bad_words or ():
            bare = self._encode("bad_words", word.lstrip())
            spaced = self._encode("bad_words", " " + word.lstrip())
            found += [bare, spaced] if spaced != bare else [bare]
        # An id that the model lacks it cannot generate.
        return [ids for ids in found if ids and max(ids) < self.vocab_size]


def _render(prompt: Mapping[str, Any]) -> str:
    """The text of a conversation."""
    unknown = set(prompt) - {"messages", "tools", "chat_template_kwargs", *_ENDS}
    if unknown:
        raise ValueError(f"the conversation has unknown field {min(unknown, key=str)!r}")
    options = prompt.get("chat_template_kwargs") or {}
    if not isinstance(options, Mapping):
        raise TypeError(f"chat_template_kwargs must be a dict, got {type(options).__name__}")
    ends = {name: prompt.get(name, default) for name, default in _ENDS.items()}
    for name, value in ends.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be true or false, got {value!r}")
        if options.get(name, value) != value:
            raise ValueError(
                f"chat_template_kwargs.{name} {options[name]!r} contradicts {name} {value}"
            )
    for name in ("messages", "tools"):
        if name in options:
            raise ValueError(f"chat_template_kwargs.{name} is not supported: pass {name}")
    messages = chat.read_messages(prompt["messages"])
    return chat.render(messages, prompt.get("tools"), **{**options, **ends})


def _numbered(params: SamplingParams, number: int) -> SamplingParams:
    """The parameters of one of several continuations; the first tells of the prompt."""
    if number == 0:
        return params
    seed = None if params.seed is None else params.seed + number
    return dataclasses.replace(params, seed=seed, prompt_logprobs=None)
