"""A request and its sequences, from prompt to output."""

import dataclasses
import time

from kvcache import CacheCounters, EncodedTokens
from serving.errors import describe_error
from serving.requests.outputs import (
    RequestMetrics,
    RequestOutput,
    failed_output,
)
from serving.requests.sequence import RequestSequence


@dataclasses.dataclass(eq=False)
class Request:
    """Request of a caller.

    Attributes:
        request_id: its name within the engine.
        prompt: the prompt's text, or None where only ids were given.
        sequences: one for each of `SamplingParams.n`.
        arrival: when it came, by `time.monotonic`, as all times but the next.
        arrival_time: when it came, in seconds since 1970.
        started: when its first sequence started, or None.
        first_token: when its first token was known, or None.
        ended: when a sequence of it ended last, or None.
        error: what it failed with, or None.
        step_failed: whether that was the engine's failure and not its own.
        encoded: the prompt as the cache looks it up, until the engine has the request.
    """

    request_id: str
    prompt: str | None
    sequences: list[RequestSequence]
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
        """Whether every sequence is done."""
        return all(part.finished for part in self.sequences)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far, by all sequences."""
        return sum(len(part.output_ids) for part in self.sequences)

    def end(self, error: Exception | None, *, step_failed: bool = False) -> None:
        """Ends what is not done, if there is any.

        Args:
            error: what it failed with, or None if it is aborted.
            step_failed: whether that was the engine's failure and not its own.
        """
        if self.finished:
            return
        self.error, self.step_failed = error, step_failed
        for part in self.sequences:
            if not part.finished:
                part.finish_reason = "abort"
                self.ended = time.monotonic()

    def output(self) -> RequestOutput:
        """Output so far; only the prompt's text and the error if it failed."""
        if self.error is not None:
            return failed_output(self.request_id, describe_error(self.error), self.prompt)
        first = self.sequences[0]
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=list(first.token_ids),
            prompt_logprobs=None if first.prompt_logprobs is None else list(first.prompt_logprobs),
            outputs=[part.output(index) for index, part in enumerate(self.sequences)],
            finished=self.finished,
            cache_counters=sum(
                (part.cache_counters for part in self.sequences), start=CacheCounters()
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
