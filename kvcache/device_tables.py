"""Updates of the device between steps: new pages of sequences, and leases, in fixed sizes."""

from collections.abc import Collection

import numpy as np
from jaxtyping import Int32

from kvcache.device.interface import CacheDevice
from kvcache.geometry import KVGeometry

_MIN_ENTRIES = 16


class DeviceTables:
    """Keeps the device's block tables and leases in step with the bookkeeping.

    Args:
        geometry: sizes of the store.
        device: the device to update.
    """

    def __init__(self, geometry: KVGeometry, device: CacheDevice) -> None:
        self._geometry, self._device = geometry, device
        self._new_pages: list[tuple[int, int, int]] = []  # slot, index in the block table, page
        self._leases: dict[int, tuple[int, ...]] = {}  # those that have changed, by slot
        self._staging: tuple[int, ...] = ()  # as the device has them

    def assign(self, slot: int, pages: Collection[int], length: int) -> None:
        """Gives a slot to a sequence whose first `length` tokens are computed on these pages."""
        table = np.full(self._geometry.max_pages_per_sequence, -1, np.int32)
        table[: len(pages)] = list(pages)
        self._device.assign_slot(slot, table, length)

    def add_page(self, slot: int, index: int, page: int) -> None:
        """Queues a page of a slot's block table."""
        self._new_pages.append((slot, index, page))

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

    def set_lease(self, slot: int, pages: tuple[int, ...]) -> None:
        """Queues a slot's row-cache lease, empty for none."""
        self._leases[slot] = pages

    def is_queued(self, slot: int) -> bool:
        """Whether the device has yet to learn of a slot's lease."""
        return slot in self._leases

    def launch_leases(self, staging: tuple[int, ...]) -> None:
        """Launches the leases that have changed.

        Args:
            staging: device pages of the staging lease.
        """
        if self._leases:
            slots, pages = self._no_leases()
            for row, slot in enumerate(sorted(self._leases)):
                slots[row] = slot
                leased = self._leases[slot]
                pages[row, : len(leased)] = leased
            self._leases.clear()
            self._device.lease(slots, pages)
        if staging != self._staging:
            self._staging = staging
            self._launch_staging()

    def warm_up(self) -> None:
        """Launches each update once, with nothing but padding."""
        self.assign(-1, (), 0)
        self._device.set_pages(self._no_pages())
        if self._geometry.reads_host:
            self._device.lease(*self._no_leases())
            self._launch_staging()

    def _launch_staging(self) -> None:
        pages = np.full(max(self._geometry.staging_pages, 1), -1, np.int32)
        pages[: len(self._staging)] = self._staging
        self._device.set_staging_pages(pages)

    def _no_pages(self) -> Int32[np.ndarray, "entries 3"]:
        return np.full((max(self._geometry.max_sequences, _MIN_ENTRIES), 3), -1, np.int32)

    def _no_leases(
        self,
    ) -> tuple[Int32[np.ndarray, " slots"], Int32[np.ndarray, "slots row_cache_pages"]]:
        shape = (self._geometry.max_sequences, self._geometry.row_cache_pages)
        return np.full(shape[0], -1, np.int32), np.full(shape, -1, np.int32)
