"""What generation returns, with vLLM's names and meanings."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Literal

import numpy as np
from jaxtyping import Float

FinishReason = Literal["stop", "length"]


@dataclasses.dataclass(frozen=True)
class Logprob:
    """Log-probability of a token, its rank from 1, and its text where there is a tokenizer."""

    logprob: float
    rank: int
    decoded_token: str | None


class TokenLogprobs(Mapping[int, Logprob]):
    """Log-probabilities at one position by token id, best first, held as arrays."""

    def __init__(
        self,
        logits: Float[np.ndarray, " vocab"],
        token_id: int,
        count: int,
        decode: Callable[[int], str] | None,
    ) -> None:
        """Keeps the `count` best tokens and `token_id`; the whole vocabulary if count is -1."""
        shifted = logits.astype(np.float64) - np.max(logits)
        logprobs = shifted - np.log(np.sum(np.exp(shifted)))
        order = np.argsort(-logprobs, kind="stable")
        ranks = np.arange(1, order.size + 1)
        if count >= 0:
            kept = (ranks <= count) | (order == token_id)
            order, ranks = order[kept], ranks[kept]
        self._token_ids, self._ranks = order.astype(np.int32), ranks.astype(np.int32)
        self._logprobs, self._decode = logprobs[order].astype(np.float32), decode

    def __getitem__(self, token_id: int) -> Logprob:
        places = np.flatnonzero(self._token_ids == token_id)
        if not places.size:
            raise KeyError(token_id)
        place = int(places[0])
        text = self._decode(token_id) if self._decode else None
        return Logprob(float(self._logprobs[place]), int(self._ranks[place]), text)

    def __iter__(self) -> Iterator[int]:
        return iter(self._token_ids.tolist())

    def __len__(self) -> int:
        return self._token_ids.size


@dataclasses.dataclass(frozen=True)
class CompletionOutput:
    """A continuation of a prompt.

    Attributes:
        index: its number among the request's continuations.
        text: decoded text without the token that stopped it; empty if the model has no tokenizer.
        token_ids: generated ids, with the one that stopped it.
        finish_reason: "stop" or "length".
        stop_reason: the id of `stop_token_ids` that stopped it, else None.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: int | None


@dataclasses.dataclass(frozen=True)
class RequestOutput:
    """A prompt and what followed.

    Attributes:
        request_id: the request's name within this LLM.
        prompt: its text, or None where only ids were given.
        prompt_token_ids: its ids.
        prompt_logprobs: None, or for each prompt token what `SamplingParams.prompt_logprobs` asked
            for; None for the first token, which nothing precedes.
        outputs: continuations.
        finished: nothing will be added.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[TokenLogprobs | None] | None
    outputs: list[CompletionOutput]
    finished: bool
