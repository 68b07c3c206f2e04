"""States of pages, their indices in both tiers, and their pins."""

import enum
from collections.abc import Iterable, Mapping

import numpy as np
from jaxtyping import Int

from kvcache.tiers.free_list import FreeList

NO_PAGE_INDEX = -1


class PageState(enum.IntEnum):
    """State of a page.

    FREE: the id is unused. TAIL: being written, on the device. DIRTY: sealed (its confirmed rows
    never change again), only on the device. CLEAN: sealed, on the device and the host. HOST:
    sealed, only on the host. IMPORTING: its rows are being loaded, on the device or the host.
    """

    FREE = 0
    TAIL = 1
    DIRTY = 2
    CLEAN = 3
    HOST = 4
    IMPORTING = 5


_STATES = tuple(PageState)
_PINNED = 8  # added to the state of a pinned page
_USED = frozenset(PageState) - {PageState.FREE}

# The states in which each operation is allowed.
ALLOWED: Mapping[str, frozenset[PageState]] = {
    "start": frozenset({PageState.FREE}),
    "copy": _USED - {PageState.IMPORTING},
    "seal": frozenset({PageState.TAIL}),
    "offload": frozenset({PageState.DIRTY}),
    "drop": frozenset({PageState.CLEAN}),
    "drop the host copy of": frozenset({PageState.CLEAN}),
    "onload": frozenset({PageState.HOST}),
    "begin to import": frozenset({PageState.FREE}),
    "end the import of": frozenset({PageState.IMPORTING}),
    "pin": _USED,
    "forget": frozenset(PageState),
}

# Whether a page of each state lies on the device, and on the host.
_TIERS: Mapping[PageState, tuple[tuple[bool, bool], ...]] = {
    PageState.FREE: ((False, False),),
    PageState.TAIL: ((True, False),),
    PageState.DIRTY: ((True, False),),
    PageState.CLEAN: ((True, True),),
    PageState.HOST: ((False, True),),
    PageState.IMPORTING: ((True, False), (False, True)),
}


class PageStates:
    """States, page indices and pins of all pages.

    A page is droppable if it is sealed, on the device and not pinned. `Residency` alone changes
    states and indices.
    """

    def __init__(self, free_device: FreeList, free_host: FreeList) -> None:
        """All pages FREE.

        Args:
            free_device: indices of the device pages, all free.
            free_host: indices of the host pages, all free.
        """
        num_pages = len(free_device) + len(free_host)
        self._free_device, self._free_host = free_device, free_host
        # A byte a page, its state and whether it is pinned: numpy searches all of them at once.
        self._codes = bytearray(num_pages)
        self._counts = [0] * 2 * _PINNED  # pages by code
        self._counts[PageState.FREE] = num_pages
        self._device_page_index = [NO_PAGE_INDEX] * num_pages
        self._host_page_index = [NO_PAGE_INDEX] * num_pages
        self._pins: dict[int, int] = {}

    @property
    def num_pages(self) -> int:
        """Page ids."""
        return len(self._codes)

    @property
    def num_free_device(self) -> int:
        """Device pages that nothing holds."""
        return len(self._free_device)

    @property
    def num_free_host(self) -> int:
        """Host pages that nothing holds."""
        return len(self._free_host)

    @property
    def num_droppable(self) -> int:
        """Pages that are sealed, on the device and not pinned."""
        return self._counts[PageState.CLEAN] + self._counts[PageState.DIRTY]

    @property
    def num_unevictable(self) -> int:
        """Pages that cannot leave the device: TAIL, and those that are pinned there."""
        pinned = self._counts[PageState.CLEAN + _PINNED] + self._counts[PageState.DIRTY + _PINNED]
        return self.count(PageState.TAIL) + pinned

    @property
    def room(self) -> int:
        """Device pages that are free, or can be with no page evicted and no lease revoked."""
        return self.room_after(0)

    def room_after(self, evictions: int) -> int:
        """Device pages that are free, or can be after so many evictions, with no lease revoked."""
        host_room = self.num_free_host + self.count(PageState.CLEAN)
        return self.num_free_device + min(self.num_droppable, host_room + evictions)

    def state(self, page: int) -> PageState:
        """State of a page."""
        return _STATES[self._codes[page] % _PINNED]

    def device_page_index(self, page: int) -> int:
        """The page's index in the device slab, or -1."""
        return self._device_page_index[page]

    def host_page_index(self, page: int) -> int:
        """The page's index in the host slab, or -1."""
        return self._host_page_index[page]

    def count(self, state: PageState) -> int:
        """Number of pages in a state."""
        return self._counts[state] + self._counts[state + _PINNED]

    def pages_in(self, state: PageState) -> Int[np.ndarray, " pages"]:
        """The pages in a state, ascending."""
        return self._with_codes(state, state + _PINNED)

    def num_droppable_in(self, state: PageState) -> int:
        """Number of droppable pages that are CLEAN, or DIRTY."""
        return self._counts[state]

    def droppable_in(self, *states: PageState) -> Int[np.ndarray, " pages"]:
        """The droppable pages that are CLEAN, or DIRTY, or either, ascending."""
        return self._with_codes(*states)

    def is_droppable(self, page: int) -> bool:
        """Whether the page is sealed, on the device and not pinned."""
        return self._codes[page] in (PageState.CLEAN, PageState.DIRTY)

    def is_pinned(self, page: int) -> bool:
        """Whether a page has a pin."""
        return page in self._pins

    def pin(self, page: int) -> None:
        """Adds a pin to a page.

        Raises:
            ValueError: the page is FREE.
        """
        self.check(page, "pin")
        self._pins[page] = self._pins.get(page, 0) + 1
        self._recode(page, self.state(page))

    def unpin(self, page: int) -> None:
        """Takes a pin away.

        Raises:
            ValueError: the page is not pinned.
        """
        if page not in self._pins:
            raise ValueError(f"page {page} is not pinned")
        self._pins[page] -= 1
        if not self._pins[page]:
            del self._pins[page]
            self._recode(page, self.state(page))

    def check(self, page: int, operation: str) -> None:
        """Checks that an operation of `ALLOWED` may be done to a page.

        Raises:
            ValueError: there is no such page, its state does not allow it, or it is pinned and
                would leave the device or be forgotten.
        """
        if not 0 <= page < self.num_pages:
            raise ValueError(f"page {page} is not in 0 to {self.num_pages - 1}")
        state = self.state(page)
        if state not in ALLOWED[operation]:
            raise ValueError(f"cannot {operation} page {page}: it is {state.name}")
        if operation in ("drop", "forget") and page in self._pins:
            raise ValueError(f"cannot {operation} page {page}: it is pinned")

    def move(
        self, page: int, state: PageState, device_page_index: int, host_page_index: int
    ) -> bool:
        """Gives a page a state and indices; those it had before and no longer has become free.

        The new ones are the caller's, taken from the free lists. Returns whether an index changed.
        """
        old_device, old_host = self._device_page_index[page], self._host_page_index[page]
        if old_device not in (device_page_index, NO_PAGE_INDEX):
            self._free_device.give_back(old_device)
        if old_host not in (host_page_index, NO_PAGE_INDEX):
            self._free_host.give_back(old_host)
        self._device_page_index[page], self._host_page_index[page] = (
            device_page_index,
            host_page_index,
        )
        self._recode(page, state)
        return (old_device, old_host) != (device_page_index, host_page_index)

    def _with_codes(self, *wanted: int) -> Int[np.ndarray, " pages"]:
        codes = np.frombuffer(self._codes, np.uint8)
        return np.flatnonzero(np.logical_or.reduce([codes == code for code in wanted]))

    def _recode(self, page: int, state: PageState) -> None:
        code = state + _PINNED * (page in self._pins)
        self._counts[self._codes[page]] -= 1
        self._counts[code] += 1
        self._codes[page] = code

    def check_integrity(self, leased: Iterable[int]) -> None:
        """Proves that every index is free, leased or one page's, and that states agree with them.

        Args:
            leased: device pages on lease.

        Raises:
            AssertionError: naming what does not.
        """
        device = [index for index in self._device_page_index if index != NO_PAGE_INDEX]
        self._free_device.check_integrity([*leased, *device])
        self._free_host.check_integrity(
            index for index in self._host_page_index if index != NO_PAGE_INDEX
        )
        for page, code in enumerate(self._codes):
            state = self.state(page)
            tiers = (
                self._device_page_index[page] != NO_PAGE_INDEX,
                self._host_page_index[page] != NO_PAGE_INDEX,
            )
            assert tiers in _TIERS[state], f"page {page} is {state.name}, but in tiers {tiers}"
            marked = bool(code & _PINNED)
            assert marked == (page in self._pins), f"page {page} is marked as pinned: {marked}"
        for page, pins in self._pins.items():
            assert pins > 0 and self.state(page) in _USED, f"page {page} has {pins} pins"
        counts = [self._codes.count(code) for code in range(2 * _PINNED)]
        assert self._counts == counts, f"pages counted by code: {self._counts}, are {counts}"
