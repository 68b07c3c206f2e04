"""Outputs of generation, with vLLM's names and meanings."""

import bisect
import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import numpy as np
from jaxtyping import Float, Int

from glm53.tokenizer import Tokenizer
from kvcache import CacheCounters

FinishReason = Literal["stop", "length", "abort"]

_SHOWN = 21  # tokens of a position that its repr shows: as many as `logprobs` may ask for


@dataclasses.dataclass(frozen=True)
class Logprob:
    """Log-probability of a token, its rank from 1, and its text, None without a tokenizer or
    `detokenize`."""

    logprob: float
    rank: int
    decoded_token: str | None


class TokenTexts:
    """Texts of single tokens by id, each decoded when it is first asked for."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}

    def __getitem__(self, token_id: int) -> str:
        text = self._texts.get(token_id)
        if text is None:
            text = self._tokenizer.decode([token_id], skip_special_tokens=False)
            self._texts[token_id] = text
        return text


class TokenLogprobs(Mapping[int, Logprob]):
    """Log-probabilities at one position by token id, best first.

    Holds the best tokens and, as the last where it is none of them, the token that is there. They
    are held as arrays, and texts are decoded when they are asked for: a whole vocabulary takes 8
    bytes a token. A copy or a pickle has the texts of its own tokens only.

    Args:
        token_id: the token that is there.
        token_logprob: its log-probability.
        token_rank: its rank.
        best_ids: the best tokens.
        best_logprobs: their log-probabilities.
        texts: those of all tokens, or of these in their order; None gives none.
    """

    __slots__ = (
        "_by_id",
        "_texts",
        "best_ids",
        "best_logprobs",
        "token_id",
        "token_logprob",
        "token_rank",
    )

    def __init__(
        self,
        token_id: int,
        token_logprob: float,
        token_rank: int,
        best_ids: Int[np.ndarray, " best"],
        best_logprobs: Float[np.ndarray, " best"],
        texts: TokenTexts | tuple[str, ...] | None,
    ) -> None:
        self.token_id, self.token_logprob, self.token_rank = token_id, token_logprob, token_rank
        self.best_ids, self.best_logprobs = best_ids, best_logprobs
        self._texts = texts
        self._by_id: np.ndarray | None = None  # places of the best tokens, in the order of ids

    def __getitem__(self, token_id: int) -> Logprob:
        if token_id == self.token_id:
            logprob, rank = self.token_logprob, self.token_rank
        else:
            place = self._place(token_id)
            logprob, rank = float(self.best_logprobs[place]), place + 1
        return Logprob(logprob, rank, self._text(token_id, rank))

    def __iter__(self) -> Iterator[int]:
        yield from self.best_ids.tolist()
        if self.token_rank > self.best_ids.size:
            yield self.token_id

    def __len__(self) -> int:
        return self.best_ids.size + (self.token_rank > self.best_ids.size)

    def _text(self, token_id: int, rank: int) -> str | None:
        if isinstance(self._texts, tuple):
            return self._texts[min(rank - 1, self.best_ids.size)]
        return None if self._texts is None else self._texts[token_id]

    def _place(self, token_id: int) -> int:
        if not isinstance(token_id, int | np.integer):
            raise KeyError(token_id)
        if self._by_id is None:
            self._by_id = np.argsort(self.best_ids)
        found = bisect.bisect_left(self._by_id, token_id, key=self.best_ids.__getitem__)
        if found == self.best_ids.size or self.best_ids[self._by_id[found]] != token_id:
            raise KeyError(token_id)
        return int(self._by_id[found])

    def __reduce__(self) -> tuple[type["TokenLogprobs"], tuple[Any, ...]]:
        texts = self._texts
        if isinstance(texts, TokenTexts):
            texts = tuple(texts[token] for token in self)
        values = (self.token_id, self.token_logprob, self.token_rank)
        return TokenLogprobs, (*values, self.best_ids.copy(), self.best_logprobs.copy(), texts)

    def __repr__(self) -> str:
        shown = [f"{token}: {self[token]!r}" for token in itertools.islice(self, _SHOWN)]
        more = ["..."] * (len(self) > _SHOWN)
        return f"TokenLogprobs({{{', '.join(shown + more)}}})"


@dataclasses.dataclass(frozen=True)
class CompletionOutput:
    """A continuation of a prompt.

    Attributes:
        index: its number among the request's sequences.
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
class RequestMetrics:
    """Times of a request.

    Times are in seconds since 1970: the wall clock's at the arrival, and from there on as a clock
    counts that is never set, so that differences are right.

    Attributes:
        arrival_time: when it came.
        time_in_queue: seconds until its first sequence started, or None before.
        first_token_time: when its first token was known, or None before.
        finished_time: when its last sequence ended, or None before.
    """

    arrival_time: float
    time_in_queue: float | None
    first_token_time: float | None
    finished_time: float | None


@dataclasses.dataclass(frozen=True)
class RequestOutput:
    """A prompt and what followed. It is plain data, which holds nothing of the engine.

    Attributes:
        request_id: the request's name within this LLM.
        prompt: its text, or None where only ids were given.
        prompt_token_ids: its ids; none with `error`.
        prompt_logprobs: None, or for each prompt token what `SamplingParams.prompt_logprobs` asked
            for; None for the first token, which nothing precedes.
        outputs: one for each sequence.
        finished: nothing will be added.
        error: why the request was refused or failed, with no outputs then; else None.
        cache_counters: what the cache did for the sequences that are done.
        metrics: its times, or None with `error`.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[TokenLogprobs | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    error: str | None = None
    cache_counters: CacheCounters = dataclasses.field(default_factory=CacheCounters)
    metrics: RequestMetrics | None = None

    def to_dict(self) -> dict[str, Any]:
        """All of it as dicts, lists and Python's numbers, as for JSON.

        Log-probabilities are by token id, in vLLM's form:
        `{id: {"logprob": ..., "rank": ..., "decoded_token": ...}}`.
        """
        return _plain_data(self)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated, by all sequences."""
        return sum(len(part.token_ids) for part in self.outputs)

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens found in the cache, over all sequences."""
        return self.cache_counters.cached_tokens


def failed_output(request_id: str, error: str, prompt: str | None) -> RequestOutput:
    """The output of a request that was refused or failed, with the prompt's text if known."""
    return RequestOutput(request_id, prompt, [], None, [], finished=True, error=error)


def _plain_data(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain_data(entry) for key, entry in value.items()}
    if dataclasses.is_dataclass(value):
        fields = dataclasses.fields(value)
        return {field.name: _plain_data(getattr(value, field.name)) for field in fields}
    return [_plain_data(entry) for entry in value] if isinstance(value, list) else value
