"""What is done about pages in host memory before each step: moves ahead of need, and leases."""

from collections.abc import Collection, Set

from kvcache.cache_device import CacheDevice
from kvcache.counters import CacheCounters, ReadCounts
from kvcache.geometry import KVGeometry
from kvcache.residency import Residency

_PAGES_CLEANED_A_STEP = 8
_PAGES_RESTORED_A_STEP = 4
_STEPS_BETWEEN_OBSERVATIONS = 32


def lease_reserve(device_pages: int, num_running: int) -> int:
    """Device places that a new hot lease leaves for the next pages of the running sequences."""
    return device_pages // 10 + num_running


class PagePolicy:
    """Cleans and promotes pages ahead of need, and leases hot rows and staging to those that read
    host pages.

    Args:
        geometry: sizes of a store with a host tier.
        device: counts selections and reads.
        residency: where pages lie.
    """

    def __init__(self, geometry: KVGeometry, device: CacheDevice, residency: Residency) -> None:
        self._geometry, self._device, self._residency = geometry, device, residency
        self._spilled: set[int] = set()  # slots that may read host pages and have no lease
        self._reads = ReadCounts(geometry.max_sequences)
        self._steps = 0

    def note_spilled(self, slots: Collection[int]) -> None:
        """Notes that sequences may read host pages from now on."""
        self._spilled.update(slots)

    def before_step(self, slots: Collection[int], running: Set[int], *, staging: bool) -> None:
        """Moves pages and changes leases for a step.

        Args:
            slots: those of the step.
            running: those of all sequences that run.
            staging: whether it is a prefill, which stages pages rather than rows.
        """
        residency = self._residency
        self._steps += 1
        if self._steps % _STEPS_BETWEEN_OBSERVATIONS == 0:
            self.observe()
        residency.clean_ahead(_PAGES_CLEANED_A_STEP)
        residency.promote(_PAGES_RESTORED_A_STEP)
        if staging:
            if self._spilled.intersection(slots) or any(residency.hot_places(s) for s in slots):
                residency.lease_staging()
        else:
            residency.release_staging()
            for slot in sorted(self._spilled.intersection(slots)):
                if residency.hot_places(slot) or self._lease(slot, len(running)):
                    self._spilled.discard(slot)
        # Slots that lost their lease to a page ask again once there is room.
        self._spilled |= {
            slot for slot in residency.changed_leases & running if not residency.hot_places(slot)
        }

    def observe(self) -> None:
        """Reads back what the device has counted."""
        self._residency.update_heat(self._device.cool())
        self._reads.update(self._device.reads())

    def close(self, slot: int) -> CacheCounters:
        """Ends a sequence's lease; what it has read."""
        self._residency.release_hot(slot)
        self._spilled.discard(slot)
        self._reads.update(self._device.reads())
        return self._reads.take(slot, self._geometry.row_format.row_bytes)

    def _lease(self, slot: int, num_running: int) -> bool:
        """Leases hot rows to a slot, unless the next pages to be written would soon need them."""
        geometry = self._geometry
        reserve = lease_reserve(geometry.device_pages, num_running)
        if self._residency.room < geometry.hot_pages + reserve:
            return False
        return self._residency.lease_hot(slot)
