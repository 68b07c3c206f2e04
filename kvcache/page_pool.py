"""The host's account of pages: which ids are free, and where their rows lie on the device."""

from collections.abc import Sequence

from kvcache.geometry import KVGeometry


class OutOfPagesError(RuntimeError):
    """The pool has fewer free pages than were asked for."""


class PagePool:
    """Hands out page ids, each with a page of the device slab.

    A page id and its device page are numbered independently: ids are taken in ascending order,
    device pages from the end of the slab.
    """

    def __init__(self, geometry: KVGeometry) -> None:
        self._num_pages = geometry.num_pages
        self._num_device_pages = geometry.device_pages
        self._free_pages = list(range(geometry.num_pages - 1, -1, -1))
        self._free_device_pages = list(range(geometry.device_pages))
        self._device_page: dict[int, int] = {}

    @property
    def num_free(self) -> int:
        """Pages that can be allocated now."""
        return min(len(self._free_pages), len(self._free_device_pages))

    def allocate(self, count: int) -> list[int]:
        """Takes `count` pages.

        Raises:
            OutOfPagesError: fewer are free; nothing is taken.
        """
        if count > self.num_free:
            raise OutOfPagesError(f"{count} pages wanted, {self.num_free} free")
        pages = [self._free_pages.pop() for _ in range(count)]
        for page in pages:
            self._device_page[page] = self._free_device_pages.pop()
        return pages

    def release(self, pages: Sequence[int]) -> None:
        """Returns pages to the pool.

        Raises:
            ValueError: a page is not allocated, or named twice; nothing is returned.
        """
        if len(set(pages)) != len(pages):
            raise ValueError(f"pages released twice: {sorted(pages)}")
        unknown = [page for page in pages if page not in self._device_page]
        if unknown:
            raise ValueError(f"pages not allocated: {unknown}")
        for page in pages:
            self._free_device_pages.append(self._device_page.pop(page))
            self._free_pages.append(page)

    def device_page(self, page: int) -> int:
        """Where an allocated page's rows lie in the slab."""
        return self._device_page[page]

    def check_integrity(self) -> None:
        """Proves that every page and every device page is either free or held, once.

        Raises:
            AssertionError: naming what is lost or held twice.
        """
        pages = sorted(self._free_pages + list(self._device_page))
        assert pages == list(range(self._num_pages)), f"page ids lost or doubled: {pages}"
        places = sorted(self._free_device_pages + list(self._device_page.values()))
        assert places == list(range(self._num_device_pages)), f"device pages lost: {places}"
