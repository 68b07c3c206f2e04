"""Device pages on lease, which hold no page: row caches of sequence slots, and staging."""

from collections.abc import Callable

from kvcache.tiers.free_list import FreeList


class Leases:
    """Leases of device pages.

    Attributes:
        row_cache: device pages of each slot's row cache, the oldest lease first.
        staging: device pages of the staging lease.
        num_revoked: row-cache leases that `revoke` ended.
    """

    def __init__(
        self,
        free: FreeList,
        *,
        max_sequences: int,
        row_cache_pages: int,
        staging_pages: int,
        on_change: Callable[[int, tuple[int, ...]], None],
        on_revoke: Callable[[int], None],
    ) -> None:
        """No lease.

        Args:
            free: indices of the device pages that are free.
            max_sequences: sequence slots.
            row_cache_pages: device pages of a row-cache lease.
            staging_pages: most device pages of the staging lease.
            on_change: called with a slot whose row-cache lease began or ended, and its pages now.
            on_revoke: called with a slot whose row-cache lease was revoked.
        """
        self._free = free
        self._max_sequences = max_sequences
        self._row_cache_pages = row_cache_pages
        self._staging_pages = staging_pages
        self._on_change, self._on_revoke = on_change, on_revoke
        self.row_cache: dict[int, tuple[int, ...]] = {}
        self.staging: list[int] = []
        self.num_revoked = 0

    @property
    def device_pages(self) -> list[int]:
        """All device pages on lease."""
        return [index for leased in self.row_cache.values() for index in leased] + self.staging

    def check_slot(self, slot: int) -> None:
        """Checks that a slot can get a row-cache lease.

        Raises:
            ValueError: there is no such slot, or it has a lease.
        """
        if not 0 <= slot < self._max_sequences:
            raise ValueError(f"slot {slot} is not in 0 to {self._max_sequences - 1}")
        if slot in self.row_cache:
            raise ValueError(f"slot {slot} has a row-cache lease")

    def lease_row_cache(self, slot: int) -> None:
        """Leases `row_cache_pages` free device pages to a slot without a lease."""
        leased = tuple(self._free.take() for _ in range(self._row_cache_pages))
        self.row_cache[slot] = leased
        self._on_change(slot, leased)

    def release_row_cache(self, slot: int) -> None:
        """Ends a slot's row-cache lease, if it has one."""
        leased = self.row_cache.pop(slot, None)
        if leased is not None:
            for index in reversed(leased):
                self._free.give_back(index)
            self._on_change(slot, ())

    @property
    def wants_staging(self) -> bool:
        """Whether the staging lease has fewer pages than it may."""
        return len(self.staging) < self._staging_pages

    def add_staging(self) -> None:
        """Adds a free device page to the staging lease."""
        self.staging.append(self._free.take())

    def release_staging(self) -> None:
        """Ends the staging lease, if there is one."""
        while self.staging:
            self._free.give_back(self.staging.pop())

    def revoke(self) -> bool:
        """Ends the staging lease, or else the oldest row-cache lease; False if there is neither."""
        if self.staging:
            self.release_staging()
        elif self.row_cache:
            slot = next(iter(self.row_cache))
            self.release_row_cache(slot)
            self.num_revoked += 1
            self._on_revoke(slot)
        else:
            return False
        return True

    def check_integrity(self) -> None:
        """Proves that leases have the right sizes.

        Raises:
            AssertionError: naming the one that does not.
        """
        for slot, leased in self.row_cache.items():
            whole = len(leased) == self._row_cache_pages
            assert whole, f"slot {slot} has row-cache pages {leased}"
        assert len(self.staging) <= self._staging_pages, f"staging has pages {self.staging}"
