"""Pages in the order in which the policy takes them: by heat."""

import heapq
import math
from collections.abc import Callable

import numpy as np
from jaxtyping import Bool, Float, Float32, Int, Int64

from kvcache.tiers.page_states import PageState, PageStates

Order = tuple[float, int]
Orders = Callable[
    [Int[np.ndarray, " pages"]],
    tuple[Float[np.ndarray, " pages"], Int64[np.ndarray, " pages"]],
]

_BUILT = 128  # pages that a queue is built with
_REFERENCED = 1 << 62  # of an order, beyond any time
_NONE = (math.inf, 1 << 63)  # beyond any order


class PageQueue:
    """Queue of the pages with one property, such as being droppable, lowest order first.

    Built when first asked for a page after `invalidate`, of the pages of lowest heat, or highest,
    and again once those are used up: a pass over all pages in numpy, and Python for some dozens.
    From then on `push` and `first` take O(log n): a page that no longer qualifies, or whose order
    has grown, is noticed when it comes first. One whose order has shrunk keeps its turn until the
    queue is built anew.
    """

    def __init__(
        self,
        pages: Callable[[], Int[np.ndarray, " pages"]],
        qualifies: Callable[[int], bool],
        order: Callable[[int], Order],
        orders: Orders,
    ) -> None:
        """A queue that is not built yet.

        Args:
            pages: the pages among which to look for those that qualify.
            qualifies: whether a page belongs into the queue now.
            order: a page's order now; no two pages have the same.
            orders: orders of many pages, first and second numbers apart.
        """
        self._pages = pages
        self._qualifies = qualifies
        self._order = order
        self._orders = orders
        self._heap: list[tuple[Order, int]] | None = None
        self._queued: set[int] = set()  # pages of the heap, once each
        self._bound: Order = _NONE  # pages beyond it may be missing

    def invalidate(self) -> None:
        """Forgets all orders, after they have changed at large."""
        self._heap = None
        self._queued.clear()

    def first(self) -> int | None:
        """The page of lowest order, or None. It stays queued as long as it qualifies."""
        heap = self._build(_BUILT) if self._heap is None else self._heap
        while True:
            if not heap or heap[0][0] > self._bound:
                if self._bound == _NONE:
                    return None
                heap = self._build(_BUILT) or self._build(None)
                continue
            order, page = heap[0]
            if not self._qualifies(page):
                heapq.heappop(heap)
                self._queued.remove(page)
            elif (grown := self._order(page)) > order:
                heapq.heapreplace(heap, (grown, page))
            else:
                return page

    def push(self, page: int) -> None:
        """Queues a page if it has come to qualify."""
        if self._heap is None or page in self._queued or not self._qualifies(page):
            return
        self._queued.add(page)
        heapq.heappush(self._heap, (self._order(page), page))

    def _build(self, most: int | None) -> list[tuple[Order, int]]:
        pages = self._pages()
        self._bound = _NONE
        if most is not None and len(pages) > most:
            pages = self._lowest(pages, most)
        heap = [(self._order(page), page) for page in pages.tolist() if self._qualifies(page)]
        heapq.heapify(heap)
        self._heap = heap
        self._queued = {page for _, page in heap}
        return heap

    def _lowest(
        self, pages: Int[np.ndarray, " pages"], count: int
    ) -> Int[np.ndarray, " some_pages"]:
        """The `count` pages of lowest order; sets the bound to the order of their last."""
        first, second = self._orders(pages)
        last = np.partition(first, count - 1)[count - 1]
        below, equal = first < last, np.flatnonzero(first == last)
        ties = second[equal]
        left = count - int(below.sum())
        last_tie = np.partition(ties, left - 1)[left - 1]
        self._bound = float(last), int(last_tie)
        return np.concatenate([pages[below], pages[equal[ties <= last_tie]]])


class EvictionQueues:
    """Heat of all pages, and the queues that follow from it.

    The expected loss of dropping a page is its heat, a decayed count of selections. Of pages
    equally hot the unreferenced go first, then those touched longest ago. A page started
    since heat was last measured counts as hotter than any that was.

    Attributes:
        coldest: droppable pages, least loss first; a DIRTY one is offloaded before it is dropped.
        coldest_dirty: those of them that are DIRTY.
        hottest_clean: CLEAN pages, hottest first.
        hottest_host: HOST pages that are referenced and have been selected, hottest first.
    """

    def __init__(
        self, states: PageStates, referenced: Callable[[], Bool[np.ndarray, " pages"]]
    ) -> None:
        """All pages cold.

        Args:
            states: bookkeeping of the pages.
            referenced: whether a sequence holds each page.
        """
        self._heat = np.zeros(states.num_pages, np.float32)
        self._begun: set[int] = set()  # since heat was last measured
        self._touched = np.zeros(states.num_pages, np.int64)  # when a page was last used
        self._clock = 0

        def loss(page: int) -> Order:
            tie = _REFERENCED * referenced().item(page) + self._touched.item(page)
            return self._heat.item(page), tie

        def losses(pages: Int[np.ndarray, " pages"]) -> tuple[np.ndarray, np.ndarray]:
            return self._heat[pages], _REFERENCED * referenced()[pages] + self._touched[pages]

        def hottest(page: int) -> Order:
            return -self._heat.item(page), -self._touched.item(page)

        def all_hottest(pages: Int[np.ndarray, " pages"]) -> tuple[np.ndarray, np.ndarray]:
            return -self._heat[pages], -self._touched[pages]

        def is_missed(page: int) -> bool:
            selected = states.state(page) is PageState.HOST and self._heat.item(page) > 0
            return selected and referenced().item(page)

        def selected_host() -> Int[np.ndarray, " pages"]:
            # Of long conversations that are idle, most pages have decayed to nothing.
            pages = states.pages_in(PageState.HOST)
            return pages[self._heat[pages] > 0]

        clean, dirty = PageState.CLEAN, PageState.DIRTY
        self.coldest = PageQueue(
            lambda: states.droppable_in(clean, dirty), states.is_droppable, loss, losses
        )
        self.coldest_dirty = PageQueue(
            lambda: states.droppable_in(dirty),
            lambda page: states.is_droppable(page) and states.state(page) is dirty,
            loss,
            losses,
        )
        self.hottest_clean = PageQueue(
            lambda: states.pages_in(clean),
            lambda page: states.state(page) is clean,
            hottest,
            all_hottest,
        )
        self.hottest_host = PageQueue(selected_host, is_missed, hottest, all_hottest)
        self._queues = (self.coldest, self.coldest_dirty, self.hottest_clean, self.hottest_host)

    def measure_heat(self) -> None:
        """Notes that the heat of all pages is measured now, and comes with `update_heat`."""
        self._begun.clear()

    def update_heat(self, heat: Float32[np.ndarray, " pages"]) -> None:
        """Replaces the heat of all pages but those started since it was measured.

        Raises:
            ValueError: there is not one for each page.
        """
        if len(heat) != len(self._heat):
            raise ValueError(f"heat has {len(heat)} pages, there are {len(self._heat)}")
        self._heat = heat.copy()
        self._heat[list(self._begun)] = math.inf
        for queue in self._queues:
            queue.invalidate()

    def begin(self, page: int) -> None:
        """Notes that an id is used anew: hot until measured."""
        self._heat[page] = math.inf
        self._begun.add(page)
        self.touch(page)

    def touch(self, page: int) -> None:
        """Makes a page the most recently used one."""
        self._clock += 1
        self._touched[page] = self._clock

    def push(self, page: int) -> None:
        """Queues a page wherever it has come to qualify."""
        for queue in self._queues:
            queue.push(page)
