"""An engine's requests, scheduler and store, which are built anew where a change is cut short."""

import logging
from collections.abc import Callable, Iterable

from kvcache import OutOfPagesError
from serving.engine.failures import FailureRun
from serving.engine.launched import Launched
from serving.engine.metrics import EngineCounters
from serving.engine.model_runner import ModelRunner
from serving.engine.open_requests import OpenRequests
from serving.errors import describe_error, drop_tracebacks
from serving.requests.request import Request
from serving.requests.sequence import RequestSequence
from serving.scheduler import Scheduler

logger = logging.getLogger(__name__)


class EngineState:
    """State of the engine that changes from step to step.

    Only `requests` outlives a change that does not run to its end. Scheduler, cache and store are
    then built from nothing: what they were like is not looked at.

    Args:
        runner: the device side.
        max_num_batched_tokens: see `Scheduler`.
        counters: where ends of requests are counted.

    Attributes:
        runner: the device side.
        requests: those that have not ended.
        scheduler: plans the steps.
        in_flight: launches whose results are not known.
        failures: changes that failed since the last token.
    """

    def __init__(
        self, runner: ModelRunner, max_num_batched_tokens: int, counters: EngineCounters
    ) -> None:
        self.runner = runner
        self._max_num_batched_tokens = max_num_batched_tokens
        self.requests = OpenRequests(counters)
        self.scheduler = self._new_scheduler()
        self.in_flight: list[Launched] = []
        self.failures = FailureRun()
        # Set while anything is being changed: whatever ends a change half way leaves it set.
        self._torn = False

    def change[Result](self, action: Callable[[], Result]) -> Result | None:
        """Runs what changes the state.

        An error fails all that have started, whose rows are lost, and those that wait go on; where
        too many come in a row, all fail. An interruption ends all, and goes on.

        Returns:
            What the action returns, None if it failed.
        """
        self._mend()
        self._torn, result = True, None
        try:
            result = action()
        except Exception as error:
            self._recover(error)
            drop_tracebacks(error)
        except BaseException:
            self.abort_all()
            raise
        self._torn = False
        return result

    def change_or_raise[Result](self, action: Callable[[], Result]) -> Result:
        """Runs what changes the state, and leaves it as it was where it refuses.

        Raises:
            ValueError, OSError, OutOfPagesError: it refuses.
        """
        self._mend()
        self._torn = True
        if not self.runner.usable:
            self.renew_store()
        try:
            result = action()
        except (ValueError, OSError, OutOfPagesError):
            self._torn = False
            raise
        self._torn = False
        return result

    def abort_all(self) -> None:
        """Ends everything and builds an empty store, as after an interruption."""
        self._torn = True
        self._end(self.requests.requests, None)
        try:
            self.runner.reset()
        except Exception as error:  # The interruption goes on; a later step tries again.
            logger.error("no store could be built after an interruption: %s", describe_error(error))
        self._renew_scheduler()
        self._torn = False

    def renew_store(self) -> None:
        """Builds an empty store: what has started is computed again."""
        self.runner.reset()
        self._renew_scheduler()

    def delete(self) -> None:
        """Ends everything and frees the memory; nothing may follow."""
        self._end(self.requests.requests, None)
        self.in_flight = []
        self.runner.delete()

    def close_sequences(self, sequences: Iterable[RequestSequence]) -> None:
        """Gives back what ended sequences held, once."""
        for sequence in sequences:
            if self.requests.remove(sequence) and sequence in self.scheduler:
                sequence.cache_counters = self.scheduler.finish(sequence)
                sequence.cache_counters += self.runner.cache.read_counters(sequence.reads)

    def _mend(self) -> None:
        """Builds anew what an interruption has left, one that came while it was being built."""
        if self._torn:
            self.abort_all()

    def _recover(self, error: Exception) -> None:
        self.failures.add(error)
        lost = self.requests.started
        try:
            self.runner.reset()
        except Exception as second:
            # The others have no store either; a later step tries again.
            drop_tracebacks(second)
            error, lost = second, self.requests.requests
        if self.failures.cause is not None:
            error, lost = self.failures.cause, self.requests.requests
        self._end(lost, error)
        self._renew_scheduler()

    def _end(self, requests: Iterable[Request], error: Exception | None) -> None:
        """Ends requests whose rows are lost, and leaves scheduler and cache alone."""
        for request in requests:
            self.requests.end(request, error, step_failed=error is not None)
            for sequence in request.sequences:
                self.requests.remove(sequence)

    def _renew_scheduler(self) -> None:
        """Builds a scheduler for an empty store, of all that have not ended."""
        self.in_flight = []
        counters = self.scheduler.counters
        self.scheduler = self._new_scheduler()
        self.scheduler.counters = counters
        for sequence in self.requests.sequences:
            if sequence.finished:
                self.requests.remove(sequence)
            else:
                self.scheduler.add(sequence)

    def _new_scheduler(self) -> Scheduler[RequestSequence]:
        return Scheduler(
            self.runner.cache,
            max_num_seqs=self.runner.geometry.max_sequences,
            max_num_batched_tokens=self._max_num_batched_tokens,
            max_step_rows=self.runner.buckets.rows[-1],
            chunk_rows=self.runner.buckets.chunk,
        )
