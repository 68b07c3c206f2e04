"""Python time of a decode step besides its launch: scheduler, page bookkeeping and policy.

Sequences of one length decode while as many others wait, in a full cache whose device executes
nothing and holds a tenth of the pages. As in serving, pages fill up and are sealed, offloaded to
the host, dropped from the device and evicted, and heat changes every 32nd step. At the end some
sequences end and come back.

A step is divided into the scheduler, timed over a cache that does nothing; the policy, timed within
the step (it is called a few times); and the page bookkeeping, which is the rest. Times are
processor times of the thread (`time.thread_time`): other work on the machine stretches them, since
it shares caches and cores, but less than wall time.

usage: python benchmarks/cpu/scheduler_overhead.py [--sequences N ...] [--contexts N ...]
           [--repeats STEPS] [--json FILE]
"""

import argparse
import dataclasses
import itertools
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.progress import show_progress
from benchmarks.cpu.simulated_decode import DecodeSteps, IdleCache, simulated_cache

CONTEXTS = (8192, 131_072, 1_048_576)
SEQUENCES = (64, 256)
TURNS = 3
_MIN_STEPS = 32  # heat changes once in as many


class Stopwatch:
    """Sum of the thread's time in watched methods; nested calls count once.

    Attributes:
        seconds: the time so far.
        calls: number of calls by method.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.calls: dict[str, int] = {}
        self._depth = 0

    def watch(self, owner: object, *names: str) -> None:
        """Watches methods of an object from now on."""
        for name in names:
            self.calls[name] = 0
            setattr(owner, name, self._timed(name, getattr(owner, name)))

    def _timed(self, name: str, method: Any) -> Any:
        def timed(*arguments: Any, **options: Any) -> Any:
            self.calls[name] += 1
            if self._depth:
                return method(*arguments, **options)
            self._depth += 1
            start = time.thread_time()
            try:
                return method(*arguments, **options)
            finally:
                self.seconds += time.thread_time() - start
                self._depth -= 1

        return timed


@dataclasses.dataclass(frozen=True)
class Timing:
    """Milliseconds of the thread, for sequences of one length.

    Attributes:
        sequences: number of sequences that decode.
        context: tokens of each.
        steps: time of each decode step.
        scheduling: time of each decode step over a cache that does nothing.
        policy: the policy's share of each decode step.
        observations: times of the decode steps in which heat changed.
        ends: times of ending a sequence.
        returns: times of steps in which one comes back that is cached whole.
        offloaded: number of pages copied to the host in the decode steps.
        dropped: number of pages dropped from the device.
        evicted: number of cached pages that were evicted.
    """

    sequences: int
    context: int
    steps: Sequence[float]
    scheduling: Sequence[float]
    policy: Sequence[float]
    observations: Sequence[float]
    ends: Sequence[float]
    returns: Sequence[float]
    offloaded: int
    dropped: int
    evicted: int

    @property
    def parts(self) -> dict[str, Sequence[float]]:
        """Times of a step and its parts. Bookkeeping is the rest without policy and median
        scheduler."""
        scheduling = statistics.median(self.scheduling)
        rest = [step - policy for step, policy in zip(self.steps, self.policy, strict=True)]
        bookkeeping = [each - scheduling for each in rest]
        return {
            "step": self.steps,
            "scheduler": self.scheduling,
            "bookkeeping": bookkeeping,
            "policy": self.policy,
        }


def measure(sequences: int, context: int, num_steps: int) -> Timing:
    """Times steps and turns of sequences of one length."""
    idle = DecodeSteps(IdleCache(), context, sequences)
    scheduling = [idle.step() for _ in range(num_steps)]
    cache = simulated_cache(context, sequences, num_steps + 2 * TURNS)
    bench = DecodeSteps(cache, context, sequences)
    watch, residency = Stopwatch(), cache.residency
    watch.watch(cache.index, "evict")
    watch.watch(
        residency, "offload_ahead", "onload_hottest", "make_room", "lease_row_cache", "update_heat"
    )
    offloaded, dropped = residency.pages_offloaded, residency.pages_dropped
    steps, policy, observations = [], [], []
    for _ in range(num_steps):
        before, observed = watch.seconds, watch.calls["update_heat"]
        steps.append(bench.step())
        policy.append((watch.seconds - before) * 1e3)
        if watch.calls["update_heat"] > observed:
            observations.append(steps[-1])
    offloaded = residency.pages_offloaded - offloaded
    dropped = residency.pages_dropped - dropped
    evicted = watch.calls["evict"]
    turns = [bench.turn(number) for number in range(TURNS)]
    ends, returns = zip(*turns, strict=True)
    return Timing(
        sequences,
        context,
        steps,
        scheduling,
        policy,
        observations,
        ends,
        returns,
        offloaded,
        dropped,
        evicted,
    )


def format_steps(timings: Sequence[Timing]) -> str:
    """Formats decode steps and their parts in Markdown; the last column compares the mean with that
    of the first context of as many sequences."""
    lines = [
        "| sequences | context | part | median, ms | mean, ms | 99%, ms | least, ms "
        "| of the first |",
        "|---|---|---|---|---|---|---|---|",
    ]
    first_means: dict[tuple[int, str], float] = {}
    for timing in timings:
        for part, times in timing.parts.items():
            mean = statistics.mean(times)
            first_mean = first_means.setdefault((timing.sequences, part), mean)
            cells = [statistics.median(times), mean, float(np.percentile(times, 99)), min(times)]
            listed = " | ".join(f"{cell:.3f}" for cell in cells)
            lines.append(
                f"| {timing.sequences} | {timing.context:,} | {part} | {listed} "
                f"| {mean / first_mean:.2f} |"
            )
    return "\n".join(lines)


def format_turns(timings: Sequence[Timing]) -> str:
    """Formats rarer events in Markdown: their median times, and counts of pages over all steps."""
    lines = [
        "| sequences | context | observing step, ms | end, ms | return, ms "
        "| offloaded | dropped | evicted |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for timing in timings:
        medians = map(statistics.median, (timing.observations, timing.ends, timing.returns))
        listed = " | ".join(f"{median:.2f}" for median in medians)
        lines.append(
            f"| {timing.sequences} | {timing.context:,} | {listed} "
            f"| {timing.offloaded:,} | {timing.dropped:,} | {timing.evicted:,} |"
        )
    return "\n".join(lines)


def _describe(timing: Timing) -> str:
    return f"{timing.sequences} sequences of {timing.context:,} tokens"


def main() -> None:
    """Runs the measurement."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--sequences",
        type=int,
        nargs="+",
        default=SEQUENCES,
        help="numbers of sequences that decode",
    )
    parser.add_argument(
        "--contexts", type=int, nargs="+", default=CONTEXTS, help="tokens of each sequence"
    )
    parser.add_argument("--repeats", type=int, default=512, help="decode steps of each measurement")
    parser.add_argument("--json", type=Path, help="write all times here")
    options = parser.parse_args()
    if options.repeats < _MIN_STEPS:
        parser.error(f"--repeats must be at least {_MIN_STEPS}, got {options.repeats}")
    cases = list(itertools.product(options.sequences, options.contexts))
    runs = (measure(*case, options.repeats) for case in cases)
    timings = list(show_progress(runs, len(cases), _describe))
    print(format_steps(timings), format_turns(timings), sep="\n\n")
    if options.json:
        rows = [dataclasses.asdict(timing) for timing in timings]
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
