"""Queue of page moves, launched on the device in lists of fixed size."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32


class MoveList(NamedTuple):
    """Moves of one launch, padded with -1; each list holds (from, to) pairs.

    The device executes the lists in the order of the fields. Within a list no move reads or
    overwrites what another writes, so their order there does not matter.

    Attributes:
        offloads: int32 [n, 2], device page to host page.
        onloads: int32 [n, 2], host page to device page.
        copies: int32 [n, 2], device page to device page.
        key_copies: int32 [n, 2], page to page: index keys.
        maps: int32 [4n, 3], page and its new device page and host page, -1 for none.
    """

    offloads: Int32[np.ndarray, "n 2"]
    onloads: Int32[np.ndarray, "n 2"]
    copies: Int32[np.ndarray, "n 2"]
    key_copies: Int32[np.ndarray, "n 2"]
    maps: Int32[np.ndarray, "maps 3"]


class PageMoves:
    """Queues moves and launches them with the effect of executing them one by one.

    A launch executes all offloads, then all onloads, then all copies, then all key copies, then the
    changes of the maps. A move that this order would carry past one that it conflicts with (one of
    the two writes what the other reads or writes) launches what is queued before it. Such are:

    - an offload after an onload from its host page or into its device page, after a copy into its
      device page, or after an offload to its host page;
    - an onload after an onload into its device page, or a copy from or into it;
    - a copy after a copy into its source, or from or into its target; key copies likewise.

    Maps are read by steps only, and whoever launches a step, or writes rows by other means, flushes
    first: of several changes of a page the last one counts, and a launch may come before the maps
    that belong to its moves are queued.

    Attributes:
        pages_queued_to_offload: offloads queued so far.
        pages_queued_to_onload: onloads queued so far.
        pages_copied: copies queued so far, index keys not counted.
    """

    def __init__(self, launch: Callable[[MoveList], None], size: int) -> None:
        """An empty queue.

        Args:
            launch: executes a list on the device.
            size: moves of each kind a launch, and a quarter of its map changes.

        Raises:
            ValueError: `size` is not positive.
        """
        if size < 1:
            raise ValueError(f"size must be positive, got {size}")
        self._launch = launch
        self._size = size
        # By target, which is what no two moves of a list may share.
        self._offloads: dict[int, int] = {}
        self._onloads: dict[int, int] = {}
        self._copies: dict[int, int] = {}
        self._key_copies: dict[int, int] = {}
        self._maps: dict[int, tuple[int, int]] = {}
        self.pages_queued_to_offload = 0
        self.pages_queued_to_onload = 0
        self.pages_copied = 0

    def offload(self, device_page_index: int, host_page_index: int) -> None:
        """Queues a copy of a device page's rows to a host page.

        Raises:
            ValueError: a page index is negative.
        """
        conflict = (
            host_page_index in self._onloads.values()
            or device_page_index in self._onloads
            or device_page_index in self._copies
        )
        self._queue(self._offloads, device_page_index, host_page_index, conflict)
        self.pages_queued_to_offload += 1

    def onload(self, host_page_index: int, device_page_index: int) -> None:
        """Queues a copy of a host page's rows to a device page.

        Raises:
            ValueError: a page index is negative.
        """
        conflict = device_page_index in self._copies or device_page_index in self._copies.values()
        self._queue(self._onloads, host_page_index, device_page_index, conflict)
        self.pages_queued_to_onload += 1

    def copy(self, source: int, target: int) -> None:
        """Queues a copy of a device page's rows to another device page.

        Raises:
            ValueError: a page index is negative, or they are the same.
        """
        self._queue(self._copies, source, target, self._chained(self._copies, source, target))
        self.pages_copied += 1

    def copy_keys(self, source: int, target: int) -> None:
        """Queues a copy of a page's index keys to another page.

        Raises:
            ValueError: a page is negative, or they are the same.
        """
        conflict = self._chained(self._key_copies, source, target)
        self._queue(self._key_copies, source, target, conflict)

    def map_page(self, page: int, device_page_index: int, host_page_index: int) -> None:
        """Queues a page's new indices, -1 for none, instead of any queued before.

        Raises:
            ValueError: `page` is negative.
        """
        if page < 0:
            raise ValueError(f"page must not be negative, got {page}")
        if page not in self._maps and len(self._maps) == 4 * self._size:
            self.flush()
        self._maps[page] = (device_page_index, host_page_index)

    def flush(self) -> None:
        """Launches what is queued, if anything."""
        kinds = (self._offloads, self._onloads, self._copies, self._key_copies)
        if any(kinds) or self._maps:
            self.launch()

    def launch(self) -> None:
        """Launches what is queued, also if that is nothing."""
        kinds = (self._offloads, self._onloads, self._copies, self._key_copies)
        maps = np.full((4 * self._size, 3), -1, np.int32)
        if self._maps:
            maps[: len(self._maps)] = [(page, *indices) for page, indices in self._maps.items()]
        moves = MoveList(*(self._pairs(moves) for moves in kinds), maps=maps)
        for queued in (*kinds, self._maps):
            queued.clear()
        self._launch(moves)

    def _queue(self, moves: dict[int, int], source: int, target: int, conflict: bool) -> None:
        if min(source, target) < 0:
            raise ValueError(f"a move needs two page indices, got {source} and {target}")
        if conflict or target in moves or len(moves) == self._size:
            self.flush()
        moves[target] = source

    @staticmethod
    def _chained(moves: Mapping[int, int], source: int, target: int) -> bool:
        if source == target:
            raise ValueError(f"{source} cannot be copied onto itself")
        return source in moves or target in moves.values()

    def _pairs(self, moves: Mapping[int, int]) -> Int32[np.ndarray, "n 2"]:
        pairs = np.full((self._size, 2), -1, np.int32)
        if moves:
            pairs[: len(moves)] = [(source, target) for target, source in moves.items()]
        return pairs
