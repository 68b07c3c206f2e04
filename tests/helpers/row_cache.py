"""Row-cache rows as plain Python keeps them, which the tests hold compiled code against."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass
class RowCacheModel:
    """Row-cache rows of one sequence and one index group on one device.

    Attributes:
        rows: row of the sequence that each holds, or -1.
        means: running mean of its scores in float32, NaN before the first.
        hits: selected rows that it held, of the last step.
        missed: different selected rows that were not, in the order of their first selection.
        staged: where those lie now for which there was room.
    """

    rows: list[int]
    means: list[float]
    hits: int = 0
    missed: tuple[int, ...] = ()
    staged: dict[int, int] = dataclasses.field(default_factory=dict)

    @classmethod
    def empty(cls, num_entries: int) -> "RowCacheModel":
        return cls([-1] * num_entries, [math.nan] * num_entries)

    def resolve(self, selected: Sequence[int], scores: Sequence[float]) -> None:
        """Takes the host rows that all rows of a step select, in order, and each row-cache row's
        score.

        Without any, nothing changes. Of the rows that the step does not need, those with the lowest
        means give way, empty ones before all and of equals the first; in the order of their numbers
        they take the missed rows.
        """
        if not selected:
            self.hits, self.missed, self.staged = 0, (), {}
            return
        held = {position: row for row, position in enumerate(self.rows) if position >= 0}
        self.hits = sum(position in held for position in selected)
        self.missed = tuple(dict.fromkeys(p for p in selected if p not in held))
        self.means = [
            score if math.isnan(mean) else float((np.float32(mean) + np.float32(score)) / 2)
            for mean, score in zip(self.means, scores, strict=True)
        ]
        needed = {held[position] for position in selected if position in held}

        def order(row: int) -> tuple[float, int]:
            return (-math.inf if self.rows[row] < 0 else self.means[row]), row

        idle = sorted(set(range(len(self.rows))) - needed, key=order)
        victims = sorted(idle[: len(self.missed)])
        self.staged = dict(zip(self.missed, victims, strict=False))
        for position, row in self.staged.items():
            self.rows[row], self.means[row] = position, math.nan
