"""Times what Python does for a decode step besides launching it: scheduler, page account, policy.

Sequences of one length decode while as many others wait, in a full cache whose device executes
nothing and holds a tenth of the pages. As in serving, pages fill up and are sealed, copied to the
host, dropped and given up, and every 32nd step heat changes. At the end some sequences end and come
back.

A step is divided into the scheduler, which is timed over a cache that does nothing; the policy,
which is timed within the step (it is called a few times); and the account of the pages, the rest.
Times are processor times of the thread (`time.thread_time`): other work on the machine stretches
them, as it shares caches and cores, but less than the time by the clock.

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
_FEWEST_STEPS = 32  # one changes heat


class Stopwatch:
    """Adds up the thread's time in some methods of objects; a call within another counts once.

    Attributes:
        seconds: the time so far.
        calls: how often each method was called.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.calls: dict[str, int] = {}
        self._depth = 0

    def watch(self, owner: object, *names: str) -> None:
        """Times methods of an object from now on."""
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
    """Milliseconds of the thread, of sequences of one length.

    Attributes:
        sequences: how many decode.
        context: tokens of each.
        steps: each decode step.
        scheduling: each decode step over a cache that does nothing.
        policy: what of each decode step is the policy's.
        observations: the decode steps in which heat changed.
        ends: ending a sequence.
        returns: a step in which one comes back that is cached whole.
        cleaned: pages copied to the host in the decode steps.
        dropped: pages that gave up their device place.
        given_up: cached pages that were given up.
    """

    sequences: int
    context: int
    steps: Sequence[float]
    scheduling: Sequence[float]
    policy: Sequence[float]
    observations: Sequence[float]
    ends: Sequence[float]
    returns: Sequence[float]
    cleaned: int
    dropped: int
    given_up: int

    @property
    def parts(self) -> dict[str, Sequence[float]]:
        """A step and its parts. What is not policy, less the median scheduler, is the account."""
        scheduling = statistics.median(self.scheduling)
        rest = [step - policy for step, policy in zip(self.steps, self.policy, strict=True)]
        account = [each - scheduling for each in rest]
        return {
            "step": self.steps,
            "scheduler": self.scheduling,
            "account": account,
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
    watch.watch(residency, "clean_ahead", "promote", "make_room", "lease_hot", "update_heat")
    cleaned, dropped = residency.pages_cleaned, residency.pages_dropped
    steps, policy, observations = [], [], []
    for _ in range(num_steps):
        before, observed = watch.seconds, watch.calls["update_heat"]
        steps.append(bench.step())
        policy.append((watch.seconds - before) * 1e3)
        if watch.calls["update_heat"] > observed:
            observations.append(steps[-1])
    cleaned, dropped = residency.pages_cleaned - cleaned, residency.pages_dropped - dropped
    given_up = watch.calls["evict"]
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
        cleaned,
        dropped,
        given_up,
    )


def format_steps(timings: Sequence[Timing]) -> str:
    """Decode steps and their parts in Markdown; the last column compares means with the first
    context of as many sequences."""
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
    """What does not happen in every step, in Markdown: medians, and pages in all steps."""
    lines = [
        "| sequences | context | observing step, ms | end, ms | return, ms "
        "| cleaned | dropped | given up |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for timing in timings:
        medians = map(statistics.median, (timing.observations, timing.ends, timing.returns))
        listed = " | ".join(f"{median:.2f}" for median in medians)
        lines.append(
            f"| {timing.sequences} | {timing.context:,} | {listed} "
            f"| {timing.cleaned:,} | {timing.dropped:,} | {timing.given_up:,} |"
        )
    return "\n".join(lines)


def _describe(timing: Timing) -> str:
    return f"{timing.sequences} sequences of {timing.context:,} tokens"


def main() -> None:
    """Runs the measurement."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, nargs="+", default=SEQUENCES, help="that decode")
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS, help="tokens of each")
    parser.add_argument("--repeats", type=int, default=512, help="decode steps of each")
    parser.add_argument("--json", type=Path, help="write all times here")
    options = parser.parse_args()
    if options.repeats < _FEWEST_STEPS:
        parser.error(f"--repeats must be at least {_FEWEST_STEPS}, got {options.repeats}")
    cases = list(itertools.product(options.sequences, options.contexts))
    runs = (measure(*case, options.repeats) for case in cases)
    timings = list(show_progress(runs, len(cases), _describe))
    print(format_steps(timings), format_turns(timings), sep="\n\n")
    if options.json:
        rows = [dataclasses.asdict(timing) for timing in timings]
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
