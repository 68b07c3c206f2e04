"""Policy for pages in host memory before each step: moves ahead of need, and leases."""

from collections.abc import Callable, Collection, Sequence, Set

import numpy as np
from jaxtyping import Float32

from kvcache.device.interface import CacheDevice
from kvcache.geometry import KVGeometry
from kvcache.page_pool import PagePool
from kvcache.tiers.residency import Residency

_PAGES_OFFLOADED_A_STEP = 8
_PAGES_ONLOADED_A_STEP = 4
_STEPS_BETWEEN_OBSERVATIONS = 32
_STEPS_TO_OBSERVE = 2  # in flight meanwhile, so that the device never waits for the host


def lease_reserve(device_pages: int, num_running: int) -> int:
    """Device pages that a new row-cache lease leaves for the next pages of the running
    sequences."""
    return device_pages // 10 + num_running


class OffloadPolicy:
    """Policy that offloads and onloads pages ahead of need, and leases row-cache rows and staging
    to those that read host pages.

    Args:
        geometry: sizes of a store with a host tier.
        device: counts selections.
        residency: where pages lie.
        pool: reference counts of pages.
    """

    def __init__(
        self, geometry: KVGeometry, device: CacheDevice, residency: Residency, pool: PagePool
    ) -> None:
        self._geometry, self._device = geometry, device
        self._residency, self._pool = residency, pool
        self._spilled: set[int] = set()  # slots that may read host pages and have no lease
        self._revoked: set[int] = set()  # slots that have lost their lease since the last step
        self._selections: Callable[[], Float32[np.ndarray, " pages"]] | None = None
        self._steps = 0

    def note_spilled(self, slots: Collection[int]) -> None:
        """Notes that sequences may read host pages from now on."""
        self._spilled.update(slots)

    def note_revoked(self, slot: int) -> None:
        """Notes that a slot's row-cache lease was revoked."""
        self._revoked.add(slot)

    def before_step(self, slots: Set[int], running: Set[int], *, staging: bool) -> None:
        """Moves pages and changes leases for a step.

        Args:
            slots: those of the step.
            running: those of all sequences that run.
            staging: whether it is a prefill, which stages pages rather than rows.
        """
        residency = self._residency
        self._steps += 1
        if self._geometry.reads_host:
            self._observe()
        residency.offload_ahead(_PAGES_OFFLOADED_A_STEP)
        residency.onload_hottest(_PAGES_ONLOADED_A_STEP)
        if staging:
            if self._spilled & slots or any(residency.leased_row_cache(s) for s in slots):
                residency.lease_staging()
        else:
            residency.release_staging()
            for slot in sorted(self._spilled & slots):
                if not residency.leased_row_cache(slot) and not self._lease(slot, len(running)):
                    break  # Nor is there room for the others.
                self._spilled.discard(slot)
        # Slots that lost their lease to a page ask again once there is room.
        self._spilled |= {
            slot for slot in self._revoked & running if not residency.leased_row_cache(slot)
        }
        self._revoked.clear()

    def close(self, slot: int, pages: Sequence[int]) -> None:
        """Ends a sequence's lease; where no heat is measured, notes that its pages were used."""
        self._residency.release_row_cache(slot)
        self._spilled.discard(slot)
        self._revoked.discard(slot)
        if not self._geometry.reads_host:
            self._residency.touch(reversed(pages))

    def _observe(self) -> None:
        """Asks the device now and then what it has counted, and takes the answer steps later."""
        steps = self._steps % _STEPS_BETWEEN_OBSERVATIONS
        if steps == 0:
            self._selections = self._device.decay()
            self._residency.measure_heat()
        elif steps == _STEPS_TO_OBSERVE and self._selections is not None:
            self._residency.update_heat(self._selections())
            self._selections = None

    def _lease(self, slot: int, num_running: int) -> bool:
        """Leases row-cache rows to a slot, unless the next pages to be written would soon need
        them."""
        geometry = self._geometry
        reserve = lease_reserve(geometry.device_pages, num_running)
        room = self._residency.states.room_after(evictions=self._pool.num_cached_only)
        if room < geometry.row_cache_pages + reserve:
            return False
        return self._residency.lease_row_cache(slot)
