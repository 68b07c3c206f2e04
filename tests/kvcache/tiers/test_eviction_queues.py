import heapq
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache.device.page_moves import MoveList, PageMoves
from kvcache.page_pool import OutOfPagesError
from kvcache.tiers.page_states import PageState
from kvcache.tiers.residency import Residency
from tests.helpers.free_lists import device_list, host_list

DIRTY, CLEAN, HOST = PageState.DIRTY, PageState.CLEAN, PageState.HOST


class Harness:
    """A residency with a prefix index that keeps unreferenced pages and evicts the lowest."""

    def __init__(
        self,
        device_pages: int,
        host_pages: int,
        row_cache_pages: int = 1,
        staging_pages: int = 2,
        unreferenced: Iterable[int] = (),
    ) -> None:
        self.unreferenced = set(unreferenced)
        self.evicted: list[int] = []
        self.revoked: list[int] = []
        self.launches: list[MoveList] = []
        self.moves = PageMoves(self.launches.append, 64)
        self.num_pages = device_pages + host_pages
        self.pages = Residency(
            free_device=device_list(device_pages),
            free_host=host_list(host_pages),
            max_sequences=4,
            row_cache_pages=row_cache_pages,
            staging_pages=staging_pages,
            moves=self.moves,
            referenced=lambda: ~np.isin(np.arange(self.num_pages), list(self.unreferenced)),
            evict=self.evict,
            on_change=lambda page, old, new: None,
            on_lease=lambda slot, pages: None,
            on_revoke=self.revoked.append,
        )

    def evict(self) -> bool:
        kept = [
            page
            for page in self.unreferenced
            if self.pages.states.state(page) is not PageState.FREE
        ]
        for page in sorted(kept)[:1]:
            self.pages.forget(page)
            self.evicted.append(page)
        return bool(kept)

    def fill(self, *pages: int) -> None:
        for page in pages:
            self.pages.start(page)
            self.pages.seal(page)

    def heat(self, *heat: float) -> None:
        padding = [0.0] * (self.num_pages - len(heat))
        self.pages.measure_heat()
        self.pages.update_heat(np.array([*heat, *padding][: self.num_pages], np.float32))

    def states(self, *pages: int) -> str:
        return " ".join(self.pages.states.state(page).name for page in pages)


def dropped_in_turn(harness: Harness, pages: list[int]) -> list[int]:
    order = []
    for _ in pages:
        harness.pages.make_room(harness.pages.states.num_free_device + 1)
        (page,) = [
            page for page in pages if harness.pages.states.state(page) is HOST and page not in order
        ]
        order.append(page)
    return order


@given(data=st.data())
@settings(max_examples=40)
def test_order_of_victims(data: st.DataObject) -> None:
    """A page dropped before one that will be missed less."""
    order = data.draw(st.permutations(range(5)))
    harness = Harness(5, 5, unreferenced=data.draw(st.sets(st.integers(0, 4))))
    harness.fill(*order)
    heat = data.draw(st.lists(st.integers(0, 2), min_size=5, max_size=5))
    harness.heat(*map(float, heat))
    for page in data.draw(st.lists(st.integers(0, 4), unique=True)):
        harness.pages.offload(page)  # No difference: a copy is made of the coldest in any case.
    expected = sorted(
        order, key=lambda page: (heat[page], page not in harness.unreferenced, order.index(page))
    )
    assert dropped_in_turn(harness, order) == expected


def test_heat_measured_before_a_page_began() -> None:
    """The heat of whatever had a page's id before taken for its own, while counts are in flight."""
    harness = Harness(5, 5)
    harness.fill(0, 1, 2)
    harness.pages.measure_heat()
    harness.fill(3)
    harness.pages.update_heat(np.array([1, 0, 2, 0, 0, 0, 0, 0, 0, 0], np.float32))
    harness.fill(4)
    assert dropped_in_turn(harness, [0, 1, 2, 3, 4]) == [1, 0, 2, 3, 4]
    harness = Harness(5, 5)
    harness.fill(3, 0)
    harness.heat(1, 0, 0, 0)
    assert dropped_in_turn(harness, [0, 3]) == [3, 0]


def test_what_changed_since_the_order_was_made() -> None:
    """A page dropped that is pinned, or is in use again; one that came later, never dropped."""
    harness = Harness(5, 6, unreferenced={0})
    harness.fill(0, 1, 2, 3)
    harness.heat(1, 1, 1, 2)
    harness.pages.start(4)
    harness.pages.make_room(1)
    assert harness.states(0, 1, 2, 3) == "HOST DIRTY DIRTY DIRTY"
    harness.unreferenced = set()
    harness.pages.pin(1)
    harness.pages.onload(0)
    harness.pages.seal(4)
    assert dropped_in_turn(harness, [0, 2, 3, 4]) == [0, 2, 3, 4]
    harness.pages.unpin(1)
    assert dropped_in_turn(harness, [1]) == [1]


def test_age_counts_from_sealing() -> None:
    """A page that was written until just now dropped for having been started long ago."""
    harness = Harness(2, 2)
    for page in (0, 1):
        harness.pages.start(page)
    for page in (1, 0):
        harness.pages.seal(page)
    assert dropped_in_turn(harness, [0, 1]) == [1, 0]


def test_a_page_in_use_again_waits_its_turn() -> None:
    """A prefix dropped just when it is hit, for it was idle when the order was made."""
    harness = Harness(3, 3, unreferenced={0, 1})
    harness.fill(0, 2, 1)
    harness.heat(1, 1, 1)
    harness.pages.make_room(1)
    harness.unreferenced = set()
    assert harness.states(0, 1, 2) == "HOST DIRTY DIRTY"
    assert dropped_in_turn(harness, [2, 1]) == [2, 1]


def test_a_new_page_is_hot_until_measured() -> None:
    """The end of a prompt dropped because nothing has read it yet, or for its id's past."""
    harness = Harness(3, 3)
    harness.fill(0, 1)
    harness.heat(0, 5)
    harness.pages.forget(0)
    harness.fill(0, 2)
    harness.pages.make_room(1)
    assert harness.states(0, 1, 2) == "DIRTY HOST DIRTY"
    harness.heat(4, 5, 3)
    harness.pages.make_room(2)
    assert harness.states(0, 1, 2) == "DIRTY HOST HOST"


def test_host_copies_are_dropped_before_pages() -> None:
    """A cached page evicted while another is in both tiers; a cold page's host copy dropped."""
    harness = Harness(4, 2, unreferenced={3})
    harness.fill(0, 1, 2, 3)
    harness.heat(5, 9, 0, 7)
    harness.pages.offload(0)
    harness.pages.offload(1)
    harness.fill(4)
    assert harness.states(0, 1, 2, 3, 4) == "CLEAN DIRTY HOST DIRTY DIRTY"
    harness.pages.start(5)
    assert harness.states(0, 1, 2, 3, 5) == "HOST DIRTY HOST DIRTY TAIL"
    assert not harness.evicted
    assert harness.pages.host_copies_dropped == 1
    harness.pages.make_room(1)
    assert harness.evicted == [3]
    with pytest.raises(OutOfPagesError, match="raise host_memory_gib or device_pages"):
        harness.pages.make_room(2)


@given(data=st.data(), device_pages=st.integers(1, 5), host_pages=st.integers(0, 5))
@settings(max_examples=40)
def test_both_tiers_fill_to_the_last_place(
    data: st.DataObject, device_pages: int, host_pages: int
) -> None:
    """A page refused while there is room for it, held by a second copy or a lease."""
    harness = Harness(device_pages, host_pages)
    pages = data.draw(st.permutations(range(harness.num_pages)))
    for page in pages:
        harness.heat(*data.draw(st.lists(st.sampled_from([0.0, 1.0, 2.0]), max_size=5)))
        if data.draw(st.booleans()):
            harness.pages.lease_staging()
        for slot in range(data.draw(st.integers(0, 2))):
            if not harness.pages.leased_row_cache(slot):
                harness.pages.lease_row_cache(slot)
        harness.pages.offload_ahead(data.draw(st.integers(0, 2)))
        harness.pages.onload_hottest(data.draw(st.integers(0, 2)))
        harness.fill(page)
        harness.pages.check_integrity()
    assert harness.pages.states.count(DIRTY) == device_pages
    assert harness.pages.states.count(HOST) == host_pages
    with pytest.raises(OutOfPagesError, match="raise host_memory_gib or device_pages"):
        harness.pages.make_room(1)
    harness.pages.pin(pages[-1])
    with pytest.raises(OutOfPagesError, match="raise device_pages"):
        harness.pages.make_room(device_pages)


def test_leases_are_revoked_last() -> None:
    """A lease lost while a page could be dropped; a young lease lost before an old one."""
    harness = Harness(8, 1, row_cache_pages=2, staging_pages=1)
    assert harness.pages.lease_row_cache(3)
    assert harness.pages.lease_row_cache(1)
    assert harness.pages.lease_staging() == 1
    harness.fill(0, 1, 2)
    harness.pages.start(3)
    assert harness.states(0, 1, 2) == "HOST DIRTY DIRTY"
    assert harness.pages.staged_pages
    harness.pages.start(4)
    assert not harness.pages.staged_pages
    assert not harness.revoked
    harness.pages.start(5)
    assert harness.pages.leased_row_cache(3) == ()
    assert len(harness.pages.leased_row_cache(1)) == 2
    assert harness.revoked == [3]
    assert harness.pages.leases_revoked == 1
    harness.pages.make_room(2)
    assert not harness.pages.leased_row_cache(1)
    harness.pages.check_integrity()


def test_a_lease_that_cannot_be_had_costs_nothing() -> None:
    """Pages dropped or evicted each step for row-cache rows that never fit; another slot's
    lease."""
    harness = Harness(6, 6, row_cache_pages=3, unreferenced={1})
    assert harness.pages.lease_row_cache(0)
    harness.fill(0, 1)
    harness.pages.pin(0)
    assert not harness.pages.lease_row_cache(1)
    assert harness.states(0, 1) == "DIRTY DIRTY"
    assert not harness.evicted
    harness.pages.unpin(0)
    assert harness.pages.lease_row_cache(1)
    assert harness.states(0, 1) == "HOST HOST"
    assert len(harness.pages.leased_row_cache(0)) == 3


def test_staging_costs_no_copy() -> None:
    """A page copied, or a hot one dropped before a cold one, to stage a prefix once."""
    harness = Harness(4, 4, staging_pages=4)
    harness.fill(0, 1, 2)
    harness.heat(1, 2, 3)
    harness.pages.offload(0)
    harness.pages.offload(2)
    assert harness.pages.lease_staging() == 2
    assert harness.states(0, 1, 2) == "HOST DIRTY CLEAN"
    assert harness.pages.lease_staging() == 2
    harness.pages.release_staging()
    assert harness.pages.states.num_free_device == 2


def test_clean_ahead() -> None:
    """Copies made with room to spare, of row-cache pages, of pinned ones, or more than are
    needed."""
    harness = Harness(20, 20)
    harness.fill(*range(18))
    harness.heat(*[float(page % 6) for page in range(18)])
    assert harness.pages.offload_ahead(4) == 0
    harness.fill(18, 19)
    harness.heat(*[float(page % 6) for page in range(20)])
    harness.pages.pin(0)
    assert harness.pages.offload_ahead(1) == 1
    assert harness.states(0, 6, 12, 18) == "DIRTY CLEAN DIRTY DIRTY"
    assert harness.pages.offload_ahead(4) == 1
    assert harness.states(0, 6, 12, 18) == "DIRTY CLEAN CLEAN DIRTY"
    assert harness.pages.offload_ahead(4) == 0
    # The reserve has become hot: the coldest page is still copied ahead of its turn.
    harness.heat(*[float(page in (6, 12)) for page in range(20)])
    assert harness.pages.offload_ahead(4) == 1
    assert harness.states(1) == "CLEAN"
    assert harness.pages.pages_dropped == 0
    harness.moves.flush()
    assert (harness.launches[-1].offloads[:, 0] >= 0).sum() == 3


def test_clean_ahead_without_a_host_page_index() -> None:
    """A store to nowhere when the host is full, or is not there."""
    for host_pages in (0, 1):
        harness = Harness(2, host_pages)
        harness.fill(0, 1)
        assert harness.pages.offload_ahead(4) == host_pages
        assert harness.pages.offload_ahead(4) == 0


def test_onload_hottest() -> None:
    """Device pages taken that new pages need; cold or idle ones onloaded; the hottest not first."""
    harness = Harness(6, 6, unreferenced={3})
    harness.fill(0, 1, 2, 3, 4)
    harness.heat(1, 3, 0, 9, 2)
    harness.pages.make_room(6)
    assert harness.pages.onload_hottest(1) == 1
    assert harness.states(0, 1, 2, 3, 4) == "HOST CLEAN HOST HOST HOST"
    harness.unreferenced = {3, 4}
    assert harness.pages.onload_hottest(4) == 1
    assert harness.states(0, 1, 2, 3, 4) == "CLEAN CLEAN HOST HOST HOST"
    assert harness.pages.onload_hottest(4) == 0
    harness.unreferenced = set()
    harness.heat(1, 3, 0, 9, 2)
    assert harness.pages.onload_hottest(4) == 2
    assert harness.states(0, 1, 2, 3, 4) == "CLEAN CLEAN HOST CLEAN CLEAN"
    harness.heat(1, 3, 1, 9, 2)
    assert harness.pages.onload_hottest(4) == 0
    assert harness.pages.states.num_free_device == 2


def test_a_dropped_source_is_copied_from_the_host() -> None:
    """A copy of a page whose own device page was taken for it."""
    harness = Harness(1, 2)
    harness.fill(0)
    harness.pages.copy_of(0, 1)
    assert harness.states(0, 1) == "HOST TAIL"
    harness.moves.flush()
    (launch,) = harness.launches
    host_page_index = harness.pages.states.host_page_index(0)
    assert launch.offloads[0].tolist() == [0, host_page_index]
    assert launch.onloads[0].tolist() == [host_page_index, 0]
    assert launch.key_copies[0].tolist() == [0, 1]
    assert harness.pages.pages_copied == 1


def test_a_source_that_nobody_holds_may_be_lost() -> None:
    """A copy of whatever came to lie where the source was."""
    harness = Harness(2, 0, unreferenced={0})
    harness.fill(0)
    assert harness.pages.lease_row_cache(0)
    with pytest.raises(ValueError, match="cannot copy page 0: it is FREE"):
        harness.pages.copy_of(0, 1)
    assert harness.pages.states.num_free_device == 1
    harness.pages.check_integrity()


def test_import_to_a_full_host() -> None:
    """An import refused while another page could move up, or a cached one be evicted."""
    harness = Harness(2, 2, unreferenced={1})
    harness.fill(0, 1, 2)
    harness.heat(0, 0, 4)
    harness.pages.make_room(2)
    assert harness.evicted == [1]
    harness.fill(3)
    harness.pages.begin_import(1, to_device=False)
    assert harness.states(0, 1, 2, 3) == "HOST IMPORTING DIRTY DIRTY"
    with pytest.raises(OutOfPagesError, match="raise host_memory_gib"):
        Harness(2, 0).pages.begin_import(0, to_device=False)


def test_heat_of_every_page() -> None:
    """Heat of another store, cut to size in silence; heat that the caller still changes."""
    harness = Harness(2, 2)
    with pytest.raises(ValueError, match="heat has 3 pages, there are 4"):
        harness.pages.update_heat(np.zeros(3, np.float32))
    heat = np.array([0, 1, 0, 0], np.float32)
    harness.fill(0, 1)
    harness.pages.update_heat(heat)
    heat[:] = 5 - heat
    harness.pages.make_room(1)
    assert harness.states(0, 1) == "HOST DIRTY"


class HeapWork:
    """Counts the pages that go through a heap, one by one or when it is built."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pages = 0
        for name in ("heapify", "heappush", "heappop", "heapreplace"):
            monkeypatch.setattr(heapq, name, self.counting(getattr(heapq, name)))

    def counting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(heap: list[Any], *arguments: Any) -> Any:
            self.pages += len(heap) if function.__name__ == "heapify" else 1
            return function(heap, *arguments)

        return counted


@pytest.mark.parametrize("host_pages", [0, 40, 1000])
@pytest.mark.parametrize("device_pages", [40, 300])
def test_work_of_a_step_does_not_grow_with_the_store(
    monkeypatch: pytest.MonkeyPatch, device_pages: int, host_pages: int
) -> None:
    """Orders made anew, or all pages looked through, each time that a page is needed."""
    harness = Harness(device_pages, host_pages)
    free = list(range(harness.num_pages))
    harness.fill(*(free.pop() for _ in range(device_pages + min(host_pages, 40))))
    work = HeapWork(monkeypatch)
    steps = 2 * device_pages
    for page in range(steps):
        if not free:
            harness.unreferenced = {page % harness.num_pages}
            assert harness.evict()
            free.append(harness.evicted[-1])
        harness.pages.offload_ahead(1)
        harness.fill(free.pop())
        harness.pages.onload_hottest(1)
    assert work.pages <= 8 * steps
    assert harness.pages.states.count(DIRTY) + harness.pages.states.count(CLEAN) == device_pages


def test_many_pages_equally_cold() -> None:
    """A pass in Python over all pages that have cooled down to nothing, or one that gives them up
    in another order than that in which they were written."""
    count = 1000
    harness = Harness(count, count, unreferenced={700, 900})
    harness.fill(*range(count))
    harness.heat()
    assert harness.pages._queues.coldest.first() == 700
    assert len(harness.pages._queues.coldest._heap or ()) <= 128
    turns = dropped_in_turn(harness, [*range(300), 700, 900])
    assert turns == [700, 900, *range(300)]
