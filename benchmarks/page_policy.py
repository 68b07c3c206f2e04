"""Times the page accounting and placement policy of decode steps, without the steps.

Sequences of one length decode in a cache whose device holds a tenth of their pages, and which is
simulated: nothing is launched, and observations read random counts. What is timed is
`KVCache.prepare` and `advance`, and, apart, the steps that observe (every 32nd), and opening and
closing a sequence whose pages are cached, as between turns. It starts when the sequences have their
hot rows and the policy its reserve of clean pages. Times are processor times of the thread, which
other work on the machine does not stretch.

usage: python benchmarks/page_policy.py [--repeats STEPS] [--json FILE]
"""

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kvcache import KVCache, KVGeometry, SimulatedDevice
from kvcache.prefix_transfer import PrefixImport
from pallas_kernels.row_format import RowFormat

CONTEXTS = (8192, 131_072, 1_048_576)
SEQUENCES = 64
TURNS = 3
DEVICE_SHARE = 10  # one page in so many lies on the device
HOT_SHARE = 0.3  # of the device pages, for hot rows: all are in use then, and pages must go
STEPS_BETWEEN_OBSERVATIONS = 32
WARM_UP_STEPS = 2 * STEPS_BETWEEN_OBSERVATIONS
_VOCABULARY = 256  # Python shares ints below it, which keeps the prompts small
_SELECTIONS = 2048  # of a sequence, between two observations
_STEP_ROWS = 64


@dataclasses.dataclass(frozen=True)
class Timing:
    """Milliseconds of the thread, by context.

    Attributes:
        context: tokens of each sequence.
        pages: pages of all sequences.
        steps: each decode step that does not observe.
        observations: each that does.
        opens: opening a sequence that is cached whole.
        closes: closing a sequence.
        cleaned: pages copied to the host in these steps.
        dropped: pages that gave up their device place in them.
    """

    context: int
    pages: int
    steps: Sequence[float]
    observations: Sequence[float]
    opens: Sequence[float]
    closes: Sequence[float]
    cleaned: int
    dropped: int


class PolicyBench:
    """A cache with sequences in all its slots.

    Args:
        context: tokens of each sequence.
        num_sequences: how many.
        num_steps: decode steps that they have room for, beside those to warm up.

    Attributes:
        cache: the cache.
        num_observations: how many steps have read back what the device counts.
    """

    def __init__(self, context: int, num_sequences: int, num_steps: int) -> None:
        num_steps += WARM_UP_STEPS
        self._geometry = _geometry(context + num_steps + TURNS, num_sequences)
        self._device = SimulatedDevice(self._geometry)
        self.cache = KVCache(
            self._geometry,
            self._device,
            most_step_rows=_STEP_ROWS,
        )
        self._rng = np.random.default_rng(0)
        # Every page has been selected at some time: the most to sort when heat changes.
        self._device.heat[:] = self._rng.exponential(size=self._geometry.num_pages)
        self._num_steps, self._taken = num_steps, 0
        self._tokens: list[list[int]] = []  # of the first sequences, which take turns
        for slot in range(num_sequences):
            # Not all of one length, so that their pages do not fill up in the same step.
            count = context - slot % self._geometry.rows_per_page
            tokens = self._rng.integers(_VOCABULARY, size=count).tolist()
            self._import(tokens[:-1])
            self._open(slot, tokens)
            if slot < TURNS:
                self._tokens.append(tokens)
        for _ in range(WARM_UP_STEPS):
            self.step()
        while self.cache.residency.clean_ahead(self._geometry.device_pages):
            self.cache.moves.flush()

    @property
    def num_observations(self) -> int:
        """How often the cache has read what the device counts."""
        return self._device.num_cooled

    def step(self) -> tuple[float, bool]:
        """Milliseconds of a decode step of all sequences, and whether it observes."""
        slots = range(self._geometry.max_sequences)
        self._select_pages()
        before = self.num_observations
        token = [int(self._rng.integers(_VOCABULARY))]
        start = time.thread_time()
        self.cache.prepare(dict.fromkeys(slots, 1))
        for slot in slots:
            self.cache.advance(slot, token)
        taken = (time.thread_time() - start) * 1e3
        self._taken += 1
        for tokens in self._tokens:
            tokens += token
        return taken, self.num_observations > before

    def turn(self, slot: int) -> tuple[float, float]:
        """Milliseconds of opening a sequence that has just closed, and of closing it."""
        start = time.thread_time()
        self.cache.close(slot)
        closed = (time.thread_time() - start) * 1e3
        self._tokens[slot].append(0)
        return self._open(slot, self._tokens[slot]), closed

    def _open(self, slot: int, tokens: list[int]) -> float:
        """Milliseconds of opening a sequence, of whose tokens all but the last are cached."""
        most_tokens = len(tokens) + self._num_steps - self._taken
        start = time.thread_time()
        found = self.cache.open(slot, tokens, most_tokens)
        taken = (time.thread_time() - start) * 1e3
        if found != len(tokens) - 1:
            raise RuntimeError(f"{found} of {len(tokens)} tokens were cached")
        self.cache.prepare({slot: 1}, staging=True)
        self.cache.advance(slot, tokens[-1:], prompt_complete=True)
        return taken

    def _import(self, tokens: list[int]) -> None:
        """Puts tokens into the cache that no sequence has computed."""
        with PrefixImport(self.cache, tokens) as transfer:
            transfer.write(
                np.zeros((len(tokens), self._geometry.num_layers, 1), np.float32),
                np.zeros((len(tokens), self._geometry.num_index_layers, 1), np.float32),
            )
            transfer.finish()

    def _select_pages(self) -> None:
        """Counts selections of random pages once an observation, as the device does meanwhile."""
        if self._taken % STEPS_BETWEEN_OBSERVATIONS:
            return
        heat = self._device.heat
        for slot in range(self._geometry.max_sequences):
            pages = np.array(self.cache.pages_of(slot))
            np.add.at(heat, pages[self._rng.integers(len(pages), size=_SELECTIONS)], 1)


def _geometry(most_tokens: int, num_sequences: int) -> KVGeometry:
    """A store with rows of one number; what they hold is not looked at."""
    rows_per_page = 64
    pages_each = -(-most_tokens // rows_per_page)
    # A page more each: opened sequences copy a partly filled one.
    num_pages = num_sequences * (pages_each + 1) + TURNS
    device_pages = -(-num_pages // DEVICE_SHARE)
    hot_pages = max(int(HOT_SHARE * device_pages) // num_sequences, 1)
    return KVGeometry(
        group_layers=(1,),
        device_pages=device_pages,
        host_pages=num_pages,  # with leases the device holds less than its share
        num_devices=1,
        rows_per_device=rows_per_page,
        max_sequences=num_sequences,
        max_pages_per_sequence=pages_each,
        row_format=RowFormat("float32", 1, 0, 1.0),
        index_row_format=RowFormat("float32", 1, 0, 1.0),
        hot_rows=hot_pages * rows_per_page,
    )


def measure(context: int, num_sequences: int, num_steps: int) -> Timing:
    """Times steps and turns of sequences of one length."""
    bench = PolicyBench(context, num_sequences, num_steps)
    residency = bench.cache.residency
    cleaned, dropped = residency.pages_cleaned, residency.pages_dropped
    taken = [bench.step() for _ in range(num_steps)]
    cleaned, dropped = residency.pages_cleaned - cleaned, residency.pages_dropped - dropped
    turns = [bench.turn(slot) for slot in range(min(TURNS, num_sequences))]
    opens, closes = zip(*turns, strict=True)
    return Timing(
        context,
        bench.cache.geometry.num_pages,
        [milliseconds for milliseconds, observes in taken if not observes],
        [milliseconds for milliseconds, observes in taken if observes],
        opens,
        closes,
        cleaned,
        dropped,
    )


def format_table(timings: Sequence[Timing]) -> str:
    """The timings in Markdown; medians, unless it says otherwise."""
    lines = [
        "| context | pages | step, ms | p99 | observing step, ms | mean, ms | open, ms | close, ms "
        "| cleaned | dropped |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for timing in timings:
        every = [*timing.steps, *timing.observations]
        cells = [
            statistics.median(timing.steps),
            np.percentile(timing.steps, 99),
            statistics.median(timing.observations),
            statistics.mean(every),
            statistics.median(timing.opens),
            statistics.median(timing.closes),
        ]
        listed = " | ".join(f"{cell:.2f}" for cell in cells)
        lines.append(
            f"| {timing.context:,} | {timing.pages:,} | {listed} | {timing.cleaned:,} "
            f"| {timing.dropped:,} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Runs the measurement."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=512, help="decode steps a context")
    parser.add_argument("--json", type=Path, help="write all times here")
    options = parser.parse_args()
    if options.repeats < STEPS_BETWEEN_OBSERVATIONS:
        parser.error(
            f"--repeats must be at least {STEPS_BETWEEN_OBSERVATIONS}, got {options.repeats}"
        )
    timings = [measure(context, SEQUENCES, options.repeats) for context in CONTEXTS]
    print(format_table(timings))
    if options.json:
        rows = [dataclasses.asdict(timing) for timing in timings]
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
