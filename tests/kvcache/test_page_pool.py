import dataclasses
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvcache import KVGeometry, OutOfPagesError, PagePool
from pallas_kernels.row_format import RowFormat

GEOMETRY = KVGeometry(
    num_layers=1,
    num_index_layers=1,
    num_pages=9,
    device_pages=6,
    num_devices=2,
    max_sequences=2,
    max_pages_per_sequence=4,
    row_format=RowFormat("bfloat16", 8, 4, 1e-4),
    index_row_format=RowFormat("bfloat16", 8, 0, 1e-6),
    rows_per_device=4,
)


class PoolMachine(RuleBasedStateMachine):
    """Drives a pool beside a set of the pages that are out."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(GEOMETRY)
        self.held: dict[int, int] = {}  # page to device page

    @property
    def free(self) -> int:
        return GEOMETRY.device_pages - len(self.held)

    @rule(count=st.integers(0, 4))
    def allocate(self, count: int) -> None:
        if count > self.free:
            with pytest.raises(OutOfPagesError, match=f"{count} pages wanted, {self.free} free"):
                self.pool.allocate(count)
            return
        pages = self.pool.allocate(count)
        assert len(set(pages)) == count
        assert not set(pages) & set(self.held)
        self.held |= {page: self.pool.device_page(page) for page in pages}

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        pages = data.draw(st.lists(st.sampled_from(sorted(self.held)), unique=True))
        self.pool.release(pages)
        for page in pages:
            del self.held[page]

    @rule(data=st.data())
    def release_wrongly(self, data: st.DataObject) -> None:
        """A page that is free, unknown, or named twice takes none of the others with it."""
        others = sorted(set(range(-1, GEOMETRY.num_pages + 1)) - set(self.held))
        pages = data.draw(st.lists(st.sampled_from(sorted(self.held)))) if self.held else []
        if len(set(pages)) == len(pages):
            pages.insert(data.draw(st.integers(0, len(pages))), data.draw(st.sampled_from(others)))
        with pytest.raises(ValueError, match="pages"):
            self.pool.release(pages)

    @invariant()
    def agrees(self) -> None:
        self.pool.check_integrity()
        assert self.pool.num_free == self.free
        assert {page: self.pool.device_page(page) for page in self.held} == self.held
        places = set(self.held.values())
        assert len(places) == len(self.held)
        assert places <= set(range(GEOMETRY.device_pages))
        assert set(self.held) <= set(range(GEOMETRY.num_pages))


class TestPool(PoolMachine.TestCase):
    """A page lost, handed out twice or moved, or a refusal that changes something."""

    settings = settings(max_examples=60, stateful_step_count=30)


def test_ids_are_no_places() -> None:
    """A page id that happens to be its place in the slab, which would hide a mix-up of the two."""
    pool = PagePool(dataclasses.replace(GEOMETRY, num_pages=6))
    for _ in range(3):
        pages = pool.allocate(6)
        assert all(page != pool.device_page(page) for page in pages)
        pool.release(pages[::2])
        pool.release(pages[1::2])


def test_unknown_page_has_no_place() -> None:
    """A place made up for a page that nobody holds."""
    pool = PagePool(GEOMETRY)
    (page,) = pool.allocate(1)
    pool.release([page])
    with pytest.raises(KeyError):
        pool.device_page(page)


@pytest.mark.parametrize(
    "corrupt",
    [
        lambda pool: pool._free_pages.pop(),
        lambda pool: pool._free_pages.append(pool._free_pages[0]),
        lambda pool: pool._free_pages.append(next(iter(pool._device_page))),
        lambda pool: pool._free_pages.append(GEOMETRY.num_pages),
        lambda pool: pool._free_pages.append(pool._free_pages.pop(0) + 1),
        lambda pool: pool._free_device_pages.pop(),
        lambda pool: pool._free_device_pages.append(pool._free_device_pages[0]),
        lambda pool: pool._free_device_pages.append(next(iter(pool._device_page.values()))),
        lambda pool: pool._free_device_pages.append(pool._free_device_pages.pop(0) + 1),
        lambda pool: pool._device_page.popitem(),
        lambda pool: pool._device_page.update({0: pool._device_page[1]}),
        lambda pool: pool._device_page.update({8: 0}),
    ],
)
def test_integrity_check_finds_corruption(corrupt: Callable[[PagePool], object]) -> None:
    """A page lost or held twice, that the check which every engine test runs would let pass."""
    pool = PagePool(GEOMETRY)
    assert pool.allocate(3) == [0, 1, 2]
    pool.check_integrity()
    corrupt(pool)
    with pytest.raises(AssertionError, match="lost"):
        pool.check_integrity()
