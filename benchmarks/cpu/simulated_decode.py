"""Simulated decode steps: the scheduler, and the bookkeeping and policy of a full cache."""

import time
from collections import abc
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from kvcache import CacheCounters, EncodedTokens, KVCache, KVGeometry, SimulatedDevice
from pallas_kernels.common.row_format import RowFormat
from serving.scheduler import DecodeBatch, PrefillChunk, Scheduler, Sequence, SequenceCache

DEVICES = 8
ROWS_PER_DEVICE = 64  # rows of a page
DEVICE_SHARE = 10  # one page in ten lies on the device
HOT_SHARE = 0.3  # of the device pages, for row caches: with these all are in use, and pages go
STEP_ROWS = 8192
WARM_UP_STEPS = 64
STEPS_BETWEEN_SELECTIONS = 32
_SELECTIONS = 2048  # of a sequence, counted together
_VOCABULARY = 256  # Python shares ints below it, which keeps the prompts small


_ENDLESS = 1 << 30  # tokens of a sequence that never stops by itself


class IdleCache(SequenceCache):
    """Cache that holds everything and does nothing."""

    def open(
        self, slot: int, token_ids: abc.Sequence[int], reserved_tokens: int, **_: object
    ) -> int:
        """Returns all tokens but the last as found."""
        return len(token_ids) - 1

    def num_cached(self, token_ids: abc.Sequence[int]) -> int:
        """Returns all tokens but the last."""
        return len(token_ids) - 1

    def can_prepare(self, rows: Mapping[int, int]) -> bool:
        """Returns True."""
        return True

    def prepare(self, rows: Mapping[int, int], *, staging: bool = False) -> None:
        """Does nothing."""

    def advance(
        self, slot: int, token_ids: abc.Sequence[int], *, prompt_complete: bool = False
    ) -> None:
        """Does nothing."""

    def reserved_pages(self, slot: int) -> int:
        """Returns 0."""
        return 0

    def length(self, slot: int) -> int:
        """Returns 0."""
        return 0

    def close(self, slot: int, *, preempted: bool = False) -> CacheCounters:
        """Returns empty counters."""
        return CacheCounters()


class _Sampled(NamedTuple):
    """Token that a launch sampled."""

    sequence: Sequence
    token: int


class DecodeSteps:
    """Scheduler with decoding sequences of one length in all its slots.

    They are prefilled in chunks as in serving, after conversations that have ended and fill the
    rest of the cache. As many others wait.

    Args:
        cache: the cache.
        context: tokens of each sequence.
        num_sequences: number of sequences.

    Attributes:
        cache: the cache.
        scheduler: the scheduler.
    """

    def __init__(
        self, cache: KVCache[SimulatedDevice] | IdleCache, context: int, num_sequences: int
    ) -> None:
        self.cache = cache
        self.scheduler: Scheduler[Sequence] = Scheduler(
            cache,
            max_num_seqs=num_sequences,
            # One step has room for all prompts, so that none decodes before the others.
            max_num_batched_tokens=max(STEP_ROWS, context * num_sequences),
            max_step_rows=STEP_ROWS,
        )
        self._rng = np.random.default_rng(0)
        self._num_steps = 0
        self._num_sequences = num_sequences
        self._in_flight: list[_Sampled] = []
        self._tokens = self._rng.integers(_VOCABULARY, size=context).tolist()
        if isinstance(cache, KVCache):
            num_fitting = cache.geometry.num_pages // cache.geometry.pages_for(context)
            for number in range(num_sequences, num_fitting + 1):
                self._compute(number)
        self._running = [Sequence(self._prompt(n), _ENDLESS) for n in range(num_sequences)]
        for sequence in self._running:
            self.scheduler.add(sequence)
        self._step(0)
        for sequence in self._running:
            sequence.token_ids = []  # large, and not read again
        for number in range(num_sequences):
            self.scheduler.add(Sequence([number % _VOCABULARY] * 8, _ENDLESS))
        if isinstance(cache, KVCache):
            # All pages have been selected: a change of heat has the most to sort.
            heat = cache.device.heat
            heat[:] = self._rng.exponential(size=len(heat))
        for _ in range(WARM_UP_STEPS):
            self.step()

    def step(self) -> float:
        """Runs a decode step and returns its milliseconds."""
        if self._num_steps % STEPS_BETWEEN_SELECTIONS == 0 and isinstance(self.cache, KVCache):
            self._select_pages(self.cache)
        self._num_steps += 1
        return self._step(int(self._rng.integers(_VOCABULARY))) * 1e3

    def turn(self, number: int) -> tuple[float, float]:
        """Returns the milliseconds of ending a sequence, and of a step that opens it again."""
        sequence = self._running[number]
        start = time.thread_time()
        self.scheduler.finish(sequence)
        ended = (time.thread_time() - start) * 1e3
        tokens = [*self._prompt(number), *sequence.output_ids, 0]
        self._running[number] = Sequence(tokens, _ENDLESS, priority=1)
        encoded = EncodedTokens(tokens)
        encoded.encode_pages(ROWS_PER_DEVICE * DEVICES)  # as where a request is read
        self.scheduler.add(self._running[number], encoded)
        return ended, self.step()

    def _step(self, token: int) -> float:
        """Runs a step and returns the seconds of the scheduler and the cache."""
        start = time.thread_time()
        plans = list(iter(self.scheduler.schedule, None))
        launched = time.thread_time()
        results, self._in_flight = self._in_flight, []
        for plan in plans:
            match plan:
                case PrefillChunk(sequence=sequence, is_last=True):
                    self._in_flight.append(_Sampled(sequence, token))
                case DecodeBatch(sequences=sequences):
                    self._in_flight += [_Sampled(each, token) for each in sequences.values()]
        processing = time.thread_time()
        for result in self.scheduler.process(results):
            result.sequence.output_ids.append(result.token)
        return launched - start + time.thread_time() - processing

    def _compute(self, number: int) -> None:
        """Has a sequence computed, and leaves it in the cache."""
        sequence = Sequence(self._prompt(number), _ENDLESS)
        self.scheduler.add(sequence)
        while not self._in_flight:
            self._step(0)
        self.scheduler.finish(sequence)
        self._in_flight = []

    def _prompt(self, number: int) -> list[int]:
        # Lengths differ a little, so that pages do not all fill up in the same step.
        spread = number % self._num_sequences * ROWS_PER_DEVICE * DEVICES // self._num_sequences
        # A page is identified by all tokens up to its end.
        first = [number % _VOCABULARY, number // _VOCABULARY]
        return first + self._tokens[2 : len(self._tokens) - spread]

    def _select_pages(self, cache: KVCache[SimulatedDevice]) -> None:
        """Counts selections of random pages, as the device does."""
        for slot in self.scheduler.running:
            pages = np.array(cache.pages_of(slot))
            selected = pages[self._rng.integers(len(pages), size=_SELECTIONS)]
            np.add.at(cache.device.heat, selected, 1)


def simulated_cache(context: int, num_sequences: int, num_steps: int) -> KVCache[SimulatedDevice]:
    """Returns a cache for `num_steps` steps, with rows of one number, which nothing reads."""
    max_tokens = context + WARM_UP_STEPS + num_steps
    pages_each = -(-max_tokens // (ROWS_PER_DEVICE * DEVICES))
    # One page more for each: a sequence that comes back copies a partly filled page.
    num_pages = num_sequences * (pages_each + 2)
    device_pages = -(-num_pages // DEVICE_SHARE) + 4 * num_sequences
    row_cache_pages = max(int(HOT_SHARE * device_pages) // num_sequences, 1)
    geometry = KVGeometry(
        group_layers=(1,),
        device_pages=device_pages,
        host_pages=num_pages,
        num_devices=DEVICES,
        rows_per_device=ROWS_PER_DEVICE,
        max_sequences=num_sequences,
        max_pages_per_sequence=pages_each,
        row_format=RowFormat("float32", 1, 0, 1.0),
        index_row_format=RowFormat("float32", 1, 0, 1.0),
        row_cache_rows=row_cache_pages * ROWS_PER_DEVICE,
    )
    return KVCache(geometry, SimulatedDevice(geometry), max_step_rows=STEP_ROWS)
