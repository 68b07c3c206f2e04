"""Predicts when a cached page is used again, and orders pages by it.

A use is predicted one reuse interval after the last; a page that is late is expected to take as
long again as it is late. The page whose next use is furthest away, either way, goes first. So one
used in a loop that does not fit goes right after its use and the others stay until theirs, and one
that is never used again goes once it is later than those in use are early.
"""

import bisect
from collections.abc import Iterator

_INTERVAL_WEIGHT = 1 / 4  # of a page's newest interval, in its smoothed one
_PRIOR_WEIGHT = 1 / 16  # of the newest interval of any page, in the prior
_NEVER_REUSED = 2.0  # times the prior: a page that was never used again may be one of a single use
_MAX_LOST = 1 << 16  # pages remembered after they are lost


class Reuse:
    """When a page was used and will be.

    Attributes:
        last_use: clock of the last use; None if the time to the next says nothing.
        interval: smoothed time between uses; None before the first reuse.
        due: predicted clock of the next use.
        rank: its rank in the order, (due, ticket); None while not in it.
    """

    __slots__ = ("due", "interval", "last_use", "rank")

    def __init__(self) -> None:
        self.last_use: int | None = None
        self.interval: float | None = None
        self.due = 0.0
        self.rank: tuple[float, int] | None = None

    def time_since(self, now: int) -> int | None:
        """Time since the last use. None if it says nothing; several uses at one clock are one."""
        return now - self.last_use if self.last_use is not None and now > self.last_use else None


class ReuseOrder[Page: Reuse]:
    """Pages that may be evicted, ordered by when they are due.

    Adding and removing one is a binary search and a memmove of the pages behind it.
    """

    def __init__(self) -> None:
        self._pages: list[tuple[float, int, Page]] = []
        self._next_ticket = 0
        self._prior: float | None = None
        # Last use and interval of lost pages by key, oldest first. The interval of a conversation
        # that always comes back too late is learnt from these alone.
        self._lost: dict[bytes, tuple[int | None, float | None]] = {}

    def __len__(self) -> int:
        return len(self._pages)

    def add(self, page: Page, ticket: int | None = None) -> None:
        """Adds a page. Among equals the first ticket comes first, by default one at the end."""
        if ticket is None:
            ticket, self._next_ticket = self._next_ticket, self._next_ticket + 1
        page.rank = (page.due, ticket)
        bisect.insort(self._pages, (page.due, ticket, page))

    def discard(self, page: Page) -> None:
        """Removes a page, if it is in the order."""
        if page.rank is not None:
            del self._pages[bisect.bisect_left(self._pages, page.rank)]
            page.rank = None

    def furthest_first(self, now: int) -> Iterator[Page]:
        """Yields pages from either end, the one whose next use is furthest away first."""
        low, high = 0, len(self._pages) - 1
        while low <= high:
            if now - self._pages[low][0] >= self._pages[high][0] - now:
                yield self._pages[low][2]
                low += 1
            else:
                yield self._pages[high][2]
                high -= 1

    def predict(self, page: Page, now: int) -> None:
        """Notes that a use ends, and predicts the next."""
        page.last_use = now
        interval = page.interval
        if interval is None:
            interval = _NEVER_REUSED * (self._prior or 0.0)
        page.due = now + interval

    def reuse(self, page: Page, now: int) -> None:
        """Notes a further use."""
        elapsed = page.time_since(now)
        if elapsed is not None:
            page.interval = _smooth(page.interval, elapsed, _INTERVAL_WEIGHT)
        self.predict(page, now)

    def learn_prior(self, page: Page, now: int) -> None:
        """Learns from a reuse of this page, not yet noted, what to expect of others."""
        elapsed = page.time_since(now)
        if elapsed is not None:
            self._prior = _smooth(self._prior, elapsed, _PRIOR_WEIGHT)

    def lose(self, page: Page, key: bytes) -> None:
        """Remembers a page that is evicted."""
        self._lost[key] = (page.last_use, page.interval)
        if len(self._lost) > _MAX_LOST:
            del self._lost[next(iter(self._lost))]

    def forget(self, key: bytes) -> None:
        """Forgets a lost page, if it is remembered."""
        self._lost.pop(key, None)

    def recover(self, page: Page, key: bytes, now: int) -> bool:
        """Gives a page that comes back its history; the time it was away is an interval.

        Returns:
            Whether it was remembered.
        """
        if key not in self._lost:
            return False
        page.last_use, page.interval = self._lost.pop(key)
        self.learn_prior(page, now)
        self.reuse(page, now)
        return True

    def check_integrity(self) -> None:
        """Proves that the order is one, and holds each of its pages once.

        Raises:
            AssertionError: naming what is out of order.
        """
        ranks = [(due, ticket) for due, ticket, _ in self._pages]
        assert ranks == sorted(set(ranks)), f"out of order: {ranks}"
        for due, ticket, page in self._pages:
            assert page.rank == (due, ticket), f"rank {page.rank} at {due, ticket}"
            assert due == page.due, f"due at {page.due}, ranked as {page.rank}"


def _smooth(average: float | None, sample: int, weight: float) -> float:
    return float(sample) if average is None else average + weight * (sample - average)
