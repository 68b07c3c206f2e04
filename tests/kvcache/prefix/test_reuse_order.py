from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache.prefix import reuse_order
from kvcache.prefix.reuse_order import Reuse, ReuseOrder


def due_at(due: float) -> Reuse:
    page = Reuse()
    page.due = due
    return page


@given(
    dues=st.lists(st.integers(0, 20), min_size=1, max_size=12),
    now=st.integers(0, 20),
    data=st.data(),
)
def test_furthest_either_way_comes_first(dues: list[int], now: int, data: st.DataObject) -> None:
    """A page evicted although another is due later or is longer overdue."""
    order: ReuseOrder[Reuse] = ReuseOrder()
    pages = [due_at(float(due)) for due in dues]
    for page in pages:
        order.add(page)
    gone = data.draw(st.lists(st.sampled_from(pages), unique=True))
    for page in [*gone, *gone]:
        order.discard(page)
    order.check_integrity()
    left = [page for page in pages if page not in gone]
    found = list(order.furthest_first(now))
    assert len(order) == len(found) == len(left)
    assert set(map(id, found)) == set(map(id, left))
    distances = [abs(page.due - now) for page in found]
    assert distances == sorted(distances, reverse=True)


def test_ticket_keeps_a_turn_among_equals() -> None:
    """A conversation's next page queued behind all that are due with it."""
    order: ReuseOrder[Reuse] = ReuseOrder()
    first, second, third = due_at(5.0), due_at(5.0), due_at(5.0)
    order.add(first)
    order.add(second)
    assert first.rank is not None
    ticket = first.rank[1]
    order.discard(first)
    order.add(third, ticket)
    assert list(order.furthest_first(9)) == [third, second]


def test_predictions() -> None:
    """A page predicted by the wrong interval, or by one that is none."""
    order: ReuseOrder[Reuse] = ReuseOrder()
    page, fresh = Reuse(), Reuse()
    order.predict(page, 10)
    assert page.due == 10.0
    order.learn_prior(page, 18)
    order.reuse(page, 18)
    assert (page.interval, page.due) == (8.0, 26.0)
    order.reuse(page, 18)
    assert page.interval == 8.0
    order.reuse(page, 30)
    assert (page.interval, page.due) == (9.0, 39.0)
    order.predict(fresh, 30)
    assert fresh.due == 46.0
    page.last_use = None
    order.reuse(page, 1000)
    assert (page.interval, page.last_use) == (9.0, 1000)


def test_lost_pages_teach(monkeypatch: pytest.MonkeyPatch) -> None:
    """Intervals never learnt because every page is lost before its use; memory without bound."""
    monkeypatch.setattr(reuse_order, "_MAX_LOST", 2)
    order: ReuseOrder[Reuse] = ReuseOrder()
    for number in range(3):
        page = Reuse()
        order.predict(page, number)
        order.lose(page, bytes([number]))
    assert not order.recover(Reuse(), bytes([0]), 50)
    order.forget(bytes([1]))
    assert not order.recover(Reuse(), bytes([1]), 50)
    page, fresh = Reuse(), Reuse()
    assert order.recover(page, bytes([2]), 50)
    assert (page.interval, page.last_use, page.due) == (48.0, 50, 98.0)
    order.predict(fresh, 50)
    assert fresh.due == 146.0
    assert not order.recover(page, bytes([2]), 60)


@pytest.mark.parametrize(
    ("corrupt", "message"),
    [
        (lambda order: order._pages.reverse(), "out of order"),
        (lambda order: order._pages.append(order._pages[-1]), "out of order"),
        (lambda order: setattr(order._pages[0][2], "rank", None), "rank None"),
        (lambda order: setattr(order._pages[0][2], "due", 9.0), "due at 9.0"),
    ],
)
def test_integrity_check_finds_corruption(corrupt: Callable, message: str) -> None:
    """An order out of order, that the check would let pass."""
    order: ReuseOrder[Reuse] = ReuseOrder()
    order.add(due_at(1.0))
    order.add(due_at(2.0))
    order.check_integrity()
    corrupt(order)
    with pytest.raises(AssertionError, match=message):
        order.check_integrity()
