"""The few shapes in which steps are compiled."""

import dataclasses

from kvcache.geometry import KVGeometry

_MIN_ROWS = 32
_MIN_CONTEXT_TOKENS = 4096
_GROWTH = 4


@dataclasses.dataclass(frozen=True)
class Buckets:
    """Sizes that a step may have. Every size and every pair of them is a program to compile, so
    they are few: each up to four times the one before, as rows of padding cost little.

    Attributes:
        rows: rows of a prefill step, ascending.
        sequences: sequences of a decode step, ascending from 1.
        context_pages: pages of context, ascending; the last is a whole block table.
        rows_per_page: tokens of a page.
    """

    rows: tuple[int, ...]
    sequences: tuple[int, ...]
    context_pages: tuple[int, ...]
    rows_per_page: int

    @classmethod
    def for_geometry(cls, geometry: KVGeometry, max_num_batched_tokens: int) -> "Buckets":
        """Buckets up to the given chunk of a prefill and the geometry's limits."""
        min_pages = geometry.pages_for(_MIN_CONTEXT_TOKENS)
        return cls(
            _geometric(_MIN_ROWS, max_num_batched_tokens),
            _geometric(1, geometry.max_sequences),
            _geometric(min_pages, geometry.max_pages_per_sequence),
            geometry.rows_per_page,
        )

    @property
    def prefills(self) -> list[tuple[int, int]]:
        """Rows and pages of context of each prefill step that there can be."""
        return [
            (rows, pages)
            for rows in self.rows
            for pages in self.context_pages
            if pages == self.prefill_context(rows, pages)
        ]

    def prefill_context(self, rows: int, pages: int) -> int:
        """Pages of context of a prefill step of `rows` for a sequence of so many pages: no fewer
        than would hold the rows, so that there are fewer pairs."""
        held = min(-(-rows // self.rows_per_page), self.context_pages[-1])
        return fit(self.context_pages, max(pages, held))

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


def _geometric(first: int, last: int) -> tuple[int, ...]:
    """Sizes from `first` to `last`, none but it above its half."""
    sizes = []
    while 2 * first <= last:
        sizes.append(first)
        first *= _GROWTH
    return (*sizes, last)
