"""Times what Python does for a decode step besides launching it: the scheduler, and the pages.

Sequences of one length fill all slots, computed chunk by chunk as in serving, in a cache whose
device holds a tenth of their pages and executes nothing. Then they decode, while as many others
wait. Timed are a whole step (plan, pages, results) and, apart, the scheduler alone, over a cache
that does nothing; and a turn: a sequence ends, and comes back with its conversation in the cache.
Times are processor times of the thread, which other work on the machine does not stretch.

usage: python benchmarks/scheduler_overhead.py [--sequences N] [--repeats STEPS] [--contexts N ...]
"""

import argparse
import dataclasses
import random
import statistics
import time
from collections.abc import Mapping, Sequence

import numpy as np

from kvcache import CacheCounters, KVCache, KVGeometry, SimulatedDevice
from pallas_kernels.row_format import RowFormat
from serving.scheduler import Schedulable, Scheduler, SequenceCache

CONTEXTS = (8192, 131_072, 1_048_576)
SEQUENCES = 256
DEVICES = 8
ROWS_PER_DEVICE = 64  # of a page
DEVICE_SHARE = 10  # one page in so many lies on the device
HOT_SHARE = 0.3  # of the device pages, for hot rows: all are in use then, and pages must go
STEP_ROWS = 8192
TURNS = 3
WARM_UP_STEPS = 64
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

    def open(
        self,
        slot: int,
        token_ids: Sequence[int],
        promised_tokens: int,
        *,
        use_prefix: bool = True,
        spare_pages: int = 0,
    ) -> int:
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


class Bench:
    """A scheduler whose slots are all taken by sequences that decode.

    Args:
        cache: where their rows are.
        context: tokens of each.
        num_sequences: how many; as many wait.
    """

    def __init__(
        self, cache: KVCache[SimulatedDevice] | IdleCache, context: int, num_sequences: int
    ) -> None:
        self._cache = cache
        self._rng = random.Random(0)
        self._under_way: list[Conversation] = []
        self._talking: list[Conversation] = []  # the first, which take turns
        self.scheduler = Scheduler(
            cache,
            max_num_seqs=num_sequences,
            max_num_batched_tokens=STEP_ROWS,
            most_step_rows=STEP_ROWS,
        )
        tokens = self._rng.choices(range(_VOCABULARY), k=context)
        for number in range(num_sequences):
            # Not all of one length, so that their pages do not fill up in the same step.
            length = context - number % (ROWS_PER_DEVICE * DEVICES)
            # Pages are told apart by all tokens up to their ends.
            first = [number % _VOCABULARY, number // _VOCABULARY]
            sequence = Conversation(first + tokens[2:length])
            self.scheduler.add(sequence)
            while sequence not in self._under_way:
                self._step(0, decodes=False)
            if number < TURNS:
                self._talking.append(sequence)
            else:
                sequence.token_ids = []  # nothing asks for it again
        for number in range(num_sequences):
            self.scheduler.add(Conversation([number % _VOCABULARY] * 8))
        for _ in range(WARM_UP_STEPS):
            self.step()

    def step(self) -> float:
        """Milliseconds of a decode step."""
        token = self._rng.randrange(_VOCABULARY)
        start = time.thread_time()
        self._step(token)
        return (time.thread_time() - start) * 1e3

    def turn(self, number: int) -> tuple[float, float]:
        """Milliseconds of ending a sequence, and of a step in which it is opened again."""
        sequence = self._talking[number]
        start = time.thread_time()
        self.scheduler.finish(sequence)
        ended = (time.thread_time() - start) * 1e3
        tokens = [*sequence.token_ids, *sequence.output_ids, 0]
        self._talking[number] = Conversation(tokens, priority=1)
        self.scheduler.add(self._talking[number])
        return ended, self.step()

    def _step(self, token: int, *, decodes: bool = True) -> None:
        scheduler, results, self._under_way = self.scheduler, self._under_way, []
        scheduler.start_step()
        while (chunk := scheduler.next_prefill()) is not None:
            self._cache.prepare({chunk.slot: len(chunk.token_ids)}, staging=True)
            scheduler.advance(chunk)
            if chunk.is_last:
                self._under_way.append(_conversation(chunk.sequence))
        batch = scheduler.next_decode() if decodes else {}
        if batch:
            self._cache.prepare(dict.fromkeys(batch, 1))
            scheduler.launched_decode(batch)
            self._under_way += map(_conversation, batch.values())
        for sequence in results:
            if scheduler.confirm(sequence, token):
                sequence.output_ids.append(token)


def _conversation(sequence: Schedulable) -> Conversation:
    assert isinstance(sequence, Conversation)
    return sequence


def simulated_cache(most_tokens: int, num_sequences: int) -> KVCache[SimulatedDevice]:
    """A cache of rows of one number; what they hold is not looked at."""
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
    device = SimulatedDevice(geometry)
    # Every page has been selected at some time: the most to sort when heat changes.
    device.heat[:] = np.random.default_rng(0).exponential(size=geometry.num_pages)
    return KVCache(geometry, device, most_step_rows=STEP_ROWS)


@dataclasses.dataclass(frozen=True)
class Timing:
    """Milliseconds of the thread, by context.

    Attributes:
        context: tokens of each sequence.
        steps: each decode step.
        scheduling: each decode step over a cache that does nothing.
        ends: ending a sequence.
        returns: a step in which one comes back that is cached whole.
    """

    context: int
    steps: Sequence[float]
    scheduling: Sequence[float]
    ends: Sequence[float]
    returns: Sequence[float]


def measure(context: int, num_sequences: int, num_steps: int) -> Timing:
    """Times steps and turns of sequences of one length."""
    idle = Bench(IdleCache(), context=ROWS_PER_DEVICE * DEVICES, num_sequences=num_sequences)
    scheduling = [idle.step() for _ in range(num_steps)]
    most_tokens = context + num_steps + WARM_UP_STEPS + 4 * TURNS
    bench = Bench(simulated_cache(most_tokens, num_sequences), context, num_sequences)
    steps = [bench.step() for _ in range(num_steps)]
    turns = [bench.turn(number) for number in range(min(TURNS, num_sequences))]
    ends, returns = zip(*turns, strict=True)
    return Timing(context, steps, scheduling, ends, returns)


def format_table(timings: Sequence[Timing]) -> str:
    """The timings in Markdown; medians, unless it says otherwise."""
    lines = [
        "| context | step, ms | least | p99 | mean | scheduler alone, ms | end, ms | return, ms |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for timing in timings:
        cells = [
            statistics.median(timing.steps),
            min(timing.steps),
            float(np.percentile(timing.steps, 99)),
            statistics.mean(timing.steps),
            statistics.median(timing.scheduling),
            statistics.median(timing.ends),
            statistics.median(timing.returns),
        ]
        listed = " | ".join(f"{cell:.2f}" for cell in cells)
        lines.append(f"| {timing.context:,} | {listed} |")
    return "\n".join(lines)


def main() -> None:
    """Runs the measurement."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, default=SEQUENCES, help="that decode together")
    parser.add_argument("--repeats", type=int, default=256, help="decode steps a context")
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS, help="tokens of each")
    options = parser.parse_args()
    timings = [measure(count, options.sequences, options.repeats) for count in options.contexts]
    print(format_table(timings))


if __name__ == "__main__":
    main()
