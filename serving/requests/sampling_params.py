"""Sampling parameters of a request, with vLLM's names and meanings."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from serving.options.other_names import SAMPLING_NAMES, explain_unknown_names
from serving.options.plain_values import plain_value

Number = float | int
MAX_LOGPROBS = 20
"""Most `logprobs` of a token, short of the whole vocabulary (-1)."""

MAX_CONTINUATIONS = 1 << 14
"""Most sequences of a prompt, `n`."""

# Taken where neither the caller nor the model says anything.
_DEFAULTS = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}


@explain_unknown_names(SAMPLING_NAMES)
@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Choices about the tokens to generate.

    Numbers and arrays of numpy are taken, and kept as Python's. The fields whose default is None,
    up to `repetition_penalty`, then take the value of the model's `generation_config.json`, or else
    the value in brackets, which changes nothing.

    Attributes:
        temperature: divides the logits [1]; 0 is greedy: the most likely token, the lowest id among
            equals.
        top_p: keep the fewest most likely tokens with this much probability together [1].
        top_k: keep this many most likely tokens; 0 and -1 are all [0].
        min_p: keep tokens at least this likely relative to the most likely one [0].
        repetition_penalty: divides positive logits, and multiplies negative ones, of tokens that
            the prompt or output holds [1].
        presence_penalty: subtracted from the logits of tokens that the output holds.
        frequency_penalty: subtracted once for each time that the output holds the token.
        seed: makes the output repeatable, alone or in any batch; None and -1 are a new one each
            time.
        n: how many sequences; the i-th, from 0, has seed `seed + i`, modulo 2**64.
        stop: texts that end the output, which is cut before them.
        stop_token_ids: ids that end the output, besides the model's end-of-sequence ids.
        include_stop_str_in_output: leave the stop text, or the stop token's text, in the text.
        ignore_eos: go on past end-of-sequence ids.
        min_tokens: tokens to generate before anything ends the output.
        max_tokens: most tokens to generate; None is up to the model's length limit, and 0 gives
            the prompt's log-probabilities alone.
        logprobs: log-probabilities to return for each output token: that many best and the token
            itself, before penalties and temperature; -1 is the whole vocabulary.
        prompt_logprobs: the same for each prompt token.
        logit_bias: added to the logits of these token ids, -100 to 100.
        allowed_token_ids: nothing else is generated; None is no limit.
        bad_words: texts not to generate, each as its tokens are; also behind a space, unless it
            begins with white space itself. A word is let through where nothing else is left.
        detokenize: give text, also of tokens in log-probabilities, and not only ids.
        skip_special_tokens: leave special tokens out of the text.

    Raises:
        TypeError: an unknown field; the message says what it is called here, if it is known from
            elsewhere.
        ValueError: a field is out of range.
    """

    temperature: Number | None = None
    top_p: Number | None = None
    top_k: int | None = None
    min_p: Number | None = None
    repetition_penalty: Number | None = None
    presence_penalty: Number = 0.0
    frequency_penalty: Number = 0.0
    seed: int | None = None
    n: int = 1
    stop: str | Sequence[str] | None = ()
    stop_token_ids: Sequence[int] | None = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    max_tokens: int | None = 16
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, Number] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = ()
    detokenize: bool = True
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            value = plain_value(getattr(self, name))
            object.__setattr__(self, name, tuple(value) if isinstance(value, list) else value)
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name in ("stop", "stop_token_ids", "bad_words"):
            if getattr(self, name) is None:
                object.__setattr__(self, name, ())
        if _is_int(self.seed, -1) and self.seed == -1:
            object.__setattr__(self, "seed", None)
        self._check_numbers()
        self._check_lists()
        for name in (
            "ignore_eos",
            "include_stop_str_in_output",
            "detokenize",
            "skip_special_tokens",
        ):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be true or false, got {getattr(self, name)!r}")
        if self.stop and not self.detokenize:
            raise ValueError("stop needs text: set detokenize, or use stop_token_ids")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens {self.min_tokens} is more than max_tokens {self.max_tokens}"
            )

    def _check_numbers(self) -> None:
        for name, low, high in (
            ("temperature", 0, 2**16),
            ("min_p", 0, 1),
            ("presence_penalty", -2, 2),
            ("frequency_penalty", -2, 2),
        ):
            value = getattr(self, name)
            if not self._left_out(name) and not (_is_number(value) and low <= value <= high):
                raise ValueError(f"{name} must be a number from {low} to {high}, got {value!r}")
        for name, most in (("top_p", 1), ("repetition_penalty", 1e6)):
            value = getattr(self, name)
            if not self._left_out(name) and not (_is_number(value) and 0 < value <= most):
                raise ValueError(f"{name} must be above 0 and at most {most:g}, got {value!r}")
        for name, least in (
            ("top_k", -1),
            ("n", 1),
            ("min_tokens", 0),
            ("max_tokens", 0),
            ("logprobs", -1),
            ("prompt_logprobs", -1),
            ("seed", -(2**63)),
        ):
            value = getattr(self, name)
            if not self._left_out(name) and not _is_int(value, least):
                raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")
        for name, most in (
            ("n", MAX_CONTINUATIONS),
            ("logprobs", MAX_LOGPROBS),
            ("prompt_logprobs", MAX_LOGPROBS),
            ("seed", 2**64 - 1),
            ("top_k", 2**31 - 1),
        ):
            value = getattr(self, name)
            if value is not None and value > most:
                raise ValueError(f"{name} must be at most {most}, got {value!r}")

    def _left_out(self, name: str) -> bool:
        may_be_none = name == "max_tokens" or self.__dataclass_fields__[name].default is None
        return may_be_none and getattr(self, name) is None

    def _check_lists(self) -> None:
        for name in ("stop", "bad_words"):
            texts = getattr(self, name)
            if not isinstance(texts, tuple) or not all(
                isinstance(text, str) and text for text in texts
            ):
                raise ValueError(f"{name} must be texts that are not empty, got {texts!r}")
        for name in ("stop_token_ids", "allowed_token_ids"):
            ids = getattr(self, name)
            if name == "allowed_token_ids" and ids is None:
                continue
            if not isinstance(ids, tuple) or not all(_is_int(token, 0) for token in ids):
                raise ValueError(f"{name} must be token ids, got {ids!r}")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise ValueError("allowed_token_ids is empty, which leaves no token to generate")
        if self.logit_bias is None:
            return
        if not isinstance(self.logit_bias, Mapping):
            raise ValueError(f"logit_bias must map token ids to numbers, got {self.logit_bias!r}")
        for token, bias in self.logit_bias.items():
            if not _is_int(token, 0) or not _is_number(bias) or not -100 <= bias <= 100:
                raise ValueError(
                    f"logit_bias must map token ids to numbers from -100 to 100, got "
                    f"{token!r}: {bias!r}"
                )

    def clone(self) -> "SamplingParams":
        """A copy that shares nothing with this one."""
        return dataclasses.replace(self)

    def filled(self, defaults: Mapping[str, Any]) -> "SamplingParams":
        """These parameters, what the caller left out taken from `defaults`, then from ours."""
        missing = {
            name: defaults.get(name, value)
            for name, value in _DEFAULTS.items()
            if getattr(self, name) is None
        }
        return dataclasses.replace(self, **missing)


def _is_int(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_number(value: object) -> bool:
    if isinstance(value, bool):
        return False
    return isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))
