"""Cached prefixes out of a cache and into one, a few pages at a time."""

from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Shaped

from kvcache.device.device_state import DeviceState
from kvcache.geometry import KVGeometry
from kvcache.kv_cache import KVCache
from kvcache.prefix.file import Block
from kvcache.prefix.index import PrefixMatch

_PAGES_A_BLOCK = 4


def export_prefix(cache: KVCache[DeviceState], token_ids: Sequence[int]) -> Iterator[Block]:
    """Rows and index keys of a cached prefix in position order, whatever tier they lie in.

    Yields:
        MLA rows [tokens, layers, width] and index keys [tokens, index_layers, width].

    Raises:
        ValueError: not all of these tokens are cached.
    """
    found = cache.index.match(token_ids, len(token_ids))
    if found.num_tokens < len(token_ids):
        raise ValueError(f"{found.num_tokens} of {len(token_ids)} tokens are cached")
    pages = [*found.pages, *([found.partial[0]] if found.partial else [])]
    cache.moves.flush()
    left = len(token_ids)
    for start in range(0, len(pages), _PAGES_A_BLOCK):
        some = np.full(_PAGES_A_BLOCK, -1, np.int32)
        some[: len(pages) - start] = pages[start : start + _PAGES_A_BLOCK]
        rows, keys = (from_pages(cache.geometry, array)[:left] for array in cache.device.read(some))
        left -= len(rows)
        yield rows, keys


def to_pages(
    geometry: KVGeometry, rows: Shaped[np.ndarray, "tokens layers width"]
) -> Shaped[np.ndarray, "pages rows_per_page layers width"]:
    """Rows in position order, whole pages of them, in the order of a page; see `page_row`."""
    paged = rows.reshape(-1, geometry.rows_per_device, geometry.num_devices, *rows.shape[1:])
    return paged.swapaxes(1, 2).reshape(-1, geometry.rows_per_page, *rows.shape[1:])


def from_pages(
    geometry: KVGeometry, pages: Shaped[np.ndarray, "pages rows_per_page layers width"]
) -> Shaped[np.ndarray, "tokens layers width"]:
    """The inverse of `to_pages`."""
    rows = pages.reshape(-1, geometry.num_devices, geometry.rows_per_device, *pages.shape[2:])
    return rows.swapaxes(1, 2).reshape(-1, *pages.shape[2:])


class PrefixImport:
    """Rows of a prefix in flight into a cache. Several may be in flight at once.

    Ends with `finish`, after which prompts that begin with the prefix find it, or with `abort`,
    which leaves no trace; as a context manager it aborts what is not finished.

    Args:
        cache: the cache.
        token_ids: tokens of the prefix.

    Raises:
        OutOfPagesError: the cache has too few unused pages.
    """

    def __init__(self, cache: KVCache, token_ids: Sequence[int]) -> None:
        self._cache, self._token_ids = cache, list(token_ids)
        self._pages = cache.hold_pages(cache.geometry.pages_for(len(token_ids)))
        self._written = 0  # pages
        self._waiting: list[Block] = []
        self._num_waiting = 0  # tokens

    def __enter__(self) -> "PrefixImport":
        return self

    def __exit__(self, *_: object) -> None:
        if self._pages:
            self.abort()

    def write(
        self,
        rows: Shaped[np.ndarray, "tokens layers width"],
        keys: Shaped[np.ndarray, "tokens index_layers index_width"],
    ) -> None:
        """Takes the next rows in position order.

        Raises:
            OutOfPagesError: neither tier has a page that can be freed.
        """
        self._waiting.append((rows, keys))
        self._num_waiting += len(rows)
        block = _PAGES_A_BLOCK * self._cache.geometry.rows_per_page
        if self._num_waiting >= block:
            self._write_waiting(self._num_waiting // block * block)

    def finish(self) -> None:
        """Makes the prefix known to prompts.

        Raises:
            ValueError: rows of some tokens were not written.
        """
        rows_per_page = self._cache.geometry.rows_per_page
        missing = len(self._token_ids) - self._written * rows_per_page - self._num_waiting
        if missing:
            raise ValueError(f"rows of {missing} tokens are missing")
        self._write_waiting(self._num_waiting)
        cache, pages = self._cache, self._pages
        now = cache.tick()
        publication = cache.index.acquire(PrefixMatch(), now)
        count = len(self._token_ids)
        cache.index.publish(publication, self._token_ids, pages, count, now, partial=True)
        self._pages = []
        cache.release_held(pages, due=now)

    def abort(self) -> None:
        """Gives the pages back."""
        pages, self._pages = self._pages, []
        self._cache.release_held(pages, due=None)

    def _write_waiting(self, count: int) -> None:
        """Writes the first `count` waiting tokens, the last page padded."""
        geometry = self._cache.geometry
        arrays = [np.concatenate(parts) for parts in zip(*self._waiting, strict=True)]
        self._waiting = [(arrays[0][count:], arrays[1][count:])]
        self._num_waiting -= count
        block = _PAGES_A_BLOCK * geometry.rows_per_page
        for start in range(0, count, block):
            some = [array[start : min(start + block, count)] for array in arrays]
            num_pages = geometry.pages_for(len(some[0]))
            padding = block - len(some[0])
            rows, keys = (
                to_pages(geometry, np.pad(array, ((0, padding), (0, 0), (0, 0)))) for array in some
            )
            pages = self._pages[self._written : self._written + num_pages]
            self._fill(pages, rows, keys)
            self._written += num_pages

    def _fill(
        self,
        pages: Sequence[int],
        rows: Shaped[np.ndarray, "max_pages rows_per_page layers width"],
        keys: Shaped[np.ndarray, "max_pages rows_per_page index_layers index_width"],
    ) -> None:
        """Writes pages, to the device while there is room to spare and else to the host."""
        geometry, residency = self._cache.geometry, self._cache.residency
        spare = geometry.device_pages // 4
        for page in pages:
            to_device = residency.states.num_free_device > spare or not geometry.has_host_tier
            residency.begin_import(page, to_device)
        self._cache.moves.flush()
        listed = np.full(len(rows), -1, np.int32)
        listed[: len(pages)] = pages
        self._cache.device.write(listed, rows, keys)
        for page in pages:
            residency.end_import(page)
