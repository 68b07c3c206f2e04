"""The few shapes in which steps are compiled."""

import dataclasses
import itertools

from kvcache.geometry import KVGeometry

_FEWEST_ROWS = 16
_FEWEST_CONTEXT_TOKENS = 1024
_GROWTH = 4


@dataclasses.dataclass(frozen=True)
class Buckets:
    """Sizes that a step may have.

    Attributes:
        rows: rows of a prefill step, ascending.
        sequences: sequences of a decode step, ascending.
        context_pages: pages of context, ascending; the last is a whole block table.
    """

    rows: tuple[int, ...]
    sequences: tuple[int, ...]
    context_pages: tuple[int, ...]

    @classmethod
    def for_geometry(cls, geometry: KVGeometry, max_num_batched_tokens: int) -> "Buckets":
        """Buckets up to the given chunk of a prefill and the geometry's limits."""
        fewest_pages = geometry.pages_for(_FEWEST_CONTEXT_TOKENS)
        return cls(
            _geometric(_FEWEST_ROWS, max_num_batched_tokens, _GROWTH),
            _geometric(1, geometry.max_sequences, 2),
            _geometric(fewest_pages, geometry.max_pages_per_sequence, _GROWTH),
        )

    def chunk(self, remaining: int) -> int:
        """Rows of the next step of a prompt with `remaining` tokens to go.

        The smallest bucket that holds them all, unless more than half of it would be padding.
        """
        fitting = fit(self.rows, remaining) if remaining <= self.rows[-1] else self.rows[-1]
        if fitting <= 2 * remaining or fitting == self.rows[0]:
            return fitting
        return max(bucket for bucket in self.rows if bucket <= remaining)


def fit(buckets: tuple[int, ...], size: int) -> int:
    """The smallest bucket of at least `size`.

    Raises:
        ValueError: `size` exceeds every bucket.
    """
    for bucket in buckets:
        if bucket >= size:
            return bucket
    raise ValueError(f"{size} exceeds the largest bucket {buckets[-1]}")


def _geometric(first: int, last: int, factor: int) -> tuple[int, ...]:
    powers = (first * factor**power for power in itertools.count())
    return (*itertools.takewhile(lambda size: size < last, powers), last)
