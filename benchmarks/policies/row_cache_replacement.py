"""Miss rates of replacement policies for the row cache, on recorded and on modelled selections.

Each index group of a sequence caches rows by position. The rows that a step selects are hits or
misses; a missed row replaces the row that the policy values least, and is read in place if there is
none to replace. A row that the step selects is not replaced in it, except by Belady's bound, which
knows the future. The newest rows stay on the device and are not looked up.

usage: python benchmarks/policies/row_cache_replacement.py [--quick]
"""

import argparse
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import override

import numpy as np

from benchmarks.policies.modelled_selections import modelled_selections
from benchmarks.policies.recorded_selections import (
    CACHE,
    Selections,
    load_or_record,
    needle_selections,
    text_selections,
)

SIZES = (1, 2, 4)  # cached rows, as a multiple of top-k
NEVER = 1e9  # step of a next use that never comes
# Misses of GLM-5.1 on LongBenchV2 with k = 2048, in % (arXiv 2608.07009).
PUBLISHED = {
    "LRU": ("30.0", "13.4", "6.7"),
    "FIFO": ("", "17.2", ""),
    "random": ("", "16.1", ""),
    "Belady's bound": ("", "8.2", ""),
}


@dataclasses.dataclass(frozen=True)
class Lookups:
    """Lookups of one step: `ranked` and `scores` [caches, candidates], `next_use` [caches, k]."""

    ranked: np.ndarray
    scores: np.ndarray
    next_use: np.ndarray


@dataclasses.dataclass(frozen=True)
class CachedRows:
    """Selected rows that are cached now, all int [rows]."""

    cache: np.ndarray
    entry: np.ndarray
    rank: np.ndarray


class Policy:
    """Replacement policy of several caches: the row of the lowest value is replaced first.

    Attributes:
        owners: int [caches, entries], the position cached in each entry, -1 for none.
        now: the step.
    """

    foresight = False

    def __init__(self, selections: Selections, entries: int) -> None:
        self.shape = (len(selections.ranked), entries)
        self.top_k, self.num_positions = selections.top_k, selections.num_positions
        self.owners = np.full(self.shape, -1)
        self.now = 0

    def see(self, lookups: Lookups) -> None:
        """Observes the lookups of a step."""

    def use(self, hits: CachedRows) -> None:
        """Observes hits."""

    def admit(self, loaded: CachedRows) -> None:
        """Observes loaded rows."""
        self.use(loaded)

    def value(self) -> np.ndarray:
        """Returns the value of each entry [caches, entries]; those of empty entries are ignored."""
        raise NotImplementedError

    def of_owners(self, table: np.ndarray) -> np.ndarray:
        """Looks up each entry in a table [caches, positions + 1], whose last column is for none."""
        return np.take_along_axis(table, self.owners, axis=1)


class LRU(Policy):
    """Least recently selected row, in steps; ties by entry."""

    def __init__(self, selections: Selections, entries: int) -> None:
        super().__init__(selections, entries)
        self.last = np.zeros(self.shape)

    @override
    def use(self, hits: CachedRows) -> None:
        self.last[hits.cache, hits.entry] = self.now

    @override
    def value(self) -> np.ndarray:
        return self.last


class FIFO(LRU):
    """Row that was loaded first."""

    @override
    def use(self, hits: CachedRows) -> None:
        pass

    @override
    def admit(self, loaded: CachedRows) -> None:
        super().use(loaded)


class Random(Policy):
    """Random row."""

    def __init__(self, selections: Selections, entries: int) -> None:
        super().__init__(selections, entries)
        self.generator = np.random.default_rng(0)

    @override
    def value(self) -> np.ndarray:
        return self.generator.random(self.shape)


class Clock(Policy):
    """First row of a circling hand that was not used since the hand last passed it."""

    def __init__(self, selections: Selections, entries: int) -> None:
        super().__init__(selections, entries)
        self.used = np.zeros(self.shape, bool)
        self.used_now = np.zeros(self.shape, bool)
        self.hand = np.zeros(self.shape[0], int)

    @override
    def see(self, lookups: Lookups) -> None:
        self.used_now[:] = False

    @override
    def use(self, hits: CachedRows) -> None:
        self.used[hits.cache, hits.entry] = self.used_now[hits.cache, hits.entry] = True

    @override
    def admit(self, loaded: CachedRows) -> None:
        turns = self.value()
        furthest = np.full(self.shape[0], -1)
        np.maximum.at(furthest, loaded.cache, turns[loaded.cache, loaded.entry])
        self.used &= (turns % self.shape[1] > furthest[:, None]) | self.used_now
        self.hand = np.where(furthest < 0, self.hand, self.hand + furthest + 1) % self.shape[1]
        self.use(loaded)

    @override
    def value(self) -> np.ndarray:
        """Returns the number of entries that the hand visits before it takes each."""
        entries = self.shape[1]
        return (np.arange(entries) - self.hand[:, None]) % entries + entries * self.used


class SegmentedLRU(LRU):
    """LRU of the rows never hit in the cache, then of the others, at most half of the cache."""

    def __init__(self, selections: Selections, entries: int) -> None:
        super().__init__(selections, entries)
        self.protected = np.zeros(self.shape, bool)

    @override
    def use(self, hits: CachedRows) -> None:
        super().use(hits)
        self.protected[hits.cache, hits.entry] = True
        newest = np.argsort(np.where(self.protected, -self.last, 1), axis=1, kind="stable")
        beyond = newest[:, self.shape[1] // 2 :]
        rows = np.arange(self.shape[0])[:, None]
        demoted = self.protected[rows, beyond]
        self.last[rows, beyond] = np.where(demoted, self.now, self.last[rows, beyond])
        self.protected[rows, beyond] = False

    @override
    def admit(self, loaded: CachedRows) -> None:
        super().use(loaded)
        self.protected[loaded.cache, loaded.entry] = False

    @override
    def value(self) -> np.ndarray:
        return self.last + self.protected * NEVER


class RankedLRU(LRU):
    """LRU in which the last of a selection counts as 8 steps older than the first."""

    @override
    def use(self, hits: CachedRows) -> None:
        self.last[hits.cache, hits.entry] = self.now - 8 * hits.rank / self.top_k


class LRU2(Policy):
    """Least recent second-to-last selection, then last selection; replaced rows are remembered.

    E. J. O'Neil, P. E. O'Neil and G. Weikum, The LRU-K page replacement algorithm, 1993.
    """

    def __init__(self, selections: Selections, entries: int) -> None:
        super().__init__(selections, entries)
        shape = (self.shape[0], self.num_positions + 1)
        self.before, self.last = np.full(shape, -1.0), np.full(shape, -1.0)

    @override
    def see(self, lookups: Lookups) -> None:
        where = (np.arange(self.shape[0])[:, None], lookups.ranked[:, : self.top_k])
        self.before[where] = self.last[where]
        self.last[where] = self.now

    @override
    def value(self) -> np.ndarray:
        return self.of_owners(self.before) + self.of_owners(self.last) / NEVER


class Frequency(Policy):
    """Lowest count of selections, decayed by e every 8 steps; replaced rows are remembered.

    Stored as the step at which a single selection would have the same value.
    """

    decay = 8.0  # steps

    def __init__(self, selections: Selections, entries: int) -> None:
        super().__init__(selections, entries)
        self.step = np.full((self.shape[0], self.num_positions + 1), -NEVER)

    @override
    def see(self, lookups: Lookups) -> None:
        where = (np.arange(self.shape[0])[:, None], lookups.ranked[:, : self.top_k])
        both = np.logaddexp(self.step[where] / self.decay, self.now / self.decay)
        self.step[where] = self.decay * both

    @override
    def value(self) -> np.ndarray:
        return self.of_owners(self.step)


class CurrentScore(Policy):
    """Lowest score of the step's query; rows below the candidates have the last one's score."""

    def __init__(self, selections: Selections, entries: int) -> None:
        super().__init__(selections, entries)
        self.score = np.zeros((self.shape[0], self.num_positions + 1), np.float32)

    @override
    def see(self, lookups: Lookups) -> None:
        self.score[:] = lookups.scores.min(axis=1, keepdims=True)
        np.put_along_axis(self.score, lookups.ranked, lookups.scores, axis=1)

    @override
    def value(self) -> np.ndarray:
        return self.of_owners(self.score)


class SmoothedScore(CurrentScore):
    """Lowest mean of the step's score and the previous mean, from the step it was loaded."""

    weight = 0.5  # of the step's score

    def __init__(self, selections: Selections, entries: int) -> None:
        super().__init__(selections, entries)
        self.mean = np.zeros(self.shape, np.float32)

    @override
    def see(self, lookups: Lookups) -> None:
        super().see(lookups)
        self.mean += self.weight * (self.of_owners(self.score) - self.mean)

    @override
    def admit(self, loaded: CachedRows) -> None:
        where = (loaded.cache, loaded.entry)
        self.mean[where] = self.of_owners(self.score)[where]

    @override
    def value(self) -> np.ndarray:
        return self.mean


class Belady(Policy):
    """Furthest next selection, of cached and selected rows alike: no policy misses less.

    L. A. Belady, A study of replacement algorithms for a virtual-storage computer, 1966.
    """

    foresight = True

    def __init__(self, selections: Selections, entries: int) -> None:
        super().__init__(selections, entries)
        self.next = np.zeros(self.shape)
        self.next_use = np.zeros((self.shape[0], self.top_k))

    @override
    def see(self, lookups: Lookups) -> None:
        self.next_use = lookups.next_use

    @override
    def use(self, hits: CachedRows) -> None:
        self.next[hits.cache, hits.entry] = self.next_use[hits.cache, hits.rank]

    @override
    def value(self) -> np.ndarray:
        return -self.next


POLICIES: dict[str, type[Policy]] = {
    "LRU": LRU,
    "FIFO": FIFO,
    "random": Random,
    "CLOCK": Clock,
    "segmented LRU": SegmentedLRU,
    "LRU by rank": RankedLRU,
    "LRU-2": LRU2,
    "decayed frequency": Frequency,
    "current score": CurrentScore,
    "smoothed score": SmoothedScore,
    "Belady's bound": Belady,
}


@dataclasses.dataclass(frozen=True)
class Step:
    """Outcome of a step.

    Attributes:
        selected: int [caches, k], positions, -1 for none.
        missed: bool [caches, k].
        owners: int [caches, entries], the position cached in each entry afterwards.
    """

    selected: np.ndarray
    missed: np.ndarray
    owners: np.ndarray


def next_uses(selected: np.ndarray) -> np.ndarray:
    """Returns the next step at which the same cache selects each position again, or `NEVER`.

    Args:
        selected: int [caches, steps, k], positions, -1 for none.

    Returns:
        float [caches, steps, k], arbitrary where there is no position.
    """
    upcoming = np.full((len(selected), int(selected.max()) + 2), NEVER, np.float32)
    result = np.empty(selected.shape, np.float32)
    for step in reversed(range(selected.shape[1])):
        positions = selected[:, step].astype(np.int64)
        result[:, step] = np.take_along_axis(upcoming, positions, axis=1)
        np.put_along_axis(upcoming, positions, np.float32(step), axis=1)
    return result


def simulate(policy: Policy, selections: Selections) -> Iterator[Step]:
    """Runs the policy's caches, empty at first, through all steps."""
    caches, k = policy.shape[0], selections.top_k
    num_steps = selections.ranked.shape[1]
    next_use = np.zeros((caches, num_steps, k), np.float32)
    if policy.foresight:
        next_use = next_uses(selections.ranked[:, :, :k])
    entry_of = np.full((caches, selections.num_positions + 1), -1)  # the last column is for none
    for now in range(num_steps):
        ranked = selections.ranked[:, now].astype(np.int64)
        selected = ranked[:, :k]
        policy.now = now
        policy.see(Lookups(ranked, selections.scores[:, now].astype(np.float32), next_use[:, now]))
        entries = np.take_along_axis(entry_of, selected, axis=1)
        hit, missed = entries >= 0, (entries < 0) & (selected >= 0)
        cache, rank = np.nonzero(hit)
        policy.use(CachedRows(cache, entries[hit], rank))
        value = np.where(policy.owners < 0, -np.inf, policy.value())
        worth = np.where(missed, np.inf, -np.inf)
        if policy.foresight:
            worth = np.where(missed, -next_use[:, now], -np.inf)
        else:
            value[cache, entries[hit]] = np.inf
        evicted = np.argsort(value, axis=1, kind="stable")[:, :k]
        ranks = np.argsort(-worth, axis=1, kind="stable")[:, : evicted.shape[1]]
        loaded = np.take_along_axis(value, evicted, axis=1) < np.take_along_axis(
            worth, ranks, axis=1
        )
        cache = np.nonzero(loaded)[0]
        entry, rank = evicted[loaded], ranks[loaded]
        entry_of[cache, policy.owners[cache, entry]] = -1
        entry_of[cache, selected[cache, rank]] = entry
        policy.owners[cache, entry] = selected[cache, rank]
        policy.admit(CachedRows(cache, entry, rank))
        yield Step(selected, missed, policy.owners)


def miss_rate(policy: Policy, selections: Selections) -> float:
    """Returns misses over selected rows, of all caches and all steps after the warm-up."""
    misses = selected = 0
    for now, step in enumerate(simulate(policy, selections)):
        if now >= selections.warm_up:
            misses += int(step.missed.sum())
            selected += int((step.selected >= 0).sum())
    return misses / selected


def format_table(workloads: dict[str, Selections]) -> str:
    """Formats misses in percent in Markdown: policies by workload and cache size."""
    sizes = [f"{size}k" for size in SIZES]
    head = [f"{name} {size}" for name in (*workloads, "published") for size in sizes]
    lines = ["| policy | " + " | ".join(head) + " |", "|---" * (len(head) + 1) + "|"]
    for name, policy_type in POLICIES.items():
        rates = [
            100 * miss_rate(policy_type(selections, size * selections.top_k), selections)
            for selections in workloads.values()
            for size in SIZES
        ]
        cells = [f"{rate:.1f}" for rate in rates]
        lines.append(f"| {name} | " + " | ".join([*cells, *PUBLISHED.get(name, ("",) * 3)]) + " |")
    return "\n".join(lines)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="only a small set of modelled selections"
    )
    parser.add_argument("--cache", type=Path, default=CACHE, help="directory of the recordings")
    options = parser.parse_args()
    if options.quick:
        workloads = {"model": modelled_selections(1, 60, top_k=32, warm_up=30)}
    else:
        recordings = tuple(load_or_record(options.cache).values())
        workloads = {
            "text": text_selections(recordings),
            "needles": needle_selections(recordings),
            "model": modelled_selections(2, 450, top_k=2048, warm_up=150),
        }
    print(format_table(workloads))


if __name__ == "__main__":
    main()
