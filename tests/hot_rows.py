"""Hot rows as plain Python keeps them, which the tests hold compiled code against."""

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass
class HotRows:
    """Hot rows of one sequence and one index group on one device.

    Attributes:
        positions: position that each holds, or -1.
        ages: when it was last selected, or -1.
        hits: selected rows that were hot, of the last step.
        missed: different selected rows that were not, in the order of their first selection.
        staged: where those lie now for which there was room.
    """

    positions: list[int]
    ages: list[int]
    hits: int = 0
    missed: tuple[int, ...] = ()
    staged: dict[int, int] = dataclasses.field(default_factory=dict)

    @classmethod
    def empty(cls, num_hot: int) -> "HotRows":
        return cls([-1] * num_hot, [-1] * num_hot)

    def resolve(self, selected: Sequence[int], now: int) -> None:
        """Takes the host rows' positions that all rows of a step select, row by row.

        The least recently selected rows that the step does not need give way, the first of equally
        old ones first; in the order of their numbers they take the missed rows.
        """
        held = {position: row for row, position in enumerate(self.positions) if position >= 0}
        self.hits = sum(position in held for position in selected)
        self.missed = tuple(dict.fromkeys(p for p in selected if p not in held))
        for position in selected:
            if position in held:
                self.ages[held[position]] = now
        needed = {held[position] for position in selected if position in held}
        idle = sorted(
            set(range(len(self.positions))) - needed, key=lambda row: (self.ages[row], row)
        )
        victims = sorted(idle[: len(self.missed)])
        self.staged = dict(zip(self.missed, victims, strict=False))
        for position, row in self.staged.items():
            self.positions[row], self.ages[row] = position, now
