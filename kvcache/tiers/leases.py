"""Device places that belong to no page: row-cache rows of sequence slots, and staging."""


class Leases:
    """Takes places from the free list, and gives them back.

    Attributes:
        row_cache: places of each slot's row cache, the oldest lease first.
        staging: places of the staging lease.
        changed: slots whose row-cache lease began or ended since the set was last cleared.
        num_revoked: row-cache leases that `revoke` ended.
    """

    def __init__(
        self, free: list[int], max_sequences: int, row_cache_pages: int, staging_pages: int
    ) -> None:
        """No lease.

        Args:
            free: places that nothing holds, the next one last; shared with the bookkeeping of
                pages.
            max_sequences: sequence slots.
            row_cache_pages: places of a row-cache lease.
            staging_pages: most places of the staging lease.
        """
        self._free = free
        self._max_sequences = max_sequences
        self._row_cache_pages = row_cache_pages
        self._staging_pages = staging_pages
        self.row_cache: dict[int, tuple[int, ...]] = {}
        self.staging: list[int] = []
        self.changed: set[int] = set()
        self.num_revoked = 0

    @property
    def places(self) -> list[int]:
        """All places on lease."""
        return [place for places in self.row_cache.values() for place in places] + self.staging

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
        """Leases `row_cache_pages` free places to a slot without a lease."""
        self.row_cache[slot] = tuple(self._free.pop() for _ in range(self._row_cache_pages))
        self.changed.add(slot)

    def release_row_cache(self, slot: int) -> None:
        """Ends a slot's row-cache lease, if it has one."""
        places = self.row_cache.pop(slot, None)
        if places is not None:
            self._free.extend(reversed(places))
            self.changed.add(slot)

    def release_staging(self) -> None:
        """Ends the staging lease, if there is one."""
        self._free.extend(reversed(self.staging))
        self.staging.clear()

    def revoke(self) -> bool:
        """Ends the staging lease, or else the oldest row-cache lease; False if there is neither."""
        if self.staging:
            self.release_staging()
        elif self.row_cache:
            self.release_row_cache(next(iter(self.row_cache)))
            self.num_revoked += 1
        else:
            return False
        return True

    def check_integrity(self) -> None:
        """Proves that leases have the right sizes.

        Raises:
            AssertionError: naming the one that does not.
        """
        for slot, places in self.row_cache.items():
            assert len(places) == self._row_cache_pages, (
                f"slot {slot} has row-cache places {places}"
            )
        assert len(self.staging) <= self._staging_pages, f"staging has places {self.staging}"
