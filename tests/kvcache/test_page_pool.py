from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvcache.page_pool import OutOfPagesError, PagePool

NUM_PAGES = 6
PAGES = range(-1, NUM_PAGES + 1)
pages = st.sampled_from(PAGES)


class PoolMachine(RuleBasedStateMachine):
    """Drives a pool, also wrongly, beside two plain dicts."""

    def __init__(self) -> None:
        super().__init__()
        self.freed: list[int] = []
        self.pool = PagePool(NUM_PAGES, self.freed.append)
        self.references: dict[int, int] = {}
        self.cached: set[int] = set()

    def expect_freed(self, page: int) -> None:
        unused = self.references[page] == 0 and page not in self.cached
        assert self.freed == [page] * unused
        self.freed.clear()
        if unused:
            del self.references[page]

    @rule(count=st.integers(0, 3))
    def allocate(self, count: int) -> None:
        free = NUM_PAGES - len(self.references)
        if count > free:
            with pytest.raises(OutOfPagesError, match=f"{count} pages wanted, {free} free"):
                self.pool.allocate(count)
            return
        taken = self.pool.allocate(count)
        assert len(set(taken)) == count
        assert not set(taken) & set(self.references)
        self.references |= dict.fromkeys(taken, 1)

    @rule(page=pages)
    def acquire(self, page: int) -> None:
        if page not in self.references:
            with pytest.raises(ValueError, match=f"page {page} is not held"):
                self.pool.acquire(page)
            return
        self.pool.acquire(page)
        self.references[page] += 1

    @rule(page=pages)
    def release(self, page: int) -> None:
        if not self.references.get(page):
            with pytest.raises(ValueError, match=f"page {page} is"):
                self.pool.release(page)
            return
        self.pool.release(page)
        self.references[page] -= 1
        self.expect_freed(page)

    @rule(page=pages)
    def cache(self, page: int) -> None:
        if page not in self.references or page in self.cached:
            with pytest.raises(ValueError, match=f"page {page} is"):
                self.pool.cache(page)
            return
        self.pool.cache(page)
        self.cached.add(page)

    @precondition(lambda self: self.references)
    @rule(page=pages)
    def uncache(self, page: int) -> None:
        if page not in self.cached:
            with pytest.raises(ValueError, match=f"page {page} is not cached"):
                self.pool.uncache(page)
            return
        self.pool.uncache(page)
        self.cached.remove(page)
        self.expect_freed(page)

    @invariant()
    def agrees(self) -> None:
        self.pool.check_integrity()
        assert not self.freed
        assert self.pool.num_free == NUM_PAGES - len(self.references)
        assert {page for page in PAGES if self.pool.is_cached(page)} == self.cached
        assert [self.pool.references(page) for page in PAGES] == [
            self.references.get(page, 0) for page in PAGES
        ]
        assert self.pool.num_cached_only == list(self.references.values()).count(0)
        assert self.pool.num_unreferenced(list(self.references)) == self.pool.num_cached_only


class TestPool(PoolMachine.TestCase):
    """A page lost, freed early, late or twice, or a refusal that changes something."""

    settings = settings(max_examples=60, stateful_step_count=30)


def test_a_page_is_held_until_its_places_are_given_back() -> None:
    """A failing callback that leaves a page free in the pool and used elsewhere."""

    def refuse(page: int) -> None:
        raise ValueError(f"page {page} is pinned")

    pool = PagePool(2, refuse)
    (page,) = pool.allocate(1)
    with pytest.raises(ValueError, match="page 0 is pinned"):
        pool.release(page)
    assert pool.references(page) == 1
    pool.cache(page)
    pool.release(page)
    with pytest.raises(ValueError, match="page 0 is pinned"):
        pool.uncache(page)
    assert pool.is_cached(page)
    pool.check_integrity()


@pytest.mark.parametrize(
    "corrupt",
    [
        lambda pool: pool._free.pop(),
        lambda pool: pool._free.append(pool._free[0]),
        lambda pool: pool._free.append(0),
        lambda pool: pool._free.append(NUM_PAGES),
        lambda pool: pool._references.__setitem__(0, -1),
        lambda pool: pool._references.__setitem__(0, 0),
        lambda pool: pool._references.__setitem__(1, -2),
        lambda pool: pool._cached.add(5),
        lambda pool: pool.release(1) or pool._cached.remove(1),
        lambda pool: setattr(pool, "_num_cached_only", 1),
    ],
)
def test_integrity_check_finds_corruption(corrupt: Callable[[PagePool], object]) -> None:
    """A page lost or held twice, that the check which every engine test runs would let pass."""
    pool = PagePool(NUM_PAGES, lambda page: None)
    assert pool.allocate(3) == [0, 1, 2]
    pool.cache(1)
    pool.check_integrity()
    corrupt(pool)
    with pytest.raises(AssertionError, match="page"):
        pool.check_integrity()
