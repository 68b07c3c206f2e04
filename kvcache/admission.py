"""Which sequences may start: pages are promised when one opens, so that none ever waits for one."""

import dataclasses
from collections.abc import Collection

from kvcache.counters import CacheCounters
from kvcache.geometry import KVGeometry
from kvcache.page_pool import OutOfPagesError, PagePool
from kvcache.prefix_index import PrefixMatch, Publication

_NEWEST_PAGES = 2  # of a sequence, that stay on the device: the one being written, and one before


@dataclasses.dataclass(eq=False)
class RunningSequence:
    """A running sequence.

    Attributes:
        token_ids: tokens whose rows are computed.
        pages: its pages in order.
        most_pages: pages that it may come to have.
        publication: how far its pages are known to the prefix index; None if they are not to be.
        pinned: the newest sealed page, or None.
        counters: what is counted on the host.
    """

    token_ids: list[int]
    pages: list[int]
    most_pages: int
    publication: Publication | None
    pinned: int | None
    counters: CacheCounters

    @property
    def outstanding(self) -> int:
        """Pages that are promised to it."""
        return self.most_pages - len(self.pages)


class Admission:
    """What is left to promise.

    Args:
        geometry: sizes of the store.
        pool: reference counts of pages.
        running: the sequences that run, which the caller keeps up to date.
        most_step_rows: most rows of one sequence in a step.
    """

    def __init__(
        self,
        geometry: KVGeometry,
        pool: PagePool,
        running: Collection[RunningSequence],
        most_step_rows: int,
    ) -> None:
        self._geometry, self._pool, self._running = geometry, pool, running
        self._most_step_rows = most_step_rows

    @property
    def room(self) -> int:
        """Pages that are free or can be given up, and promised to no sequence."""
        promised = sum(sequence.outstanding for sequence in self._running)
        return self._pool.num_free + self._pool.num_cached_only - promised

    def check_pages(self, wanted: int, kept: Collection[int] = ()) -> None:
        """Whether that many pages can be had while cached ones are kept.

        Raises:
            OutOfPagesError: they cannot.
        """
        room = self.room - sum(self._pool.references(page) == 0 for page in kept)
        if wanted > room:
            raise OutOfPagesError(f"{wanted} pages wanted, {room} free")

    def check(self, num_tokens: int, most_pages: int, found: PrefixMatch) -> None:
        """Whether a sequence can start.

        Args:
            num_tokens: tokens of its prompt.
            most_pages: pages that it may come to have.
            found: those that it shares.

        Raises:
            OutOfPagesError: it cannot: pages, or places on the device, are too few.
        """
        kept = [*found.pages, *([found.partial[0]] if found.partial else [])]
        self.check_pages(most_pages - len(found.pages), kept)
        if not self._geometry.has_host_tier:
            return
        newest = [min(_NEWEST_PAGES, sequence.most_pages) for sequence in self._running]
        rows = min(num_tokens, self._most_step_rows)
        fixed = sum(newest) + min(self._geometry.pages_for(rows) + _NEWEST_PAGES, most_pages)
        if fixed > self._geometry.device_pages:
            raise OutOfPagesError(
                f"{fixed} pages must lie on the device, which has {self._geometry.device_pages}"
            )
