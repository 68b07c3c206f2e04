"""What generation returns, with vLLM's names and meanings."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Literal

import numpy as np
from jaxtyping import Float, Int

from kvcache import CacheCounters

FinishReason = Literal["stop", "length", "abort"]


@dataclasses.dataclass(frozen=True)
class Logprob:
    """Log-probability of a token, its rank from 1, and its text where there is a tokenizer."""

    logprob: float
    rank: int
    decoded_token: str | None


@dataclasses.dataclass(frozen=True, eq=False)
class TokenLogprobs(Mapping[int, Logprob]):
    """Log-probabilities at one position by token id, best first, held as arrays.

    Holds the best tokens and, as the last where it is none of them, the token that is there.

    Attributes:
        token_id: the token that is there.
        token_logprob: its log-probability.
        token_rank: its rank.
        best_ids: the best tokens.
        best_logprobs: their log-probabilities.
        decode: gives a token's text.
    """

    token_id: int
    token_logprob: float
    token_rank: int
    best_ids: Int[np.ndarray, " best"]
    best_logprobs: Float[np.ndarray, " best"]
    decode: Callable[[int], str] | None

    def __getitem__(self, token_id: int) -> Logprob:
        if token_id == self.token_id:
            logprob, rank = self.token_logprob, self.token_rank
        else:
            places = np.flatnonzero(self.best_ids == token_id)
            if not places.size:
                raise KeyError(token_id)
            logprob, rank = float(self.best_logprobs[places[0]]), int(places[0]) + 1
        return Logprob(logprob, rank, self.decode(token_id) if self.decode else None)

    def __iter__(self) -> Iterator[int]:
        yield from self.best_ids.tolist()
        if self.token_rank > self.best_ids.size:
            yield self.token_id

    def __len__(self) -> int:
        return self.best_ids.size + (self.token_rank > self.best_ids.size)


@dataclasses.dataclass(frozen=True)
class CompletionOutput:
    """A continuation of a prompt.

    Attributes:
        index: its number among the request's continuations.
        text: decoded text without what stopped it; empty if the model has no tokenizer.
        token_ids: generated ids, with the one that stopped it.
        cumulative_logprob: sum of their log-probabilities, if `logprobs` were asked for.
        logprobs: None, or for each of them what `SamplingParams.logprobs` asked for.
        finish_reason: "stop", "length", "abort", or None while it goes on.
        stop_reason: the id of `stop_token_ids` or text of `stop` that stopped it, else None.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[TokenLogprobs] | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None


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
        error: why the request was refused or failed, with no outputs then; else None.
        cache_counters: what the cache did for the continuations that are done.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[TokenLogprobs | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    error: str | None = None
    cache_counters: CacheCounters = dataclasses.field(default_factory=CacheCounters)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated, by all continuations."""
        return sum(len(part.token_ids) for part in self.outputs)

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens found in the cache, over all continuations."""
        return self.cache_counters.cached_tokens


def failed_output(request_id: str, error: str) -> RequestOutput:
    """The output of a request that was refused or failed."""
    return RequestOutput(request_id, None, [], None, [], finished=True, error=error)
