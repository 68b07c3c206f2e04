"""Device interface of the KV cache, and a simulated implementation."""

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float32, Int32, Shaped

from kvcache.device.page_moves import MoveList
from kvcache.geometry import KVGeometry


@runtime_checkable
class CacheDevice(Protocol):
    """Changes of the device state between steps, in the order in which they are asked for.

    Slots and pages of -1 are padding.
    """

    def assign_slot(self, slot: int, pages: Int32[np.ndarray, " max_pages"], length: int) -> None:
        """Gives a slot to a sequence whose first `length` tokens are computed on these pages."""
        ...

    def set_pages(self, entries: Int32[np.ndarray, "entries 3"]) -> None:
        """Puts pages into block tables: (slot, index in the table, page)."""
        ...

    def move(self, moves: MoveList) -> None:
        """Moves pages and changes the maps of page indices."""
        ...

    def lease(
        self, slots: Int32[np.ndarray, " slots"], pages: Int32[np.ndarray, "slots row_cache_pages"]
    ) -> None:
        """Gives slots device pages for their row caches, or takes them away."""
        ...

    def set_staging_pages(self, pages: Int32[np.ndarray, " staging_pages"]) -> None:
        """Gives prefills device pages to stage pages on, in place of those they had."""
        ...

    def decay(self) -> Callable[[], Float32[np.ndarray, " pages"]]:
        """Counts of selections by page, which are halved thereby: a call waits for them."""
        ...

    def write(
        self,
        pages: Int32[np.ndarray, " max_pages"],
        rows: Shaped[np.ndarray, "max_pages rows_per_page layers width"],
        keys: Shaped[np.ndarray, "max_pages rows_per_page index_layers index_width"],
    ) -> None:
        """Fills pages, wherever they lie."""
        ...


class SimulatedDevice(CacheDevice):
    """A device without bytes, for simulators and for timing the bookkeeping alone.

    Attributes:
        heat: float32 [pages], what `decay` returns before it halves it.
        num_decays: how often it did.
    """

    def __init__(self, geometry: KVGeometry) -> None:
        self.heat = np.zeros(geometry.num_pages, np.float32)
        self.num_decays = 0

    def assign_slot(self, slot: int, pages: Int32[np.ndarray, " max_pages"], length: int) -> None:
        """Nothing to assign."""

    def set_pages(self, entries: Int32[np.ndarray, "entries 3"]) -> None:
        """No table to change."""

    def move(self, moves: MoveList) -> None:
        """Nothing to move."""

    def lease(
        self, slots: Int32[np.ndarray, " slots"], pages: Int32[np.ndarray, "slots row_cache_pages"]
    ) -> None:
        """No pages to give."""

    def set_staging_pages(self, pages: Int32[np.ndarray, " staging_pages"]) -> None:
        """No pages to give."""

    def decay(self) -> Callable[[], Float32[np.ndarray, " pages"]]:
        """The heat that was set."""
        heat = self.heat.copy()
        self.heat /= 2
        self.num_decays += 1
        return lambda: heat

    def write(
        self,
        pages: Int32[np.ndarray, " max_pages"],
        rows: Shaped[np.ndarray, "max_pages rows_per_page layers width"],
        keys: Shaped[np.ndarray, "max_pages rows_per_page index_layers index_width"],
    ) -> None:
        """Nowhere to write."""
