"""Decode steps that nothing computes: the scheduler, and the account and policy of a full cache."""

import dataclasses
import time
from collections.abc import Mapping, Sequence

import numpy as np

from kvcache import CacheCounters, EncodedTokens, KVCache, KVGeometry, SimulatedDevice
from pallas_kernels.common.row_format import RowFormat
from serving.scheduler import Schedulable, Scheduler, SequenceCache

DEVICES = 8
ROWS_PER_DEVICE = 64  # of a page
DEVICE_SHARE = 10  # one page in so many lies on the device
HOT_SHARE = 0.3  # of the device pages, for hot rows: all are in use then, and pages must go
STEP_ROWS = 8192
WARM_UP_STEPS = 64
STEPS_BETWEEN_SELECTIONS = 32
_SELECTIONS = 2048  # of a sequence, counted at once
_VOCABULARY = 256  # Python shares ints below it, which keeps the prompts small


@dataclasses.dataclass(eq=False)
class Conversation:
    """A sequence as the scheduler knows it, which never stops by itself."""

    token_ids: list[int]
    max_tokens: int = 1 << 30
    priority: int = 0
    reuse_prefix: bool = True
    finished: bool = False
    output_ids: list[int] = dataclasses.field(default_factory=list)


class IdleCache(SequenceCache):
    """Room for everything, and nothing to do for it."""

    def open(self, slot: int, token_ids: Sequence[int], promised_tokens: int, **_: object) -> int:
        """Finds all but the last token."""
        return len(token_ids) - 1

    def num_cached(self, token_ids: Sequence[int]) -> int:
        """All but the last token."""
        return len(token_ids) - 1

    def can_prepare(self, rows: Mapping[int, int]) -> bool:
        """Always."""
        return True

    def prepare(self, rows: Mapping[int, int], *, staging: bool = False) -> None:
        """Nothing to prepare."""

    def advance(
        self, slot: int, token_ids: Sequence[int], *, prompt_complete: bool = False
    ) -> None:
        """Nothing to keep."""

    def reserved_pages(self, slot: int) -> int:
        """None."""
        return 0

    def length(self, slot: int) -> int:
        """Not known."""
        return 0

    def close(self, slot: int, *, parked: bool = False) -> CacheCounters:
        """Nothing counted."""
        return CacheCounters()


class DecodeSteps:
    """A scheduler whose slots are all taken by sequences of one length that decode.

    They are computed chunk by chunk as in serving, after conversations that have ended, which fill
    what they leave of the cache. As many others wait.

    Args:
        cache: where their rows are.
        context: tokens of each.
        num_sequences: how many.

    Attributes:
        cache: where their rows are.
        scheduler: plans the steps.
    """

    def __init__(
        self, cache: KVCache[SimulatedDevice] | IdleCache, context: int, num_sequences: int
    ) -> None:
        self.cache = cache
        self.scheduler = Scheduler(
            cache,
            max_num_seqs=num_sequences,
            max_num_batched_tokens=STEP_ROWS,
            most_step_rows=STEP_ROWS,
        )
        self._rng = np.random.default_rng(0)
        self._num_steps = 0
        self._num_sequences = num_sequences
        self._under_way: list[Schedulable] = []
        self._tokens = self._rng.integers(_VOCABULARY, size=context).tolist()
        if isinstance(cache, KVCache):
            num_fitting = cache.geometry.num_pages // cache.geometry.pages_for(context)
            for number in range(num_sequences, num_fitting + 1):
                self.scheduler.finish(self._compute(number))
        self._running = [self._compute(number) for number in range(num_sequences)]
        for number in range(num_sequences):
            self.scheduler.add(Conversation([number % _VOCABULARY] * 8))
        if isinstance(cache, KVCache):
            # Every page has been selected at some time: the most to sort when heat changes.
            heat = cache.device.heat
            heat[:] = self._rng.exponential(size=len(heat))
        for _ in range(WARM_UP_STEPS):
            self.step()

    def step(self) -> float:
        """Milliseconds of a decode step."""
        if self._num_steps % STEPS_BETWEEN_SELECTIONS == 0 and isinstance(self.cache, KVCache):
            self._select_pages(self.cache)
        self._num_steps += 1
        token = int(self._rng.integers(_VOCABULARY))
        start = time.thread_time()
        self._step(token)
        return (time.thread_time() - start) * 1e3

    def turn(self, number: int) -> tuple[float, float]:
        """Milliseconds of ending a sequence, and of a step in which it is opened again."""
        sequence = self._running[number]
        start = time.thread_time()
        self.scheduler.finish(sequence)
        ended = (time.thread_time() - start) * 1e3
        tokens = [*self._prompt(number), *sequence.output_ids, 0]
        self._running[number] = Conversation(tokens, priority=1)
        encoded = EncodedTokens(tokens)
        encoded.encode_pages(ROWS_PER_DEVICE * DEVICES)  # where the request is read
        self.scheduler.add(self._running[number], encoded)
        return ended, self.step()

    def _step(self, token: int, *, decodes: bool = True) -> None:
        scheduler, results, self._under_way = self.scheduler, self._under_way, []
        scheduler.start_step()
        while (chunk := scheduler.next_prefill()) is not None:
            self.cache.prepare({chunk.slot: len(chunk.token_ids)}, staging=True)
            scheduler.advance(chunk)
            if chunk.is_last:
                self._under_way.append(chunk.sequence)
        batch = scheduler.next_decode() if decodes else {}
        if batch:
            self.cache.prepare(dict.fromkeys(batch, 1))
            scheduler.launched_decode(batch)
            self._under_way += batch.values()
        for sequence in results:
            if scheduler.confirm(sequence, token):
                sequence.output_ids.append(token)

    def _compute(self, number: int) -> Conversation:
        """Has the prompt of a sequence computed, while no other decodes."""
        sequence = Conversation(self._prompt(number))
        self.scheduler.add(sequence)
        while sequence not in self._under_way:
            self._step(0, decodes=False)
        sequence.token_ids = []  # Nothing looks at it again, and it is large.
        return sequence

    def _prompt(self, number: int) -> list[int]:
        # Not all of one length, so that pages fill up in turn.
        spread = number % self._num_sequences * ROWS_PER_DEVICE * DEVICES // self._num_sequences
        # Pages are told apart by all tokens up to their ends.
        first = [number % _VOCABULARY, number // _VOCABULARY]
        return first + self._tokens[2 : len(self._tokens) - spread]

    def _select_pages(self, cache: KVCache[SimulatedDevice]) -> None:
        """Counts selections of random pages, as the device does."""
        for slot in self.scheduler.running:
            pages = np.array(cache.pages_of(slot))
            chosen = pages[self._rng.integers(len(pages), size=_SELECTIONS)]
            np.add.at(cache.device.heat, chosen, 1)


def simulated_cache(context: int, num_sequences: int, num_steps: int) -> KVCache[SimulatedDevice]:
    """A cache for so many steps, of rows of one number; what they hold is not looked at."""
    most_tokens = context + WARM_UP_STEPS + num_steps
    pages_each = -(-most_tokens // (ROWS_PER_DEVICE * DEVICES))
    # A page more each: sequences that come back copy a partly filled one.
    num_pages = num_sequences * (pages_each + 2)
    device_pages = -(-num_pages // DEVICE_SHARE) + 4 * num_sequences
    hot_pages = max(int(HOT_SHARE * device_pages) // num_sequences, 1)
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
        hot_rows=hot_pages * ROWS_PER_DEVICE,
    )
    return KVCache(geometry, SimulatedDevice(geometry), most_step_rows=STEP_ROWS)
