"""Read-only view of where the rows of one sequence lie, for displays."""

import dataclasses

import numpy as np
from jaxtyping import Bool, Int

from kvcache.device.device_state import DeviceState
from kvcache.kv_cache import KVCache
from kvcache.tiers.page_states import NO_PAGE_INDEX


@dataclasses.dataclass(frozen=True)
class ResidencyView:
    """Pages of a sequence, in order, after the launches so far.

    Attributes:
        on_device: whether the page lies on the device. The others lie in host memory alone.
        row_cache: rows of the page that the sequence's row cache holds on the devices, the index
            groups together. Rows of pages that have come back count until others take their places.
    """

    on_device: Bool[np.ndarray, " pages"]
    row_cache: Int[np.ndarray, " pages"]


def view_sequence(cache: KVCache[DeviceState], slot: int) -> ResidencyView:
    """Where the pages of the sequence in a slot lie. Waits for the steps that were launched.

    Args:
        cache: the cache.
        slot: a slot with a sequence.
    """
    pages = cache.pages_of(slot)
    on_device = np.array(
        [cache.residency.states.device_page_index(page) != NO_PAGE_INDEX for page in pages], bool
    )
    row_cache = np.zeros(len(pages), np.int64)
    if cache.has_row_cache(slot):
        rows = cache.device.row_cache_rows(slot)
        np.add.at(row_cache, rows // cache.geometry.rows_per_device, 1)
    return ResidencyView(on_device, row_cache)
