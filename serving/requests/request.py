"""A request and its continuations, from prompt to output."""

import dataclasses
import time
from collections.abc import Sequence

import numpy as np

from kvcache import CacheCounters, EncodedTokens
from kvcache.reads import no_reads
from serving.errors import describe_error
from serving.requests.output_text import OutputText
from serving.requests.outputs import (
    CompletionOutput,
    FinishReason,
    RequestMetrics,
    RequestOutput,
    TokenLogprobs,
    failed_output,
)
from serving.requests.sampling_params import SamplingParams
from serving.sampling.state import SlotSampling


@dataclasses.dataclass(eq=False)
class Continuation:
    """One sequence that the loop runs: a prompt and what has been generated for it.

    Attributes:
        token_ids: the prompt.
        params: how to continue, nothing left out.
        max_tokens: maximum tokens to generate, the model's length limit taken into account.
        stop_ids: ids that end the output.
        sampling: what the sampler needs to know, None for plain greedy decoding.
        text: its text, or None without a tokenizer or `detokenize`.
        priority: higher goes first.
        cacheable: whether its rows may serve others, and those of others it.
        prompt_logprobs: what the prompt's tokens had; filled while the prompt is computed.
        output_ids: generated so far.
        logprobs: of each of them, if asked for.
        finish_reason: set when it is done.
        stop_reason: the stop id or text that ended it; None for an end-of-sequence id.
        reads: what the launches whose results are known have read for it.
        cache_counters: what the cache did for it; filled when it is done.
        last_token_at: when its last token became known, by `time.monotonic`.
    """

    token_ids: list[int]
    params: SamplingParams
    max_tokens: int
    stop_ids: frozenset[int]
    sampling: SlotSampling | None
    text: OutputText | None
    priority: int = 0
    cacheable: bool = True
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    output_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[TokenLogprobs] = dataclasses.field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    reads: np.ndarray = dataclasses.field(default_factory=no_reads)
    cache_counters: CacheCounters = dataclasses.field(default_factory=CacheCounters)
    last_token_at: float | None = None

    @property
    def finished(self) -> bool:
        """Whether it wants no more tokens."""
        return self.finish_reason is not None

    @property
    def scores_prompt(self) -> bool:
        """Whether log-probabilities of the prompt are still to be computed."""
        known = len(self.prompt_logprobs or ())
        return self.params.prompt_logprobs is not None and known < len(self.token_ids)

    @property
    def reuse_prefix(self) -> bool:
        """Whether cached rows may stand for computed ones."""
        return self.cacheable and not self.scores_prompt

    def accept_prompt_logprobs(self, start: int, logprobs: Sequence[TokenLogprobs]) -> None:
        """Takes what the prompt's tokens after place `start` had, one chunk after another; place 0
        begins anew."""
        if self.prompt_logprobs is None or start == 0:
            self.prompt_logprobs = [None]
        assert len(self.prompt_logprobs) == start + 1, "a chunk is missing"
        self.prompt_logprobs += logprobs

    def accept(self, token: int, logprobs: TokenLogprobs | None) -> None:
        """Takes the next token and decides whether it is the last."""
        self.output_ids.append(token)
        if logprobs is not None:
            self.logprobs.append(logprobs)
        may_stop = len(self.output_ids) > self.params.min_tokens
        if token in self.stop_ids and may_stop:
            self.finish_reason = "stop"
            listed = token in (self.params.stop_token_ids or ())
            self.stop_reason = token if listed else None
            if self.text is not None and self.params.include_stop_str_in_output:
                self.text.push(token, may_stop=False)
        elif self.text is not None:
            self.text.push(token, may_stop=may_stop)
            if self.text.stopped_by is not None:
                self.finish_reason, self.stop_reason = "stop", self.text.stopped_by
        if self.finish_reason is None and len(self.output_ids) == self.max_tokens:
            self.finish_reason = "length"
        if self.finish_reason is not None and self.text is not None:
            self.text.finish()

    def output(self, index: int) -> CompletionOutput:
        """Output so far."""
        wanted = self.params.logprobs is not None
        if self.params.max_tokens == 0:
            return CompletionOutput(
                index=index,
                text="",
                token_ids=[],
                cumulative_logprob=0.0 if wanted else None,
                logprobs=[] if wanted else None,
                finish_reason="length" if self.finish_reason == "stop" else self.finish_reason,
                stop_reason=None,
            )
        return CompletionOutput(
            index=index,
            text=self.text.text if self.text is not None else "",
            token_ids=list(self.output_ids),
            cumulative_logprob=sum(entry.token_logprob for entry in self.logprobs)
            if wanted
            else None,
            logprobs=list(self.logprobs) if wanted else None,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )


@dataclasses.dataclass(eq=False)
class Request:
    """Request of a caller.

    Attributes:
        request_id: its name within the engine.
        prompt: the prompt's text, or None where only ids were given.
        continuations: one for each of `SamplingParams.n`.
        arrival: when it came, by `time.monotonic`, as all times but the next.
        arrival_time: when it came, in seconds since 1970.
        started: when its first continuation started, or None.
        first_token: when its first token was known, or None.
        ended: when a continuation of it ended last, or None.
        error: what it failed with, or None.
        step_failed: whether that was the engine's failure and not its own.
        encoded: the prompt as the cache looks it up, until the engine has the request.
    """

    request_id: str
    prompt: str | None
    continuations: list[Continuation]
    arrival: float = dataclasses.field(default_factory=time.monotonic)
    arrival_time: float = dataclasses.field(default_factory=time.time)
    started: float | None = None
    first_token: float | None = None
    ended: float | None = None
    error: Exception | None = None
    step_failed: bool = False
    encoded: EncodedTokens | None = None

    @property
    def finished(self) -> bool:
        """Whether every continuation is done."""
        return all(part.finished for part in self.continuations)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far, by all continuations."""
        return sum(len(part.output_ids) for part in self.continuations)

    def end(self, error: Exception | None, *, step_failed: bool = False) -> None:
        """Ends what is not done, if there is any.

        Args:
            error: what it failed with, or None if it is aborted.
            step_failed: whether that was the engine's failure and not its own.
        """
        if self.finished:
            return
        self.error, self.step_failed = error, step_failed
        for part in self.continuations:
            if not part.finished:
                part.finish_reason = "abort"
                self.ended = time.monotonic()

    def output(self) -> RequestOutput:
        """Output so far; only the prompt's text and the error if it failed."""
        if self.error is not None:
            return failed_output(self.request_id, describe_error(self.error), self.prompt)
        first = self.continuations[0]
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=list(first.token_ids),
            prompt_logprobs=None if first.prompt_logprobs is None else list(first.prompt_logprobs),
            outputs=[part.output(index) for index, part in enumerate(self.continuations)],
            finished=self.finished,
            cache_counters=sum(
                (part.cache_counters for part in self.continuations), start=CacheCounters()
            ),
            metrics=self._metrics(),
        )

    def _metrics(self) -> RequestMetrics:
        def passed(moment: float | None) -> float | None:
            return None if moment is None else moment - self.arrival

        def by_the_wall(moment: float | None) -> float | None:
            return None if moment is None else self.arrival_time + (moment - self.arrival)

        return RequestMetrics(
            arrival_time=self.arrival_time,
            time_in_queue=passed(self.started),
            first_token_time=by_the_wall(self.first_token),
            finished_time=by_the_wall(self.ended) if self.finished else None,
        )
