"""Random histories of requests, run by a mock engine, with what must hold of every one."""

import dataclasses
import random

from kvcache import CacheCounters
from serving.scheduler import Scheduler
from tests.serving.scheduler.mock_engine import (
    VOCABULARY,
    MockEngine,
    Step,
    ToySequence,
    expected_output,
)


@dataclasses.dataclass(frozen=True)
class Arrival:
    """A request: new tokens after a part of an earlier sequence's.

    Attributes:
        number: which earlier one, modulo as many as there are.
        kept: how much of it, from nothing to all of its prompt and output, in sixteenths.
        new_tokens: what follows.
        max_tokens: most tokens to generate.
        priority: its priority.
        copies: sequences with this prompt.
        reuse_prefix: whether it may find rows in the cache.
    """

    number: int
    kept: int
    new_tokens: tuple[int, ...]
    max_tokens: int
    priority: int = 0
    copies: int = 1
    reuse_prefix: bool = True


class History:
    """Requests that come to an engine, and what is expected of them.

    Args:
        engine: the engine.
        max_tokens: of prompt and output; longer requests are cut to fit.
        age_weight: the scheduler's.
        check_every: steps between proofs of integrity.
    """

    def __init__(
        self, engine: MockEngine, *, max_tokens: int, age_weight: float, check_every: int = 1
    ) -> None:
        self.engine, self._max_tokens, self._age_weight = engine, max_tokens, age_weight
        self._check_every = check_every
        self.sequences: list[ToySequence] = []
        self._added_at: dict[ToySequence, int] = {}  # prompt tokens launched before
        self._never_opened: dict[ToySequence, None] = {}
        self.num_steps = 0

    @property
    def scheduler(self) -> Scheduler:
        return self.engine.scheduler

    def add(self, arrival: Arrival) -> None:
        prompt: list[int] = []
        if self.sequences:
            earlier = self.sequences[arrival.number % len(self.sequences)]
            prompt = earlier.token_ids + earlier.output_ids
            prompt = prompt[: len(prompt) * arrival.kept // 16]
        prompt = [*prompt, *arrival.new_tokens][: self._max_tokens - 1]
        max_tokens = min(arrival.max_tokens, self._max_tokens - len(prompt))
        for _ in range(arrival.copies):
            sequence = ToySequence(prompt, max_tokens, arrival.priority, arrival.reuse_prefix)
            self.sequences.append(sequence)
            self._added_at[sequence] = self.scheduler.counters.prompt_tokens
            self._never_opened[sequence] = None
            self.scheduler.add(sequence)

    def abort(self, number: int) -> None:
        """Aborts one of the sequences that are not done, if there is any."""
        unfinished = list(self.scheduler)
        if unfinished:
            sequence = unfinished[number % len(unfinished)]
            assert isinstance(sequence, ToySequence)
            sequence.aborted = True
            self._never_opened.pop(sequence, None)
            self.engine.end(sequence)

    def restart(self, engine: MockEngine) -> None:
        """Goes on with an empty engine: those that have started are lost, the others go over."""
        left = [one for one in self.sequences if one in self.scheduler]
        self.engine = engine
        for sequence in left:
            if sequence in self._never_opened:
                self._added_at[sequence] = self.scheduler.counters.prompt_tokens
                self.scheduler.add(sequence)
            else:
                sequence.failed = True
                sequence.total = CacheCounters()

    def step(self) -> Step:
        """A step, with all that must hold of it."""
        work = len(self.scheduler) > 0
        waiting_results = bool(self.engine.in_flight)
        step = self.engine.step()
        self.num_steps += 1
        launched = step.chunks or step.decoded
        assert launched or waiting_results or not work, "nothing is done, and never will be"
        assert not step.failed, "a sequence that fits alone has failed"
        for sequence in step.opened:
            self._check_overtaking(sequence)
        if self.num_steps % self._check_every == 0:
            self.check_integrity()
        return step

    def check_integrity(self) -> None:
        self.scheduler.check_integrity()
        self.engine.cache.check_integrity()

    def drain(self, max_steps: int) -> None:
        """Runs all that is left, and checks every output."""
        for _ in range(max_steps):
            if not len(self.scheduler):
                break
            self.step()
        assert not len(self.scheduler), f"{len(self.scheduler)} are not done in {max_steps} steps"
        self.step()  # surplus results
        self.check_integrity()
        scheduler = self.scheduler
        assert not (scheduler.num_running or scheduler.num_waiting or scheduler.num_preempted)
        for sequence in self.sequences:
            expected = expected_output(sequence.token_ids, sequence.max_tokens)
            if sequence.aborted or sequence.failed:
                expected = expected[: len(sequence.output_ids)]
            assert sequence.output_ids == expected, f"prompt {sequence.token_ids}"
            assert sequence.total is not None, f"prompt {sequence.token_ids} has no counters"
        self.sequences.clear()
        self._added_at.clear()

    def _check_overtaking(self, opened: ToySequence) -> None:
        """A sequence that opens overtakes none that came too long before it, or goes first."""
        if opened not in self._never_opened:
            return
        del self._never_opened[opened]
        added_at = self._added_at[opened]
        for other in self._never_opened:
            assert other.priority <= opened.priority, "a lower priority went first"
            if other.priority == opened.priority:
                since = added_at - self._added_at[other]
                bound = len(other.token_ids) / self._age_weight
                assert since < bound, f"overtaken {since} tokens later, not {bound}"


def random_arrival(rng: random.Random, max_new: int, max_output: int) -> Arrival:
    """Now a new prompt, now a turn of an earlier conversation, a fork of one, or several alike."""
    kept = rng.choice((0, 0, 16, 16, rng.randrange(17)))
    return Arrival(
        number=rng.randrange(1 << 20),
        kept=kept,
        new_tokens=tuple(rng.choices(range(1, VOCABULARY), k=rng.randint(1, max_new))),
        max_tokens=rng.randint(1, max_output),
        priority=rng.choice((0, 0, 0, 0, 1, -1)),
        copies=rng.choice((1, 1, 1, 1, 2, 3)),
        reuse_prefix=rng.random() < 0.95,
    )
