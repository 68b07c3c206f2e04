"""A device whose pages hold a number a row, in two tiers."""

from collections.abc import Callable

import numpy as np
from jaxtyping import Float32, Int32

from kvcache import KVGeometry, SimulatedDevice
from kvcache.device.page_moves import MoveList

_LOST = -1  # what a row holds that is nobody's


class TwoTierDevice(SimulatedDevice):
    """Executes what a cache asks for, and reads and writes rows where it says.

    Before each launch, whatever page is unused is overwritten, as steps do to some.
    """

    def __init__(self, geometry: KVGeometry) -> None:
        super().__init__(geometry)
        self._rows_per_page = geometry.rows_per_page
        self._device = [self._lost_page() for _ in range(geometry.device_pages)]
        self._host = [self._lost_page() for _ in range(geometry.host_pages)]
        self._page_indices = [(-1, -1)] * geometry.num_pages
        self._tables: dict[int, list[int]] = {}
        self._lengths: dict[int, int] = {}
        self._rng = np.random.default_rng(0)
        self._unused = list(range(geometry.device_pages))

    def assign_slot(self, slot: int, pages: Int32[np.ndarray, " max_pages"], length: int) -> None:
        self._tables[slot] = pages.tolist()

    def set_pages(self, entries: Int32[np.ndarray, "entries 3"]) -> None:
        for slot, index, page in entries.tolist():
            if slot >= 0:
                self._tables[slot][index] = page

    def move(self, moves: MoveList) -> None:
        for source, target in _pairs(moves.offloads):
            self._host[target] = list(self._device[source])
        for source, target in _pairs(moves.onloads):
            self._device[target] = list(self._host[source])
        for source, target in _pairs(moves.copies):
            self._device[target] = list(self._device[source])
        for page, device_page_index, host_page_index in moves.maps.tolist():
            if page >= 0:
                self._page_indices[page] = device_page_index, host_page_index
        used = {device_page_index for device_page_index, _ in self._page_indices}
        self._unused = [index for index in range(len(self._device)) if index not in used]
        for index in set(range(len(self._host))) - {
            host_page_index for _, host_page_index in self._page_indices
        }:
            self._host[index] = self._lost_page()

    def decay(self) -> Callable[[], Float32[np.ndarray, " pages"]]:
        self.heat = self._rng.exponential(size=len(self.heat)).astype(np.float32)
        return super().decay()

    def begin_launch(self) -> None:
        for index in self._unused:
            self._device[index] = self._lost_page()

    def read_row(self, slot: int, position: int) -> int:
        index, row = divmod(position, self._rows_per_page)
        device_page_index, host_page_index = self._page_indices[self._tables[slot][index]]
        page = (
            self._device[device_page_index]
            if device_page_index >= 0
            else self._host[host_page_index]
        )
        return page[row]

    def write_row(self, slot: int, position: int, value: int) -> None:
        index, row = divmod(position, self._rows_per_page)
        device_page_index, host_page_index = self._page_indices[self._tables[slot][index]]
        assert device_page_index >= 0 and host_page_index < 0, (
            f"row {position} is written off the device"
        )
        self._device[device_page_index][row] = value

    def _lost_page(self) -> list[int]:
        return [_LOST] * self._rows_per_page


def _pairs(moves: Int32[np.ndarray, "n 2"]) -> list[list[int]]:
    return [pair for pair in moves.tolist() if pair[1] >= 0]
