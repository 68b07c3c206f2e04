"""An engine without a model: the tokens that it chooses follow from all tokens before them.

It is pipelined like the real one: the results of a step are processed when the next is launched.
"""

import dataclasses
import itertools
import random
from collections import abc
from typing import NamedTuple, Protocol, override

from kvcache import CacheCounters
from serving.scheduler import (
    DecodeBatch,
    Plan,
    PrefillChunk,
    Scheduler,
    Sequence,
    SequenceCache,
    SequenceOutOfPagesError,
)

STOP_TOKEN = 0
VOCABULARY = 41
_START = 1  # the value before the first row


def row_value(before: int, token: int) -> int:
    """What the row of a token holds: it depends on all rows before it."""
    return (before * 1_000_003 ^ (token + 1)) & 0x7FFF_FFFF_FFFF


def chosen_token(value: int) -> int:
    """What follows a row."""
    return (value >> 7) % VOCABULARY


def values_of(token_ids: abc.Sequence[int]) -> list[int]:
    """What the rows of tokens hold."""
    return list(itertools.accumulate(token_ids, row_value, initial=_START))[1:]


def expected_output(token_ids: abc.Sequence[int], max_tokens: int) -> list[int]:
    """What a prompt is to be continued by."""
    value, output = values_of(token_ids)[-1], []
    while len(output) < max_tokens:
        output.append(chosen_token(value))
        if output[-1] == STOP_TOKEN:
            break
        value = row_value(value, output[-1])
    return output


@dataclasses.dataclass(eq=False)
class ToySequence(Sequence):
    """A sequence that stops at a token, and may be aborted or fail."""

    aborted: bool = False
    failed: bool = False
    total: CacheCounters | None = None

    @property
    @override
    def finished(self) -> bool:
        stopped = self.output_ids[-1:] == [STOP_TOKEN]
        return self.aborted or self.failed or stopped or super().finished


class Sampled(NamedTuple):
    """A token that a launch sampled."""

    sequence: ToySequence
    token: int


class EngineCache(SequenceCache, Protocol):
    """A cache that proves its integrity."""

    def check_integrity(self) -> None: ...


class Rows(Protocol):
    """Values of the rows of each slot."""

    def begin_launch(self) -> None: ...

    def read_row(self, slot: int, position: int) -> int: ...

    def write_row(self, slot: int, position: int, value: int) -> None: ...


class RowsOfSlots:
    """Rows beside a cache that keeps none: those found in it are computed anew."""

    def __init__(self, cache: EngineCache) -> None:
        self._values: dict[int, list[int]] = {}
        opened = cache.open

        def open(slot: int, token_ids: abc.Sequence[int], *args: int, **options: int | bool) -> int:
            found = opened(slot, token_ids, *args, **options)
            self._values[slot] = values_of(token_ids[:found])
            return found

        vars(cache)["open"] = open

    def begin_launch(self) -> None: ...

    def read_row(self, slot: int, position: int) -> int:
        return self._values[slot][position]

    def write_row(self, slot: int, position: int, value: int) -> None:
        assert position == len(self._values[slot]), f"row {position} of slot {slot} is not next"
        self._values[slot].append(value)


@dataclasses.dataclass
class Step:
    """What a step launched: positions by slot, of chunks and of decoded tokens."""

    chunks: list[tuple[ToySequence, range]] = dataclasses.field(default_factory=list)
    decoded: dict[int, ToySequence] = dataclasses.field(default_factory=dict)
    opened: list[ToySequence] = dataclasses.field(default_factory=list)
    failed: list[ToySequence] = dataclasses.field(default_factory=list)


class MockEngine:
    """Steps over a cache, with rows that hold one number each.

    Args:
        cache: the cache.
        rows: where its rows are.
        scheduler: the scheduler of that cache.
        pipelined: process results one step late.
    """

    def __init__(
        self,
        cache: EngineCache,
        rows: Rows,
        scheduler: Scheduler[ToySequence],
        *,
        pipelined: bool = True,
    ) -> None:
        self.cache, self.rows, self.scheduler = cache, rows, scheduler
        self.pipelined = pipelined
        self.in_flight: list[Sampled] = []
        self._last_tokens: dict[int, int] = {}
        self._values: dict[int, list[int]] = {}  # what the rows of each slot are to hold
        self._random = random.Random(0)

    def step(self) -> Step:
        """Launches a step, and processes the results of the one before."""
        step, results = Step(), list[Sampled]()
        while (plan := self._schedule(step)) is not None:
            match plan:
                case PrefillChunk():
                    results += self._run_chunk(plan, step)
                case DecodeBatch():
                    results += self._run_batch(plan, step)
        if self.pipelined:
            results, self.in_flight = self.in_flight, results
        self._process(results)
        return step

    def end(self, sequence: ToySequence) -> None:
        """Takes a sequence from the scheduler."""
        sequence.total = self.scheduler.finish(sequence)

    def _schedule(self, step: Step) -> Plan[ToySequence] | None:
        """Asks the scheduler; a sequence that fits nowhere fails, and it is asked again."""
        while True:
            before = set(self.scheduler.running.values())
            try:
                plan = self.scheduler.schedule()
            except SequenceOutOfPagesError as error:
                assert isinstance(error.sequence, ToySequence)
                error.sequence.failed = True
                self.end(error.sequence)
                step.failed.append(error.sequence)
                continue
            running = self.scheduler.running.values()
            step.opened += [sequence for sequence in running if sequence not in before]
            return plan

    def _run_chunk(self, chunk: PrefillChunk[ToySequence], step: Step) -> list[Sampled]:
        """Appends a chunk."""
        known = chunk.sequence.token_ids + chunk.sequence.output_ids
        end = chunk.start + len(chunk.token_ids)
        assert chunk.token_ids == known[chunk.start : end], "other tokens than the sequence's"
        assert chunk.is_last == (end == len(known)), f"{end} of {len(known)} tokens computed"
        if chunk.is_first:
            self._values[chunk.slot] = values_of(known[: chunk.start])
        self.rows.begin_launch()
        self._append(chunk.slot, chunk.token_ids, check_all=chunk.is_first)
        step.chunks.append((chunk.sequence, range(chunk.start, end)))
        token = self._last_tokens[chunk.slot]
        return [Sampled(chunk.sequence, token)] if chunk.is_last else []

    def _run_batch(self, batch: DecodeBatch[ToySequence], step: Step) -> list[Sampled]:
        """Appends a token to each sequence."""
        self.rows.begin_launch()
        results = []
        for slot, sequence in batch.sequences.items():
            self._append(slot, [self._last_tokens[slot]])
            results.append(Sampled(sequence, self._last_tokens[slot]))
            step.decoded[slot] = sequence
        return results

    def _append(self, slot: int, token_ids: abc.Sequence[int], *, check_all: bool = False) -> None:
        values = self._values[slot]
        start = len(values)
        assert start == self.cache.length(slot), f"slot {slot} has {start} rows"
        checked = range(start) if check_all else {self._random.randrange(start), start - 1}
        for position in checked:
            value = self.rows.read_row(slot, position)
            assert value == values[position], f"row {position} of slot {slot} is another's"
        for position, token in enumerate(token_ids, start):
            values.append(row_value(values[-1] if values else _START, token))
            self.rows.write_row(slot, position, values[-1])
        self._last_tokens[slot] = chosen_token(values[-1])

    def _process(self, results: abc.Sequence[Sampled]) -> None:
        for sequence, token in self.scheduler.process(results):
            sequence.output_ids.append(token)
            if sequence.finished:
                self.end(sequence)
