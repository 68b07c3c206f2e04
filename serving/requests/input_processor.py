"""Turns prompts and parameters into requests, and refuses what cannot be served."""

import dataclasses
import reprlib
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from glm53 import chat
from glm53.tokenizer import Tokenizer
from kvcache import EncodedTokens
from serving.options.plain_values import plain_value
from serving.requests.generation_config import GenerationConfig
from serving.requests.output_text import OutputText
from serving.requests.request import Request
from serving.requests.sampling_params import SamplingParams
from serving.requests.sequence import RequestSequence
from serving.sampling.state import (
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_STOP_IDS,
    SlotSampling,
)


@runtime_checkable
class ArrayLike(Protocol):
    """An array of NumPy, or of a library whose arrays it reads, as those of jax and torch."""

    def __array__(self) -> np.ndarray: ...


Prompt = str | Sequence[int] | np.ndarray | ArrayLike | Mapping[str, Any]
"""Text, token ids, or a dict with `prompt`, `prompt_token_ids`, or `messages` and what `LLM.chat`
takes."""

Prompts = Prompt | Iterable[Prompt]
Params = SamplingParams | Iterable[SamplingParams] | None

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
class InputProcessor:
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
        page_options: the options of the engine that make these pages more.
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
    page_options: str
    enable_prefix_caching: bool = True

    def read(
        self, request_id: str, prompt: Prompt, params: SamplingParams, priority: int = 0
    ) -> Request:
        """The request for a prompt. Any thread may call it.

        Raises:
            ValueError, TypeError: something is refused.
        """
        priority = plain_value(priority)
        if not isinstance(priority, int) or isinstance(priority, bool):
            raise TypeError(f"priority must be an integer, got {priority!r}")
        if not isinstance(params, SamplingParams):
            raise TypeError(f"parameters must be SamplingParams, got {type(params).__name__}")
        text, token_ids = self._token_ids(prompt)
        params = params.filled(self.generation_config.sampling)
        self._check_ids(token_ids, params)
        room = self.max_model_len - len(token_ids)
        needed = 0 if params.max_tokens == 0 else 1
        if room < 0:
            raise ValueError(
                f"the prompt has {len(token_ids)} tokens, more than max_model_len "
                f"{self.max_model_len}"
            )
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
        self._check_pages(len(token_ids), params, max_tokens)
        sampling = self._sampling(token_ids, params)
        # Without output a token is sampled all the same.
        num_sampled = max(max_tokens, 1)
        parts = [
            self._sequence(token_ids, params, sampling, number, num_sampled, priority)
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
        elif _id_list(prompt) is not None:
            prompt = {"prompt_token_ids": prompt}
        if not isinstance(prompt, Mapping):
            kind, shown = type(prompt).__name__, reprlib.repr(prompt)
            raise TypeError(f"the prompt must be text, token ids or a dict, got {kind} {shown}")
        if "messages" in prompt:
            text = _render(prompt)
            return text, self._checked_ids(self._encode("the conversation", text))
        unknown = set(prompt) - {"prompt", "prompt_token_ids"}
        if "role" in unknown:
            raise ValueError(
                "the prompt is a message of a conversation: pass the conversation to LLM.chat, or "
                'as {"messages": [...]}'
            )
        if unknown:
            raise ValueError(f"the prompt has unknown field {min(unknown, key=str)!r}")
        text, token_ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
        if token_ids is not None:
            listed = _id_list(token_ids)
            if listed is None:
                raise TypeError("prompt_token_ids must be a list of ids")
            if text is not None and not isinstance(text, str):
                raise TypeError(f"prompt must be text, got {type(text).__name__}")
            return text, self._checked_ids(listed)
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

    def _checked_ids(self, token_ids: Sequence[Any]) -> list[int]:
        if not token_ids:
            raise ValueError("the prompt is empty: it needs at least one token")
        kind = _kind_of_prompts(token_ids[0])
        if kind is not None:
            raise TypeError(f"expected one prompt, got a list of {kind}")
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
        num_stop_ids = len(self._stop_ids(params))
        if params.min_tokens and num_stop_ids > MAX_STOP_IDS:
            raise ValueError(
                f"stop_token_ids has {len(params.stop_token_ids or ())} ids: with min_tokens, at "
                f"most {MAX_STOP_IDS} stop ids are allowed, counting the model's end-of-sequence "
                f"ids; there are {num_stop_ids}"
            )
        for name in ("stop", "bad_words"):
            if getattr(params, name) and self.tokenizer is None:
                raise ValueError(f"{name} is text, but the model has no tokenizer.json")

    def _check_pages(self, prompt_tokens: int, params: SamplingParams, max_tokens: int) -> None:
        pages = self.device_pages + self.host_pages
        # The last token that is sampled has no row.
        needed = -(-(prompt_tokens + max(max_tokens, 1) - 1) // self.rows_per_page)
        if needed <= pages:
            return
        given = f"max_tokens {params.max_tokens}"
        if params.max_tokens != max_tokens:
            given += f", which is {max_tokens} within max_model_len {self.max_model_len}"
        fitting = pages * self.rows_per_page - prompt_tokens + 1
        lower = f"set max_tokens to at most {fitting}, or " if fitting > 0 else ""
        raise ValueError(
            f"the prompt has {prompt_tokens} tokens, {given}: they need {needed} pages of "
            f"{self.rows_per_page} tokens, of which the store has {pages} for a request; "
            f"{lower}raise {self.page_options}"
        )

    def _stop_ids(self, params: SamplingParams) -> frozenset[int]:
        eos = frozenset() if params.ignore_eos else self.eos_token_ids
        return eos | frozenset(params.stop_token_ids or ())

    def _sequence(
        self,
        token_ids: list[int],
        params: SamplingParams,
        sampling: SlotSampling | None,
        number: int,
        max_tokens: int,
        priority: int,
    ) -> RequestSequence:
        text = None
        if self.tokenizer is not None and params.detokenize:
            text = OutputText(
                self.tokenizer,
                stop=tuple(params.stop or ()),
                include_stop=params.include_stop_str_in_output,
                skip_special_tokens=params.skip_special_tokens,
                prompt_ids=token_ids,
            )
        if sampling is not None:
            sampling = dataclasses.replace(sampling, seed=_seed(params, number))
        return RequestSequence(
            token_ids=token_ids,
            # The first sequence carries the prompt, for all.
            params=params if number == 0 else dataclasses.replace(params, prompt_logprobs=None),
            max_tokens=max_tokens,
            stop_ids=self._stop_ids(params),
            sampling=sampling,
            text=text,
            priority=priority,
            cacheable=self.enable_prefix_caching,
        )

    def _sampling(self, token_ids: list[int], params: SamplingParams) -> SlotSampling | None:
        """Sampler's part of the parameters, without the seed of each sequence."""
        plain = all(getattr(params, name) == off for name, off in _BEYOND_GREEDY.items())
        listed = params.logit_bias or params.allowed_token_ids or params.bad_words
        if params.temperature == 0 and plain and not listed:
            return None
        return SlotSampling(
            **{name: float(getattr(params, name)) for name in _NUMBERS},
            top_k=max(params.top_k or 0, 0),
            seed=0,
            min_tokens=params.min_tokens,
            # Masked only while fewer than min_tokens are there.
            stop_ids=sorted(self._stop_ids(params)) if params.min_tokens else (),
            logit_bias={token: float(bias) for token, bias in (params.logit_bias or {}).items()},
            allowed_token_ids=params.allowed_token_ids,
            bad_words=self._bad_words(params.bad_words or ()),
            prompt_token_ids=token_ids,
        )

    def _bad_words(self, words: Sequence[str]) -> list[tuple[int, ...]]:
        """Ids of each word and, unless it begins with white space, of the word behind a space."""
        found: dict[tuple[int, ...], None] = {}
        for number, word in enumerate(words):
            where = f"bad_words[{number}]"
            for form in [word] if word[0].isspace() else [word, " " + word]:
                ids = self._encode(where, form)
                if not ids:
                    raise ValueError(f"{where} {form!r} has no tokens")
                if len(ids) > MAX_BAD_WORD_TOKENS:
                    raise ValueError(
                        f"{where} {form!r} has {len(ids)} tokens; at most {MAX_BAD_WORD_TOKENS} "
                        "are allowed"
                    )
                # An id that the model lacks it cannot generate.
                if max(ids) < self.vocab_size:
                    found[tuple(ids)] = None
        if len(found) > MAX_BAD_WORDS:
            raise ValueError(
                f"bad_words has {len(words)} words, {len(found)} with those behind a space: the "
                f"limit is {MAX_BAD_WORDS}"
            )
        return list(found)


def list_prompts(prompts: Prompts) -> list[Prompt]:
    """The prompts of a call, of which one alone needs no list.

    Args:
        prompts: one prompt, or an iterable of prompts, which is drawn to its end. What begins with
            an integer is one prompt of token ids.

    Raises:
        TypeError: it is neither.
    """
    found: list[Any] = [prompts]
    if isinstance(prompts, str | Mapping):
        return found
    if isinstance(prompts, ArrayLike):
        # Entries of other libraries' arrays are arrays themselves.
        array = np.asarray(prompts)
        prompts = array if array.ndim else array.item()
    if isinstance(prompts, bytes | bytearray) or not isinstance(prompts, Iterable):
        kind = type(prompts).__name__
        raise TypeError(f"prompts must be a prompt or an iterable of prompts, got {kind}")
    found = list(prompts)
    if found and isinstance(found[0], int | np.integer) and not isinstance(found[0], bool):
        return [found]
    return found


def prompt_text(prompt: object) -> str | None:
    """The text of a prompt that need not be well-formed, if it is given as one."""
    text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
    return text if isinstance(text, str) else None


def spread_params(params: Params, count: int) -> list[SamplingParams]:
    """The parameters of each of `count` prompts.

    Args:
        params: one for all, one each, or None for the defaults.
        count: prompts of the call.

    Raises:
        TypeError: there is something else than parameters.
        ValueError: there are more or fewer.
    """
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if isinstance(params, str | Mapping) or not isinstance(params, Iterable):
        raise TypeError(f"sampling_params must be SamplingParams, got {type(params).__name__}")
    found = list(params)
    if len(found) != count:
        raise ValueError(f"{len(found)} sampling_params for {count} prompts")
    for number, param in enumerate(found):
        if not isinstance(param, SamplingParams):
            raise TypeError(f"sampling_params[{number}] is a {type(param).__name__}")
    return found


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


def _id_list(value: object) -> Sequence[Any] | None:
    """Possible token ids as a sequence of Python's numbers; None for all else."""
    if isinstance(value, ArrayLike) and not isinstance(value, type):
        array = np.asarray(value)
        return array.tolist() if array.ndim == 1 else None
    if isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray):
        return value
    return None


def _kind_of_prompts(entry: object) -> str | None:
    """Kind of prompts in a list that begins so, if it does not hold token ids."""
    kinds = {"texts": str, "messages or other dicts": Mapping, "lists": Sequence}
    return next((name for name, kind in kinds.items() if isinstance(entry, kind)), None)


def _seed(params: SamplingParams, number: int) -> int:
    """The seed of one of several sequences, 64 bits."""
    if params.seed is None:
        return secrets.randbits(64)
    return (params.seed + number) % (1 << 64)
