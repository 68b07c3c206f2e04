"""Page ids: which are free, how often each is referenced, and which the prefix index keeps."""

from collections.abc import Callable, Collection

import numpy as np
from jaxtyping import Bool

_FREE = -1  # in place of a reference count


class OutOfPagesError(RuntimeError):
    """Fewer pages are free, in all or on the device, than were asked for.

    Attributes:
        missing: how many more there would have to be at least, 0 if that is not known.
    """

    def __init__(self, message: str, missing: int = 0) -> None:
        super().__init__(message)
        self.missing = missing


class PagePool:
    """Reference counts of pages.

    A held page is referenced (count above 0), cached (kept by the prefix index), or both; a page
    that is neither is free. Ids are taken in ascending order and reused last freed first.
    """

    def __init__(self, num_pages: int, on_free: Callable[[int], None]) -> None:
        """Frees every id.

        Args:
            num_pages: number of ids.
            on_free: called with a page whose last holder gives it up, just before its id is free.
        """
        self._num_pages = num_pages
        self._on_free = on_free
        self._free = list(range(num_pages - 1, -1, -1))
        self._references = [_FREE] * num_pages
        self._referenced = bytearray(num_pages)  # 1 if there are any, for numpy
        self._cached: set[int] = set()
        self._num_cached_only = 0

    @property
    def num_free(self) -> int:
        """Pages that can be allocated now."""
        return len(self._free)

    @property
    def num_cached_only(self) -> int:
        """Cached pages without references."""
        return self._num_cached_only

    def references(self, page: int) -> int:
        """Reference count of a page, 0 if it is free or no page."""
        return max(self._references[page], 0) if 0 <= page < self._num_pages else 0

    def num_unreferenced(self, pages: Collection[int]) -> int:
        """Number of these pages without references."""
        return len(pages) - sum(self._referenced[page] for page in pages)

    @property
    def referenced(self) -> Bool[np.ndarray, " pages"]:
        """Whether each page has references; a view of the counts."""
        return np.frombuffer(self._referenced, np.bool_)

    def is_cached(self, page: int) -> bool:
        """Whether the prefix index keeps the page."""
        return page in self._cached

    def allocate(self, count: int) -> list[int]:
        """Takes `count` pages, each with one reference.

        Raises:
            OutOfPagesError: fewer are free; nothing is taken.
        """
        if count > self.num_free:
            raise OutOfPagesError(f"{count} pages wanted, {self.num_free} free")
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._references[page] = self._referenced[page] = 1
        return pages

    def acquire(self, page: int) -> None:
        """Adds a reference to a held page.

        Raises:
            ValueError: the page is free.
        """
        self._check_held(page)
        if self._references[page] == 0:
            self._num_cached_only -= 1
            self._referenced[page] = 1
        self._references[page] += 1

    def release(self, page: int) -> None:
        """Takes a reference away; the last one of a page that is not cached frees it.

        Raises:
            ValueError: the page is free or not referenced.
        """
        self._check_held(page)
        if self._references[page] == 0:
            raise ValueError(f"page {page} is released more often than referenced")
        if self._references[page] == 1 and page not in self._cached:
            self._make_free(page)
            return
        self._references[page] -= 1
        if self._references[page] == 0:
            self._num_cached_only += 1
            self._referenced[page] = 0

    def cache(self, page: int) -> None:
        """Keeps a held page beyond its last reference.

        Raises:
            ValueError: the page is free or already cached.
        """
        self._check_held(page)
        if page in self._cached:
            raise ValueError(f"page {page} is already cached")
        self._cached.add(page)

    def uncache(self, page: int) -> None:
        """Drops a page from the cached ones, which frees it if it has no references.

        Raises:
            ValueError: the page is not cached.
        """
        if page not in self._cached:
            raise ValueError(f"page {page} is not cached")
        if self._references[page] == 0:
            self._make_free(page)
            self._num_cached_only -= 1
        self._cached.remove(page)

    def check_integrity(self) -> None:
        """Proves that every id is either free or held, and held for a reason.

        Raises:
            AssertionError: naming the ids that are not.
        """
        counts = self._references
        free = [page for page, count in enumerate(counts) if count == _FREE]
        assert sorted(self._free) == free, f"free pages listed: {sorted(self._free)}, are {free}"
        assert min(counts, default=0) >= _FREE, f"page references below 0: {counts}"
        marked = [page for page in range(self._num_pages) if self._referenced[page]]
        held = [page for page, count in enumerate(counts) if count > 0]
        assert marked == held, f"pages marked as referenced: {marked}, are {held}"
        unused = {page for page, count in enumerate(counts) if count == 0}
        assert unused <= self._cached, f"pages lost: {sorted(unused - self._cached)}"
        ghosts = self._cached.intersection(free)
        assert not ghosts, f"free pages are cached: {sorted(ghosts)}"
        counted = self._num_cached_only
        assert counted == len(unused), f"{counted} pages counted as cached only, not {len(unused)}"

    def _check_held(self, page: int) -> None:
        if not 0 <= page < self._num_pages or self._references[page] == _FREE:
            raise ValueError(f"page {page} is not held")

    def _make_free(self, page: int) -> None:
        self._on_free(page)
        self._references[page] = _FREE
        self._referenced[page] = 0
        self._free.append(page)
