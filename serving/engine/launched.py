"""A launch whose results are in flight to the host, and what they are once they are there."""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jaxtyping import Int64

from serving.requests.outputs import TokenLogprobs, TokenTexts
from serving.requests.sequence import RequestSequence
from serving.sampling.logprobs import TopLogprobs


@dataclasses.dataclass(frozen=True, slots=True)
class SequenceResult:
    """Result of a launch for one sequence.

    Attributes:
        sequence: the sequence.
        token: the token that follows what it has; None after a chunk that is not its prompt's last.
        logprobs: of that token, if asked for.
        start: position of the first row that the launch computed.
        prompt_logprobs: of the prompt's tokens after that position; None if they were not asked
            for.
        reads: what the launch has read for it; see `KVCache.read_counters`.
    """

    sequence: RequestSequence
    token: int | None
    logprobs: TokenLogprobs | None
    reads: Int64[np.ndarray, " reads"]
    start: int = 0
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Scores:
    """Log-probabilities in flight to the host.

    Attributes:
        found: of each row.
        tokens: the tokens of the rows that count; None where the device samples them.
        counts: how many of the best each row wants, None for none.
    """

    found: TopLogprobs
    tokens: Sequence[int] | None
    counts: Sequence[int | None]


@dataclasses.dataclass(frozen=True, slots=True)
class Launched:
    """A launch whose results are in flight to the host.

    Attributes:
        sequences: those that it appended to.
        slots: int32 [sequences], their slots, then padding.
        tokens: int32 [sequences], the sampled tokens.
        reads: see `StepOutput.reads`.
        scores: log-probabilities of the tokens, if asked for.
        samples: whether anybody wants the tokens.
        start: see `SequenceResult.start`.
        prompt_scores: of the prompt's tokens, if asked for.
    """

    sequences: list[RequestSequence]
    slots: np.ndarray
    tokens: jax.Array
    reads: jax.Array | None
    scores: Scores | None = None
    samples: bool = True
    start: int = 0
    prompt_scores: tuple[Scores, ...] | None = None

    @property
    def is_ready(self) -> bool:
        """Whether its results are there."""
        is_ready: Callable[[], bool] = getattr(self.tokens, "is_ready")  # noqa: B009 untyped in jax
        return is_ready()


def start_transfers(launched: Launched) -> Launched:
    """Starts to copy a launch's results to the host."""
    launched.tokens.copy_to_host_async()
    if launched.reads is not None:
        launched.reads.copy_to_host_async()
    return launched


def fetch_scores(
    scores: Scores | None, sampled: Sequence[int], texts: Sequence[TokenTexts | None]
) -> list[TokenLogprobs | None]:
    """Log-probabilities of a launch's tokens, None of those that want none.

    Args:
        scores: what was found, None for nothing.
        sampled: the tokens that the device sampled.
        texts: the tokens' texts, by row.
    """
    if scores is None:
        return [None] * len(sampled)
    found = jax.device_get(scores.found)
    tokens = sampled if scores.tokens is None else scores.tokens
    return [
        None
        if count is None
        else TokenLogprobs(
            token,
            float(found.logprob[row]),
            int(found.rank[row]),
            # Copies: a view would keep what the whole batch has found.
            found.token_ids[row, :count].copy(),
            found.logprobs[row, :count].copy(),
            text,
        )
        for row, (token, count, text) in enumerate(zip(tokens, scores.counts, texts, strict=True))
    ]
