"""Residency of each page in the two tiers, and the moves between them."""

from collections.abc import Callable, Iterable

import numpy as np
from jaxtyping import Bool, Float32

from kvcache.device.page_moves import PageMoves
from kvcache.page_pool import OutOfPagesError
from kvcache.tiers.eviction_queues import EvictionQueues
from kvcache.tiers.free_list import FreeList
from kvcache.tiers.leases import Leases
from kvcache.tiers.page_states import NO_PAGE_INDEX, PageState, PageStates


class Residency:
    """Gives pages their indices, moves them between the tiers, and leases pages of the device.

    Every change is queued in `moves`: whoever launches a step, or writes rows by other means,
    flushes them first.

    Pages that cannot leave the device are those that are TAIL, pinned, or IMPORTING there. All
    others are dropped when room is needed, coldest first (`EvictionQueues`). As no two pages share
    an index and none but a CLEAN page has two, `count` device pages can be freed exactly if `count`
    is at most
    - device_pages less the pages that cannot leave the device, and
    - device_pages + host_pages less all pages that are not FREE, those not counted that `evict`
      can free.
    The second holds for one device page whenever an id is FREE. So `start` fails only if every
    device page holds a page that cannot leave.

    `evict` may take any page without references: the caller holds a reference on a page
    that it copies or onloads.

    Attributes:
        states: states and indices of all pages, to be read.
        pages_offloaded: pages copied to the host.
        pages_dropped: pages dropped from the device.
        pages_onloaded: pages copied back to the device.
        host_copies_dropped: copies dropped from the host.
        pages_copied: pages started as a copy of another.
    """

    def __init__(
        self,
        *,
        free_device: FreeList,
        free_host: FreeList,
        max_sequences: int,
        row_cache_pages: int,
        staging_pages: int,
        moves: PageMoves,
        referenced: Callable[[], Bool[np.ndarray, " pages"]],
        evict: Callable[[], bool],
        on_change: Callable[[int, PageState, PageState], None],
        on_lease: Callable[[int, tuple[int, ...]], None],
        on_revoke: Callable[[int], None],
    ) -> None:
        """All pages FREE.

        Args:
            free_device: indices of the device pages, all free.
            free_host: indices of the host pages, all free; none for no host tier.
            max_sequences: sequence slots.
            row_cache_pages: device pages of a row-cache lease.
            staging_pages: most device pages of the staging lease.
            moves: the queue of moves and map changes.
            referenced: whether a sequence holds each page.
            evict: evicts one page without references, by way of `forget`; False if there is
                none.
            on_change: called with a page, the state it was in, and the one it is in now.
            on_lease: called with a slot whose row-cache lease began or ended, and its pages now.
            on_revoke: called with a slot whose row-cache lease was revoked.
        """
        self._free_device, self._free_host = free_device, free_host
        self.states = PageStates(free_device, free_host)
        self._on_change = on_change
        self._row_cache_pages = row_cache_pages
        self._moves = moves
        self._evict = evict
        self._queues = EvictionQueues(self.states, referenced)
        self._watermark = max(1, len(free_device) // 10)
        self._leases = Leases(
            self._free_device,
            max_sequences=max_sequences,
            row_cache_pages=row_cache_pages,
            staging_pages=staging_pages,
            on_change=on_lease,
            on_revoke=on_revoke,
        )
        self.pages_offloaded = 0
        self.pages_dropped = 0
        self.pages_onloaded = 0
        self.host_copies_dropped = 0
        self.pages_copied = 0

    @property
    def staged_pages(self) -> tuple[int, ...]:
        """Device pages of the staging lease; empty if there is none or it was revoked."""
        return tuple(self._leases.staging)

    @property
    def leases_revoked(self) -> int:
        """Row-cache leases ended because their device pages were needed."""
        return self._leases.num_revoked

    def leased_row_cache(self, slot: int) -> tuple[int, ...]:
        """Device pages of a slot's row-cache lease; empty if it has none or it was revoked."""
        return self._leases.row_cache.get(slot, ())

    def start(self, page: int) -> None:
        """FREE to TAIL: gives a page a device page, making room if none is free.

        Raises:
            ValueError: the page is not FREE.
            OutOfPagesError: no device page can be freed.
        """
        self.states.check(page, "start")
        self.make_room(1)
        self._begin(page, PageState.TAIL, self._free_device.take(), NO_PAGE_INDEX)

    def copy_of(self, source: int, page: int) -> None:
        """FREE to TAIL with the rows and index keys of `source`, which may be dropped for room.

        Raises:
            ValueError: `page` is not FREE, or `source` is FREE or IMPORTING.
            OutOfPagesError: no device page can be freed.
        """
        self.states.check(page, "start")
        self.states.check(source, "copy")
        self.make_room(1)
        self.states.check(source, "copy")
        target = self._free_device.take()
        if self.states.device_page_index(source) != NO_PAGE_INDEX:
            self._moves.copy(self.states.device_page_index(source), target)
        else:
            self._moves.onload(self.states.host_page_index(source), target)
        self._moves.copy_keys(source, page)
        self._begin(page, PageState.TAIL, target, NO_PAGE_INDEX)
        self.pages_copied += 1

    def seal(self, page: int) -> None:
        """TAIL to DIRTY: the page's confirmed rows never change again.

        Raises:
            ValueError: the page is not TAIL.
        """
        self.states.check(page, "seal")
        self._queues.touch(page)
        self._place(page, PageState.DIRTY, self.states.device_page_index(page), NO_PAGE_INDEX)

    def offload(self, page: int) -> None:
        """DIRTY to CLEAN: copies the page to a free host page.

        Raises:
            ValueError: the page is not DIRTY.
            OutOfPagesError: no host page is free.
        """
        self.states.check(page, "offload")
        if not self._free_host:
            raise OutOfPagesError(f"page {page} needs a host page: raise host_memory_gib")
        host_page_index = self._free_host.take()
        self._moves.offload(self.states.device_page_index(page), host_page_index)
        self._place(page, PageState.CLEAN, self.states.device_page_index(page), host_page_index)
        self.pages_offloaded += 1

    def drop(self, page: int) -> None:
        """CLEAN to HOST: frees the page's device page.

        Raises:
            ValueError: the page is not CLEAN, or is pinned.
        """
        self.states.check(page, "drop")
        self._place(page, PageState.HOST, NO_PAGE_INDEX, self.states.host_page_index(page))
        self.pages_dropped += 1

    def drop_host_copy(self, page: int) -> None:
        """CLEAN to DIRTY: frees the page's host page.

        Raises:
            ValueError: the page is not CLEAN.
        """
        self.states.check(page, "drop the host copy of")
        self._place(page, PageState.DIRTY, self.states.device_page_index(page), NO_PAGE_INDEX)
        self.host_copies_dropped += 1

    def onload(self, page: int) -> None:
        """HOST to CLEAN: copies the page back to the device, making room if no device page is free.

        Raises:
            ValueError: the page is not HOST.
            OutOfPagesError: no device page can be freed.
        """
        self.states.check(page, "onload")
        self.make_room(1)
        self.states.check(page, "onload")
        target = self._free_device.take()
        self._moves.onload(self.states.host_page_index(page), target)
        self._place(page, PageState.CLEAN, target, self.states.host_page_index(page))
        self.pages_onloaded += 1

    def begin_import(self, page: int, to_device: bool) -> None:
        """FREE to IMPORTING: gives a page an index in one tier, to be written after a flush.

        For want of a free host page the hottest CLEAN page drops its copy, or else a HOST page
        is onloaded first.

        Raises:
            ValueError: the page is not FREE.
            OutOfPagesError: no device page can be freed.
        """
        self.states.check(page, "begin to import")
        if to_device:
            self.make_room(1)
            self._begin(page, PageState.IMPORTING, self._free_device.take(), NO_PAGE_INDEX)
        else:
            self._make_host_room()
            self._begin(page, PageState.IMPORTING, NO_PAGE_INDEX, self._free_host.take())

    def end_import(self, page: int) -> None:
        """IMPORTING to DIRTY or HOST, by where the page lies.

        Raises:
            ValueError: the page is not IMPORTING.
        """
        self.states.check(page, "end the import of")
        device_page_index = self.states.device_page_index(page)
        state = PageState.HOST if device_page_index == NO_PAGE_INDEX else PageState.DIRTY
        self._place(page, state, device_page_index, self.states.host_page_index(page))

    def forget(self, page: int) -> None:
        """Any state to FREE, also of a page that was never started: its indices become free.

        Raises:
            ValueError: the page is pinned.
        """
        self.states.check(page, "forget")
        self._place(page, PageState.FREE, NO_PAGE_INDEX, NO_PAGE_INDEX)

    def pin(self, page: int) -> None:
        """Adds a pin to a page, which keeps it on the device.

        Raises:
            ValueError: the page is FREE.
        """
        self.states.pin(page)

    def unpin(self, page: int) -> None:
        """Takes a pin away.

        Raises:
            ValueError: the page is not pinned.
        """
        self.states.unpin(page)
        self._queues.push(page)

    def lease_row_cache(self, slot: int) -> bool:
        """Leases `row_cache_pages` device pages to a slot: free ones, and those of the coldest
        pages.

        Pages are evicted if there is no other way, but no lease is revoked. Returns False if they
        cannot be had.

        Raises:
            ValueError: there is no such slot, or it has a lease.
        """
        self._leases.check_slot(slot)
        if not self._evict_until(self._row_cache_pages):
            return False
        self.make_room(self._row_cache_pages)
        self._leases.lease_row_cache(slot)
        return True

    def release_row_cache(self, slot: int) -> None:
        """Ends a slot's row-cache lease, if it has one."""
        self._leases.release_row_cache(slot)

    def lease_staging(self) -> int:
        """Fills the staging lease up to `staging_pages`; returns the number of pages it has.

        Takes free device pages, and the coldest page's as long as that is CLEAN.
        """
        while self._leases.wants_staging:
            if not self._free_device:
                page = self._queues.coldest.first()
                if page is None or self.states.state(page) is not PageState.CLEAN:
                    break
                self.drop(page)
            self._leases.add_staging()
        return len(self._leases.staging)

    def release_staging(self) -> None:
        """Ends the staging lease, if there is one."""
        self._leases.release_staging()

    def touch(self, pages: Iterable[int]) -> None:
        """Makes pages the most recently used ones, each more so than those before it."""
        for page in pages:
            self._queues.touch(page)

    def measure_heat(self) -> None:
        """Notes that the heat of all pages is measured now, and comes with `update_heat`."""
        self._queues.measure_heat()

    def update_heat(self, heat: Float32[np.ndarray, " pages"]) -> None:
        """Replaces the heat, a decayed count of selections, of all pages but those started since.

        Raises:
            ValueError: there is not one for each page.
        """
        self._queues.update_heat(heat)

    def make_room(self, count: int) -> None:
        """Frees device pages until `count` are free.

        The coldest pages are dropped, DIRTY ones after a copy to the host. For want of a free host
        page the hottest CLEAN page drops its copy, as it will be dropped last. Pages are
        evicted only if there are no copies to drop, and leases revoked, staging before the
        oldest row-cache lease, only if no more pages can be dropped.

        Raises:
            OutOfPagesError: they cannot be freed; no page has been dropped.
        """
        while not self._evict_until(count):
            if not self._leases.revoke():
                raise OutOfPagesError(self._shortage(count))
        while self.states.num_free_device < count:
            page = self._queues.coldest.first()
            assert page is not None, f"room for {self.states.room} pages, but none to drop"
            if self.states.state(page) is PageState.DIRTY:
                if not self._free_host:
                    self._drop_host_copy()
                self.offload(page)
            self.drop(page)

    def offload_ahead(self, limit: int) -> int:
        """Copies up to `limit` pages to free host pages, so that dropping them costs nothing.

        Does so while fewer device pages are free than the watermark, a tenth of all: the coldest
        DIRTY pages, until free device pages and droppable CLEAN pages reach it together and the
        coldest page of all is CLEAN. Returns the number of pages.
        """
        offloaded = 0
        while (
            offloaded < limit and self._free_host and self.states.num_free_device < self._watermark
        ):
            page = self._queues.coldest_dirty.first()
            reserve = self.states.num_free_device + self.states.num_droppable_in(PageState.CLEAN)
            if page is None or (
                reserve >= self._watermark and page != self._queues.coldest.first()
            ):
                break
            self.offload(page)
            offloaded += 1
        return offloaded

    def onload_hottest(self, limit: int) -> int:
        """Onloads up to `limit` pages while more than twice the watermark of device pages are free.

        The hottest HOST pages that have been selected, and were referenced when heat was last
        updated and still are. Returns the number of pages.
        """
        onloaded = 0
        while onloaded < limit and self.states.num_free_device > 2 * self._watermark:
            page = self._queues.hottest_host.first()
            if page is None:
                break
            self.onload(page)
            onloaded += 1
        return onloaded

    def check_integrity(self) -> None:
        """Proves that every index is held once, and that states agree with indices.

        Raises:
            AssertionError: naming what does not.
        """
        self._leases.check_integrity()
        self.states.check_integrity(self._leases.device_pages)

    def _begin(
        self, page: int, state: PageState, device_page_index: int, host_page_index: int
    ) -> None:
        self._queues.begin(page)
        self._place(page, state, device_page_index, host_page_index)

    def _place(
        self, page: int, state: PageState, device_page_index: int, host_page_index: int
    ) -> bool:
        old = self.states.state(page)
        changed = self.states.move(page, state, device_page_index, host_page_index)
        if state is not old:
            self._on_change(page, old, state)
        if changed:
            self._moves.map_page(page, device_page_index, host_page_index)
        self._queues.push(page)
        return changed

    def _evict_until(self, room: int) -> bool:
        while self.states.room < room:
            # Evicting frees host pages for pages to drop: in vain if there are too few of those.
            enough = self.states.num_free_device + self.states.num_droppable >= room
            if not enough or not self._evict():
                return False
        return True

    def _drop_host_copy(self) -> None:
        page = self._queues.hottest_clean.first()
        assert page is not None, "room was counted for a copy that is not there"
        self.drop_host_copy(page)

    def _make_host_room(self) -> None:
        """Frees a host page."""
        if self._free_host:
            return
        if not self.states.count(PageState.CLEAN):
            if not self.states.count(PageState.HOST):
                raise OutOfPagesError("no host page can be freed: raise host_memory_gib")
            self.make_room(1)
            page = self._queues.hottest_host.first()
            self.onload(self.states.pages_in(PageState.HOST).item(0) if page is None else page)
        self._drop_host_copy()

    def _shortage(self, count: int) -> str:
        movable = self.states.num_free_device + self.states.num_droppable
        flag = "device_pages" if movable < count else "host_memory_gib or device_pages"
        return f"{count} device pages wanted, {self.states.room} can be freed: raise {flag}"
