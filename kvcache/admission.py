"""Admission of sequences: which may start, with pages reserved, and which may grow."""

import dataclasses
from collections.abc import Collection, Iterable

from kvcache.counters import CacheCounters
from kvcache.geometry import KVGeometry
from kvcache.page_pool import OutOfPagesError, PagePool
from kvcache.prefix.index import PrefixMatch, Publication
from kvcache.tiers.page_states import PageStates

_NEWEST_PAGES = 2  # of a sequence, that stay on the device: the one being written, and one before


@dataclasses.dataclass(eq=False, slots=True)
class RunningSequence:
    """A running sequence.

    Attributes:
        token_ids: tokens of its full pages.
        pages: its pages in order.
        reserved_pages: pages reserved for it in all.
        publication: its progress in the prefix index; None if its pages are not published.
        pinned: its sealed pages that stay on the device.
        counters: what is counted on the host.
    """

    token_ids: list[int]
    pages: list[int]
    reserved_pages: int
    publication: Publication | None
    pinned: list[int]
    counters: CacheCounters

    @property
    def outstanding(self) -> int:
        """Pages that are still reserved for it."""
        return max(self.reserved_pages - len(self.pages), 0)


class Admission:
    """Admission of sequences: the pages that are left to reserve.

    Args:
        geometry: sizes of the store.
        pool: reference counts of pages.
        states: bookkeeping of the pages of both tiers.
        running: the sequences that run, which the caller keeps up to date.
        max_step_rows: maximum rows of one sequence in a step.

    Attributes:
        outstanding: pages still reserved for the running sequences together, which the caller
            keeps up to date too.
    """

    def __init__(
        self,
        geometry: KVGeometry,
        pool: PagePool,
        states: PageStates,
        running: Collection[RunningSequence],
        max_step_rows: int,
    ) -> None:
        self._geometry, self._pool, self._states, self._running = geometry, pool, states, running
        self._max_step_rows = max_step_rows
        self.outstanding = 0

    @property
    def room(self) -> int:
        """Pages that are free or can be evicted, and reserved for no sequence."""
        return self._pool.num_free + self._pool.num_cached_only - self.outstanding

    def check_pages(self, wanted: int, kept: Collection[int] = ()) -> None:
        """Checks that so many pages can be had while cached ones are kept.

        Raises:
            OutOfPagesError: they cannot.
        """
        room = self.room - self._pool.num_unreferenced(kept)
        if wanted > room:
            raise OutOfPagesError(f"{wanted} pages wanted, {room} free", wanted - room)

    def check(
        self, num_tokens: int, reserved_pages: int, found: PrefixMatch, spare_pages: int
    ) -> None:
        """Checks that a sequence can start.

        Args:
            num_tokens: tokens of its prompt.
            reserved_pages: pages to reserve for it.
            found: those that it shares.
            spare_pages: pages to leave for those that run.

        Raises:
            OutOfPagesError: it cannot: pages, or places on the device, are too few.
        """
        kept = [*found.pages, *([found.partial[0]] if found.partial else [])]
        self.check_pages(reserved_pages - len(found.pages) + spare_pages, kept)
        if not self._geometry.has_host_tier:
            return
        device_pages = self._geometry.device_pages
        rows = min(num_tokens, self._max_step_rows)
        fixed = min(self._geometry.pages_for(rows) + _NEWEST_PAGES, reserved_pages)
        fixed += sum(
            min(_NEWEST_PAGES, max(sequence.reserved_pages, len(sequence.pages)))
            for sequence in self._running
        )
        if not self._geometry.reads_host:
            new = sum(not self._states.is_pinned(page) for page in found.pages)
            new += reserved_pages - len(found.pages) + spare_pages
            fixed = max(fixed, self._states.num_unevictable + self.outstanding + new)
        if fixed > device_pages:
            raise OutOfPagesError(
                f"{fixed} pages must lie on the device, which has {device_pages}",
                fixed - device_pages,
            )

    def can_grow(self, growing: Iterable[tuple[RunningSequence, int]]) -> bool:
        """Whether sequences can have so many more pages each, in one step."""
        new = beyond = 0
        for sequence, count in growing:
            new += count
            beyond += max(count - sequence.outstanding, 0)
        if not new:
            return True
        if beyond > self.room:
            return False
        if not self._geometry.has_host_tier:
            return True
        if not self._geometry.reads_host:
            new = beyond + self.outstanding
        return new <= self._geometry.device_pages - self._states.num_unevictable

    def check_integrity(self) -> None:
        """Proves that reserved pages are counted right, and there.

        Raises:
            AssertionError: it is not.
        """
        reserved = sum(sequence.outstanding for sequence in self._running)
        counted = self.outstanding
        assert counted == reserved, f"{counted} pages counted as reserved, are {reserved}"
        assert self.room >= 0, f"{-self.room} more pages reserved than can be had"
