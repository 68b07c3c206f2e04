"""Updates of the device between steps: new pages of sequences, and leases, in fixed sizes."""

from collections.abc import Collection

import numpy as np
from jaxtyping import Int32

from kvcache.device.interface import CacheDevice
from kvcache.geometry import KVGeometry
from kvcache.tiers.residency import Residency

_MIN_ENTRIES = 16


class DeviceTables:
    """Keeps the device's block tables and leases in step with the bookkeeping.

    Args:
        geometry: sizes of the store.
        device: the device to update.
    """

    def __init__(self, geometry: KVGeometry, device: CacheDevice) -> None:
        self._geometry, self._device = geometry, device
        self._new_pages: list[tuple[int, int, int]] = []  # slot, place in the block table, page
        self._staging: tuple[int, ...] = ()

    def assign(self, slot: int, pages: Collection[int], length: int) -> None:
        """Gives a slot to a sequence whose first `length` tokens are computed on these pages."""
        table = np.full(self._geometry.max_pages_per_sequence, -1, np.int32)
        table[: len(pages)] = list(pages)
        self._device.assign_slot(slot, table, length)

    def add_page(self, slot: int, place: int, page: int) -> None:
        """Queues a page of a slot's block table."""
        self._new_pages.append((slot, place, page))

    def forget(self, slot: int) -> None:
        """Drops what is queued for a slot."""
        self._new_pages = [entry for entry in self._new_pages if entry[0] != slot]

    def launch_pages(self) -> None:
        """Launches the pages that are queued."""
        while self._new_pages:
            entries = self._no_pages()
            some = self._new_pages[: len(entries)]
            self._new_pages = self._new_pages[len(entries) :]
            entries[: len(some)] = some
            self._device.set_pages(entries)

    def launch_leases(self, residency: Residency) -> None:
        """Launches the leases that have changed."""
        changed = residency.changed_leases
        if changed:
            slots, places = self._no_leases()
            for row, slot in enumerate(sorted(changed)):
                slots[row] = slot
                leased = residency.leased_row_cache(slot)
                places[row, : len(leased)] = leased
            changed.clear()
            self._device.lease(slots, places)
        if residency.staging_places != self._staging:
            self._staging = residency.staging_places
            self._launch_staging()

    def warm_up(self) -> None:
        """Launches each update once, with nothing but padding."""
        self.assign(-1, (), 0)
        self._device.set_pages(self._no_pages())
        if self._geometry.reads_host:
            self._device.lease(*self._no_leases())
            self._launch_staging()

    def _launch_staging(self) -> None:
        places = np.full(max(self._geometry.staging_pages, 1), -1, np.int32)
        places[: len(self._staging)] = self._staging
        self._device.set_staging_pages(places)

    def _no_pages(self) -> Int32[np.ndarray, "entries 3"]:
        return np.full((max(self._geometry.max_sequences, _MIN_ENTRIES), 3), -1, np.int32)

    def _no_leases(
        self,
    ) -> tuple[Int32[np.ndarray, " slots"], Int32[np.ndarray, "slots row_cache_pages"]]:
        shape = (self._geometry.max_sequences, self._geometry.row_cache_pages)
        return np.full(shape[0], -1, np.int32), np.full(shape, -1, np.int32)
