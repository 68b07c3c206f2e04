import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache.device.page_moves import MoveList, PageMoves

INDICES = range(4)
KINDS = ["offload", "onload", "copy", "copy_keys"]
Move = tuple[str, int, int]

indices = st.sampled_from(INDICES)
moves = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(KINDS), indices, indices).filter(
            lambda move: move[0] in ("offload", "onload") or move[1] != move[2]
        ),
        st.tuples(st.just("map_page"), indices, st.integers(-1, 3)),
        st.just(("flush", 0, 0)),
    ),
    max_size=16,
)


@dataclasses.dataclass
class Device:
    """What every page holds, as the name of the page that it was written to first."""

    device: dict[int, str] = dataclasses.field(
        default_factory=lambda: {index: f"device {index}" for index in INDICES}
    )
    host: dict[int, str] = dataclasses.field(
        default_factory=lambda: {index: f"host {index}" for index in INDICES}
    )
    keys: dict[int, str] = dataclasses.field(
        default_factory=lambda: {page: f"keys {page}" for page in INDICES}
    )
    maps: dict[int, tuple[int, int]] = dataclasses.field(default_factory=dict)
    launches: list[MoveList] = dataclasses.field(default_factory=list)

    def move(self, kind: str, source: int, target: int) -> None:
        tiers = {
            "offload": (self.device, self.host),
            "onload": (self.host, self.device),
            "copy": (self.device, self.device),
            "copy_keys": (self.keys, self.keys),
        }
        tiers[kind][1][target] = tiers[kind][0][source]

    def launch(self, queued: MoveList) -> None:
        """Executes each list last move first: the order within a list must not matter."""
        self.launches.append(queued)
        lists = [queued.offloads, queued.onloads, queued.copies, queued.key_copies]
        for kind, pairs in zip(KINDS, lists, strict=True):
            for source, target in pairs[::-1].tolist():
                if source >= 0:
                    self.move(kind, source, target)
        for page, device_page_index, host_page_index in queued.maps[::-1].tolist():
            if page >= 0:
                self.maps[page] = (device_page_index, host_page_index)


def queue(page_moves: PageMoves, kind: str, source: int, target: int) -> None:
    if kind == "flush":
        page_moves.flush()
    elif kind == "map_page":
        page_moves.map_page(source, target, 3 - target)
    else:
        getattr(page_moves, kind)(source, target)


@given(moves=moves, size=st.integers(1, 6))
@settings(max_examples=200)
def test_launches_have_the_effect_of_the_moves_one_by_one(moves: list[Move], size: int) -> None:
    """A move carried past one that it conflicts with, lost, or executed twice."""
    expected, actual = Device(), Device()
    page_moves = PageMoves(actual.launch, size)
    for kind, source, target in moves:
        queue(page_moves, kind, source, target)
        if kind == "map_page":
            expected.maps[source] = (target, 3 - target)
        elif kind != "flush":
            expected.move(kind, source, target)
    page_moves.flush()
    assert dataclasses.replace(actual, launches=[]) == expected
    counts = (
        page_moves.pages_queued_to_offload,
        page_moves.pages_queued_to_onload,
        page_moves.pages_copied,
    )
    assert counts == tuple([move[0] for move in moves].count(kind) for kind in KINDS[:3])


@given(moves=moves, size=st.integers(1, 6))
def test_lists_have_one_shape(moves: list[Move], size: int) -> None:
    """A list that is compiled anew, or whose padding is taken for a move."""
    device = Device()
    page_moves = PageMoves(device.launch, size)
    for kind, source, target in moves:
        queue(page_moves, kind, source, target)
    for queued in device.launches:
        shapes = [rows.shape for rows in queued]
        assert shapes == [(size, 2)] * 4 + [(4 * size, 3)]
        assert {rows.dtype for rows in queued} == {np.dtype(np.int32)}
        used = [rows[:, 0] >= 0 for rows in queued]
        assert any(rows.any() for rows in used)
        for rows, are_moves in zip(queued, used, strict=True):
            assert (rows[~are_moves] == -1).all()
            assert (np.diff(are_moves.astype(int)) <= 0).all()


@pytest.mark.parametrize(
    ("moves", "launches"),
    [
        # Pages of one tier only, or reads only, or in the order of a launch.
        ([("offload", 0, 0), ("offload", 1, 1), ("onload", 2, 2), ("onload", 3, 3)], 1),
        ([("onload", 2, 2), ("onload", 3, 3), ("offload", 0, 0), ("offload", 1, 1)], 1),
        ([("offload", 0, 0), ("offload", 0, 1)], 1),
        ([("onload", 0, 0), ("onload", 0, 1)], 1),
        ([("offload", 0, 0), ("onload", 0, 1)], 1),
        ([("offload", 0, 0), ("onload", 1, 0)], 1),
        ([("offload", 0, 0), ("onload", 1, 0), ("copy", 0, 1)], 1),
        ([("copy", 0, 1), ("offload", 0, 0)], 1),
        ([("copy", 0, 1), ("copy", 0, 2), ("copy_keys", 0, 1), ("copy_keys", 0, 2)], 1),
        ([("copy", 0, 1), ("copy_keys", 1, 0), ("map_page", 0, 1), ("map_page", 0, 2)], 1),
        ([("offload", 0, 0), ("flush", 0, 0), ("flush", 0, 0)], 1),
        ([("flush", 0, 0)], 0),
        # One writes what the other reads or writes, and the launch would not keep their order.
        ([("onload", 0, 0), ("offload", 1, 0)], 2),
        ([("onload", 0, 0), ("offload", 0, 1)], 2),
        ([("copy", 0, 1), ("offload", 1, 0)], 2),
        ([("copy", 0, 1), ("onload", 0, 0)], 2),
        ([("copy", 0, 1), ("onload", 0, 1)], 2),
        ([("offload", 0, 0), ("offload", 1, 0)], 2),
        ([("onload", 0, 0), ("onload", 1, 0)], 2),
        ([("copy", 0, 1), ("copy", 1, 2)], 2),
        ([("copy", 0, 1), ("copy", 2, 0)], 2),
        ([("copy", 0, 1), ("copy", 2, 1)], 2),
        ([("copy_keys", 0, 1), ("copy_keys", 1, 2), ("copy_keys", 2, 3)], 3),
        ([("copy_keys", 0, 1), ("copy_keys", 2, 0)], 2),
        ([("copy_keys", 0, 1), ("copy_keys", 2, 1)], 2),
    ],
)
def test_a_launch_ends_at_a_conflict_and_nowhere_else(moves: list[Move], launches: int) -> None:
    """A launch for every move, or none where the order would change."""
    device = Device()
    page_moves = PageMoves(device.launch, 4)
    for kind, source, target in moves:
        queue(page_moves, kind, source, target)
    page_moves.flush()
    assert len(device.launches) == launches


@pytest.mark.parametrize(("kind", "room"), [("offload", 2), ("onload", 2), ("copy_keys", 2)])
def test_a_full_list_is_launched(kind: str, room: int) -> None:
    """A move beyond the end of its list, or a launch before it is full."""
    device = Device()
    page_moves = PageMoves(device.launch, room)
    for index in range(room):
        queue(page_moves, kind, index, (index + 2) % 4)
    assert not device.launches
    queue(page_moves, kind, 1, 0)
    assert len(device.launches) == 1


def test_maps_fill_up_by_page() -> None:
    """A changed index of one page counted as another, or a page beyond the end of the list."""
    device = Device()
    page_moves = PageMoves(device.launch, 1)
    for page in (0, 1, 2, 3, 0, 3):
        page_moves.map_page(page, page, -1)
    assert not device.launches
    page_moves.map_page(4, -1, 2)
    assert len(device.launches) == 1
    page_moves.flush()
    assert device.maps == {0: (0, -1), 1: (1, -1), 2: (2, -1), 3: (3, -1), 4: (-1, 2)}


@pytest.mark.parametrize("kind", KINDS)
def test_a_move_without_a_place_is_refused(kind: str) -> None:
    """Padding queued as a move, which the device would drop in silence."""
    page_moves = PageMoves(Device().launch, 1)
    with pytest.raises(ValueError, match="two page indices, got -1 and 2"):
        queue(page_moves, kind, -1, 2)
    with pytest.raises(ValueError, match="two page indices, got 2 and -1"):
        queue(page_moves, kind, 2, -1)


def test_what_has_no_effect_is_refused() -> None:
    """A page copied onto itself, a map change that is padding, or lists without room."""
    page_moves = PageMoves(Device().launch, 1)
    with pytest.raises(ValueError, match="3 cannot be copied onto itself"):
        page_moves.copy(3, 3)
    with pytest.raises(ValueError, match="3 cannot be copied onto itself"):
        page_moves.copy_keys(3, 3)
    with pytest.raises(ValueError, match="page must not be negative, got -1"):
        page_moves.map_page(-1, 0, 0)
    with pytest.raises(ValueError, match="size must be positive, got 0"):
        PageMoves(Device().launch, 0)
