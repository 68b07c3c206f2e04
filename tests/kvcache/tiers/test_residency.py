from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvcache.device.page_moves import MoveList, PageMoves
from kvcache.page_pool import OutOfPagesError, PagePool
from kvcache.tiers.page_states import PageState
from kvcache.tiers.residency import Residency
from tests.helpers.free_lists import device_list, host_list

FREE, TAIL, DIRTY = PageState.FREE, PageState.TAIL, PageState.DIRTY
CLEAN, HOST, IMPORTING = PageState.CLEAN, PageState.HOST, PageState.IMPORTING
NOWHERE = (-1, -1)
SLOTS = range(2)


class ResidencyMachine(RuleBasedStateMachine):
    """Drives a residency with a pool, and a device that executes its launches on contents.

    A content is a number, the same for a page's rows and its index keys. Steps overwrite whatever
    no page is mapped to.
    """

    @initialize(
        device_pages=st.integers(3, 6),
        host_pages=st.integers(0, 6),
        row_cache_pages=st.integers(1, 3),
        staging_pages=st.integers(0, 2),
        size=st.integers(1, 4),
    )
    def create(
        self,
        device_pages: int,
        host_pages: int,
        row_cache_pages: int,
        staging_pages: int,
        size: int,
    ) -> None:
        self.device_pages, self.host_pages = device_pages, host_pages
        self.row_cache_pages, self.staging_pages = row_cache_pages, staging_pages
        self.num_pages = device_pages + host_pages
        self.pool = PagePool(self.num_pages, lambda page: self.residency.forget(page))
        self.moves = PageMoves(self.launch, size)
        self.leases: dict[int, tuple[int, ...]] = dict.fromkeys(SLOTS, ())
        self.residency = Residency(
            free_device=device_list(device_pages),
            free_host=host_list(host_pages),
            max_sequences=len(SLOTS),
            row_cache_pages=row_cache_pages,
            staging_pages=staging_pages,
            moves=self.moves,
            referenced=lambda: self.pool.referenced,
            evict=self.evict,
            on_change=lambda page, old, new: None,
            on_lease=self.leases.__setitem__,
            on_revoke=lambda slot: None,
        )
        self.device = dict.fromkeys(range(device_pages), 0)
        self.host = dict.fromkeys(range(host_pages), 0)
        self.keys = dict.fromkeys(range(self.num_pages), 0)
        self.maps = dict.fromkeys(range(self.num_pages), NOWHERE)
        self.contents: dict[int, int] = {}
        self.pins: dict[int, int] = {}
        self.written = 0

    def launch(self, moves: MoveList) -> None:
        tiers = [(self.device, self.host), (self.host, self.device), (self.device, self.device)]
        lists = [moves.offloads, moves.onloads, moves.copies, moves.key_copies]
        for pairs, (sources, targets) in zip(lists, [*tiers, (self.keys, self.keys)], strict=True):
            for source, target in pairs.tolist():
                if source >= 0:
                    targets[target] = sources[source]
        for page, *indices in moves.maps.tolist():
            if page >= 0:
                self.maps[page] = tuple(indices)

    def evict(self) -> bool:
        evictable = self.evictable
        if evictable:
            self.pool.uncache(evictable[0])
            del self.contents[evictable[0]]
        return bool(evictable)

    @property
    def evictable(self) -> list[int]:
        pages = [page for page in range(self.num_pages) if self.pool.is_cached(page)]
        return [page for page in pages if not self.pool.references(page) and page not in self.pins]

    def pages(self, *states: PageState) -> list[int]:
        pages = range(self.num_pages)
        return [page for page in pages if self.residency.states.state(page) in states]

    @property
    def sources(self) -> list[int]:
        return [
            page for page in self.contents if self.residency.states.state(page) is not IMPORTING
        ]

    def can_free(self, count: int, leased: int = 0) -> bool:
        """The condition that the class states, with some device pages that may not be taken."""
        on_device = [page for page in range(self.num_pages) if self.device_page_index(page) >= 0]
        stuck = [page for page in on_device if page in self.pins]
        stuck += [
            page for page in self.pages(TAIL, IMPORTING) if page in set(on_device) - set(stuck)
        ]
        held = self.num_pages - self.residency.states.count(FREE) - len(self.evictable)
        return count <= min(self.device_pages - len(stuck), self.num_pages - held) - leased

    def device_page_index(self, page: int) -> int:
        return self.residency.states.device_page_index(page)

    def try_out(self, possible: bool, action: Callable[[], None]) -> bool:
        """Does something that must raise OutOfPagesError exactly if it is not possible."""
        if possible:
            action()
        else:
            before = self.residency.pages_dropped
            with pytest.raises(OutOfPagesError, match=r"raise (device_pages|host_memory_gib)"):
                action()
            assert self.residency.pages_dropped == before
        return possible

    def write(self, page: int) -> None:
        """What a step or an import does: goes by the maps, to whatever tier they name."""
        self.written += 1
        device_page_index, host_page_index = self.maps[page]
        tier, index = (
            (self.device, device_page_index)
            if device_page_index >= 0
            else (self.host, host_page_index)
        )
        tier[index] = self.keys[page] = self.contents[page] = self.written

    @rule()
    def step(self) -> None:
        self.moves.flush()
        indices = [
            (self.device_page_index(page), self.residency.states.host_page_index(page))
            for page in range(self.num_pages)
        ]
        assert self.maps == dict(enumerate(indices))
        for page, content in self.contents.items():
            assert self.keys[page] == content
            device_page_index, host_page_index = indices[page]
            assert device_page_index < 0 or self.device[device_page_index] == content
            assert host_page_index < 0 or self.host[host_page_index] == content
        assert self.leases == {slot: self.residency.leased_row_cache(slot) for slot in SLOTS}
        device_indices, host_indices = map(set, zip(*indices, strict=True))
        self.device |= dict.fromkeys(set(self.device) - device_indices, -1)
        self.host |= dict.fromkeys(set(self.host) - host_indices, -1)
        for page in self.pages(TAIL):
            self.write(page)

    @precondition(lambda self: self.pool.num_free)
    @rule(seal=st.booleans())
    def start(self, seal: bool) -> None:
        (page,) = self.pool.allocate(1)
        if not self.try_out(self.can_free(1), lambda: self.residency.start(page)):
            self.pool.release(page)
        elif seal:
            self.step()
            self.residency.seal(page)

    @precondition(lambda self: self.pool.num_free and self.sources)
    @rule(data=st.data())
    def copy_of(self, data: st.DataObject) -> None:
        source = data.draw(st.sampled_from(self.sources))
        self.pool.acquire(source)
        (page,) = self.pool.allocate(1)
        if self.try_out(self.can_free(1), lambda: self.residency.copy_of(source, page)):
            self.contents[page] = self.contents[source]
        else:
            self.pool.release(page)
        if self.pool.references(source) == 1 and not self.pool.is_cached(source):
            del self.contents[source]
        self.pool.release(source)

    @precondition(lambda self: self.pool.num_free)
    @rule(to_device=st.booleans())
    def begin_import(self, to_device: bool) -> None:
        (page,) = self.pool.allocate(1)
        possible = self.can_free(1)
        if not to_device:
            in_host = self.residency.states.count(CLEAN) + self.residency.states.num_free_host
            possible = in_host > 0 or (possible and self.residency.states.count(HOST) > 0)
        begin = lambda: self.residency.begin_import(page, to_device)  # noqa: E731
        if self.try_out(possible, begin):
            self.moves.flush()
            assert (self.device_page_index(page) >= 0) == to_device
            self.write(page)
        else:
            self.pool.release(page)

    @precondition(lambda self: self.pool.num_free < self.num_pages)
    @rule(data=st.data())
    def change(self, data: st.DataObject) -> None:
        """Does to a page what can be done to it, a few times."""
        for _ in range(data.draw(st.integers(1, 4))):
            if self.pool.num_free < self.num_pages:
                self.change_one(data)

    def change_one(self, data: st.DataObject) -> None:
        used = [page for page in range(self.num_pages) if self.pool.references(page)]
        sealed = self.pages(DIRTY, CLEAN, HOST)
        choices: list[tuple[Callable[[int], None], list[int]]] = [
            (self.residency.seal, [page for page in self.pages(TAIL) if page in self.contents]),
            (self.offload, self.pages(DIRTY)),
            (self.residency.drop, [page for page in self.pages(CLEAN) if page not in self.pins]),
            (self.residency.drop_host_copy, self.pages(CLEAN)),
            (self.onload, [page for page in self.pages(HOST) if page in used]),
            (self.end_import, self.pages(IMPORTING)),
            (self.pool.cache, [page for page in sealed if not self.pool.is_cached(page)]),
            (self.release, [page for page in used if page not in self.pins]),
            (self.pool.acquire, self.evictable),
            (self.pin, [page for page in self.contents if page in used]),
            (self.unpin, sorted(self.pins)),
        ]
        action, pages = data.draw(st.sampled_from([choice for choice in choices if choice[1]]))
        action(data.draw(st.sampled_from(pages)))

    def offload(self, page: int) -> None:
        if self.residency.states.num_free_host:
            self.residency.offload(page)
        else:
            with pytest.raises(OutOfPagesError, match=f"page {page} needs a host page"):
                self.residency.offload(page)

    def onload(self, page: int) -> None:
        self.try_out(self.can_free(1), lambda: self.residency.onload(page))

    def end_import(self, page: int) -> None:
        self.residency.end_import(page)
        assert self.residency.states.state(page) is (
            DIRTY if self.device_page_index(page) >= 0 else HOST
        )

    def release(self, page: int) -> None:
        self.pool.release(page)
        if self.residency.states.state(page) is FREE:
            self.contents.pop(page, None)

    def pin(self, page: int) -> None:
        self.residency.pin(page)
        self.pins[page] = self.pins.get(page, 0) + 1

    def unpin(self, page: int) -> None:
        self.residency.unpin(page)
        self.pins[page] -= 1
        if not self.pins[page]:
            del self.pins[page]

    @rule(slot=st.sampled_from(SLOTS))
    def lease_row_cache(self, slot: int) -> None:
        if self.residency.leased_row_cache(slot):
            with pytest.raises(ValueError, match=f"slot {slot} has a row-cache lease"):
                self.residency.lease_row_cache(slot)
            return
        before = {slot: self.residency.leased_row_cache(slot) for slot in SLOTS}
        staging, dropped = self.residency.staged_pages, self.residency.pages_dropped
        leased = len(staging) + sum(map(len, before.values()))
        possible = self.can_free(self.row_cache_pages, leased)
        assert self.residency.lease_row_cache(slot) == possible
        if possible:
            before[slot] = self.residency.leased_row_cache(slot)
            assert len(before[slot]) == self.row_cache_pages
        else:
            assert self.residency.pages_dropped == dropped
        assert before == {slot: self.residency.leased_row_cache(slot) for slot in SLOTS}
        assert self.residency.staged_pages == staging

    @rule(slot=st.sampled_from(SLOTS))
    def release_row_cache(self, slot: int) -> None:
        self.residency.release_row_cache(slot)
        assert self.residency.leased_row_cache(slot) == ()

    @rule()
    def lease_staging(self) -> None:
        held = self.num_pages - self.residency.states.count(FREE)
        offloaded, free = self.residency.pages_offloaded, self.residency.states.num_free_device
        before = self.residency.staged_pages
        got = self.residency.lease_staging()
        assert got == len(self.residency.staged_pages)
        assert min(self.staging_pages, len(before) + free) <= got <= self.staging_pages
        assert self.residency.pages_offloaded == offloaded
        assert self.num_pages - self.residency.states.count(FREE) == held

    @rule()
    def release_staging(self) -> None:
        self.residency.release_staging()
        assert self.residency.staged_pages == ()

    @rule(data=st.data())
    def update_heat(self, data: st.DataObject) -> None:
        heat = st.lists(st.integers(0, 3), min_size=self.num_pages, max_size=self.num_pages)
        self.residency.measure_heat()
        self.residency.update_heat(np.array(data.draw(heat), np.float32))

    @rule(count=st.integers(0, 5))
    def make_room(self, count: int) -> None:
        if self.try_out(self.can_free(count), lambda: self.residency.make_room(count)):
            assert self.residency.states.num_free_device >= count

    @rule(limit=st.integers(0, 2))
    def offload_ahead(self, limit: int) -> None:
        before = self.residency.pages_offloaded
        offloaded = self.residency.offload_ahead(limit)
        assert offloaded == self.residency.pages_offloaded - before <= limit

    @rule(limit=st.integers(0, 2))
    def onload_hottest(self, limit: int) -> None:
        before = self.residency.pages_onloaded
        onloaded = self.residency.onload_hottest(limit)
        assert onloaded == self.residency.pages_onloaded - before <= limit

    @invariant()
    def agrees(self) -> None:
        self.pool.check_integrity()
        self.residency.check_integrity()
        assert all(self.device_page_index(page) >= 0 for page in self.pages(TAIL))
        assert self.residency.states.room <= self.device_pages
        assert self.residency.pages_offloaded == self.moves.pages_queued_to_offload


class TestResidency(ResidencyMachine.TestCase):
    """A page whose bytes are lost, moved too late, or mapped elsewhere; a needless refusal."""

    settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
