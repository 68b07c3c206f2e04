"""Admission of sequences: which may start, with pages reserved, and which may grow."""

from collections.abc import Collection, Iterable

from kvcache.geometry import KVGeometry
from kvcache.page_pool import OutOfPagesError, PagePool
from kvcache.prefix.index import PrefixMatch
from kvcache.running_sequences import RunningSequences, SequencePages
from kvcache.tiers.page_states import PageStates

_NEWEST_PAGES = 2  # of a sequence, that stay on the device: the one being written, and one before


class Admission:
    """Admission of sequences, and the pages reserved for them.

    Args:
        geometry: sizes of the store.
        pool: reference counts of pages.
        states: states of the pages of both tiers.
        running: the sequences that run.
        max_step_rows: maximum rows of one sequence in a step.
    """

    def __init__(
        self,
        geometry: KVGeometry,
        pool: PagePool,
        states: PageStates,
        running: RunningSequences,
        max_step_rows: int,
    ) -> None:
        self._geometry, self._pool, self._states, self._running = geometry, pool, states, running
        self._max_step_rows = max_step_rows
        self._outstanding = 0  # pages still reserved for the running sequences together

    @property
    def room(self) -> int:
        """Pages that are free or can be evicted, and reserved for no sequence."""
        return self._pool.num_free + self._pool.num_cached_only - self._outstanding

    def reserve(self, sequence: SequencePages) -> None:
        """Reserves the pages that a sequence starts without."""
        self._outstanding += sequence.outstanding

    def take_reserved(self, sequence: SequencePages) -> None:
        """Notes that a sequence is about to get a page, of those reserved for it if any are."""
        self._outstanding -= sequence.outstanding > 0

    def release(self, sequence: SequencePages) -> None:
        """Reserves nothing more for a sequence that ends."""
        self._outstanding -= sequence.outstanding

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
            OutOfPagesError: it cannot: pages, or those of the device, are too few.
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
            for sequence in self._running.sequences
        )
        if not self._geometry.reads_host:
            new = sum(not self._states.is_pinned(page) for page in found.pages)
            new += reserved_pages - len(found.pages) + spare_pages
            fixed = max(fixed, self._states.num_unevictable + self._outstanding + new)
        if fixed > device_pages:
            raise OutOfPagesError(
                f"{fixed} pages must lie on the device, which has {device_pages}",
                fixed - device_pages,
            )

    def can_grow(self, growing: Iterable[tuple[SequencePages, int]]) -> bool:
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
            new = beyond + self._outstanding
        return new <= self._geometry.device_pages - self._states.num_unevictable

    def check_integrity(self) -> None:
        """Proves that reserved pages are counted right, and there.

        Raises:
            AssertionError: it is not.
        """
        reserved = sum(sequence.outstanding for sequence in self._running.sequences)
        counted = self._outstanding
        assert counted == reserved, f"{counted} pages counted as reserved, are {reserved}"
        assert self.room >= 0, f"{-self.room} more pages reserved than can be had"
