from collections.abc import Callable

import numpy as np
import pytest

from kvcache.device.page_moves import MoveList, PageMoves
from kvcache.page_pool import OutOfPagesError
from kvcache.tiers.page_states import PageState
from kvcache.tiers.residency import Residency
from tests.helpers.free_lists import device_list, host_list

FREE, TAIL, DIRTY = PageState.FREE, PageState.TAIL, PageState.DIRTY
CLEAN, HOST, IMPORTING = PageState.CLEAN, PageState.HOST, PageState.IMPORTING


def residency(
    device_pages: int,
    host_pages: int,
    launch: Callable[[MoveList], None] = lambda moves: None,
    on_lease: Callable[[int, tuple[int, ...]], None] = lambda slot, pages: None,
) -> Residency:
    return Residency(
        free_device=device_list(device_pages),
        free_host=host_list(host_pages),
        max_sequences=2,
        row_cache_pages=2,
        staging_pages=1,
        moves=PageMoves(launch, 16),
        referenced=lambda: np.ones(device_pages + host_pages, bool),
        evict=lambda: False,
        on_change=lambda page, old, new: None,
        on_lease=on_lease,
        on_revoke=lambda slot: None,
    )


OPERATIONS: dict[str, Callable[[Residency, int], object]] = {
    "start": lambda pages, page: pages.start(page),
    "copy_of": lambda pages, page: pages.copy_of(0, page),
    "copied": lambda pages, page: pages.copy_of(page, 9),
    "seal": lambda pages, page: pages.seal(page),
    "offload": lambda pages, page: pages.offload(page),
    "drop": lambda pages, page: pages.drop(page),
    "drop_host_copy": lambda pages, page: pages.drop_host_copy(page),
    "onload": lambda pages, page: pages.onload(page),
    "import_device": lambda pages, page: pages.begin_import(page, to_device=True),
    "import_host": lambda pages, page: pages.begin_import(page, to_device=False),
    "end_import": lambda pages, page: pages.end_import(page),
    "forget": lambda pages, page: pages.forget(page),
}
# How a page comes to each state, and what may be done to it there.
HISTORIES = {
    "FREE": [],
    "TAIL": ["start"],
    "DIRTY": ["start", "seal"],
    "CLEAN": ["start", "seal", "offload"],
    "HOST": ["start", "seal", "offload", "drop"],
    "IMPORTING on the device": ["import_device"],
    "IMPORTING on the host": ["import_host"],
}
EXPECTED = {
    "FREE": {
        "start": TAIL,
        "copy_of": TAIL,
        "import_device": IMPORTING,
        "import_host": IMPORTING,
        "forget": FREE,
    },
    "TAIL": {"seal": DIRTY, "copied": TAIL, "forget": FREE},
    "DIRTY": {"offload": CLEAN, "copied": DIRTY, "forget": FREE},
    "CLEAN": {"drop": HOST, "drop_host_copy": DIRTY, "copied": CLEAN, "forget": FREE},
    "HOST": {"onload": CLEAN, "copied": HOST, "forget": FREE},
    "IMPORTING on the device": {"end_import": DIRTY, "forget": FREE},
    "IMPORTING on the host": {"end_import": HOST, "forget": FREE},
}


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("state", HISTORIES)
def test_transitions(state: str, operation: str) -> None:
    """A transition that loses or invents bytes, or a refusal that changes something."""
    pages, page = residency(6, 4), 5
    pages.start(0)
    for step in HISTORIES[state]:
        OPERATIONS[step](pages, page)

    def bookkeeping() -> list[object]:
        indices = [
            (pages.states.device_page_index(page), pages.states.host_page_index(page))
            for page in range(10)
        ]
        counts = [pages.states.count(state) for state in PageState]
        return [
            indices,
            counts,
            pages.states.num_free_device,
            pages.states.num_free_host,
            pages.states.state(page),
        ]

    before = bookkeeping()
    if operation in EXPECTED[state]:
        OPERATIONS[operation](pages, page)
        assert pages.states.state(page) is EXPECTED[state][operation]
    else:
        with pytest.raises(ValueError, match=f"page {page}: it is {state.split()[0]}"):
            OPERATIONS[operation](pages, page)
        assert bookkeeping() == before
    pages.check_integrity()


def test_a_pinned_page_stays() -> None:
    """A page that a running sequence is about to read, dropped or forgotten."""
    pages = residency(2, 2)
    pages.start(0)
    pages.pin(0)
    pages.pin(0)
    pages.seal(0)
    pages.offload(0)
    for _ in range(2):
        with pytest.raises(ValueError, match="cannot drop page 0: it is pinned"):
            pages.drop(0)
        with pytest.raises(ValueError, match="cannot forget page 0: it is pinned"):
            pages.forget(0)
        with pytest.raises(OutOfPagesError, match="2 device pages wanted, 1 can be freed"):
            pages.make_room(2)
        pages.unpin(0)
    with pytest.raises(ValueError, match="page 0 is not pinned"):
        pages.unpin(0)
    with pytest.raises(ValueError, match="cannot pin page 1: it is FREE"):
        pages.pin(1)
    pages.make_room(2)
    assert pages.states.state(0) is HOST


@pytest.mark.parametrize("page", [-1, 4])
def test_no_such_page(page: int) -> None:
    """An id that wraps around to another page."""
    with pytest.raises(ValueError, match=f"page {page} is not in 0 to 3"):
        residency(2, 2).start(page)


@pytest.mark.parametrize("state", HISTORIES)
def test_the_device_is_told_each_page_index(state: str) -> None:
    """A map that still names a page index that was freed, where the next page's rows lie."""
    maps = dict.fromkeys(range(3), (-1, -1))

    def launch(moves: MoveList) -> None:
        maps.update({page: (device, host) for page, device, host in moves.maps.tolist()})

    for last in ["onload", "drop_host_copy", "forget"]:
        pages = residency(2, 1, launch)
        for step in [*HISTORIES[state], last]:
            if step in EXPECTED[state] or step in HISTORIES[state]:
                OPERATIONS[step](pages, 2)
            pages._moves.flush()
            assert maps[2] == (pages.states.device_page_index(2), pages.states.host_page_index(2))


def test_numbers_of_a_page_differ() -> None:
    """An id or an index that happens to be right when it is used for another."""
    pages = residency(10, 10)
    for page in range(10):
        pages.start(page)
        pages.seal(page)
        pages.offload(page)
    numbers = [
        (page, pages.states.device_page_index(page), pages.states.host_page_index(page))
        for page in range(10)
    ]
    assert sum(len(set(number)) < 3 for number in numbers) <= 2


def test_slots_of_leases() -> None:
    """A lease of a slot that is not there, or of one slot twice, so that device pages are lost."""
    told: list[tuple[int, int]] = []
    pages = residency(6, 0, on_lease=lambda slot, leased: told.append((slot, len(leased))))
    for slot in (-1, 2):
        with pytest.raises(ValueError, match=f"slot {slot} is not in 0 to 1"):
            pages.lease_row_cache(slot)
    assert pages.lease_row_cache(1)
    with pytest.raises(ValueError, match="slot 1 has a row-cache lease"):
        pages.lease_row_cache(1)
    pages.release_row_cache(0)
    assert told == [(1, 2)]
    pages.release_row_cache(1)
    assert told == [(1, 2), (1, 0)]
    pages.check_integrity()


@pytest.mark.parametrize(
    "corrupt",
    [
        lambda pages: pages._free_device.take(),
        lambda pages: pages._free_device.give_back(pages.states.device_page_index(0)),
        lambda pages: pages._free_host.take(),
        lambda pages: pages._free_host.give_back(pages.states.host_page_index(1)),
        lambda pages: pages._leases.staging.append(pages.states.device_page_index(0)),
        lambda pages: pages._leases.row_cache.update({1: pages.leased_row_cache(0)}),
        lambda pages: pages._leases.row_cache.update({1: ()}),
        lambda pages: pages._leases.staging.append(pages._free_device.take()),
        lambda pages: pages.states._codes.__setitem__(0, CLEAN),
        lambda pages: pages.states._codes.__setitem__(0, DIRTY),
        lambda pages: pages.states._codes.__setitem__(1, 8 + CLEAN),
        lambda pages: pages.states._counts.__setitem__(CLEAN, 0),
        lambda pages: pages.states._pins.update({1: 1}),
        lambda pages: pages.states._pins.update({0: 0}),
        lambda pages: pages.states._pins.update({3: 1}),
    ],
)
def test_integrity_check_finds_corruption(corrupt: Callable[[Residency], object]) -> None:
    """An index lost or held twice, that the check which every engine test runs would let pass."""
    pages = residency(7, 3)
    for page in range(2):
        pages.start(page)
    pages.seal(1)
    pages.offload(1)
    assert pages.lease_row_cache(0)
    assert pages.lease_staging() == 1
    pages.check_integrity()
    corrupt(pages)
    with pytest.raises(AssertionError, match=r"page|indices"):
        pages.check_integrity()
