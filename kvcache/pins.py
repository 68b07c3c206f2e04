"""Pages of running sequences that stay on the device."""

from collections.abc import Sequence

from kvcache.geometry import KVGeometry
from kvcache.running_sequences import SequencePages
from kvcache.tiers.page_states import PageState
from kvcache.tiers.residency import Residency


class Pins:
    """Pins the newest full page of each sequence, or all where steps read none in host memory.

    Args:
        geometry: sizes of a store with a host tier.
        residency: where pages lie.
    """

    def __init__(self, geometry: KVGeometry, residency: Residency) -> None:
        self._all = not geometry.reads_host
        self._residency = residency

    def bring_back(self, sequence: SequencePages) -> None:
        """Onloads and pins all pages of a sequence that starts, where steps read no host pages."""
        if not self._all:
            return
        self.add(sequence, *sequence.pages)
        for page in sequence.pages:
            if self._residency.states.state(page) is PageState.HOST:
                self._residency.onload(page)

    def keep(self, sequence: SequencePages, pages: Sequence[int]) -> None:
        """Pins pages that are full now, or the last of them in place of the one before."""
        if not self._all:
            self.release(sequence)
            pages = pages[-1:]
        self.add(sequence, *pages)

    def drop(self, sequence: SequencePages, page: int) -> bool:
        """Takes a page's pin away; whether it had one."""
        if page not in sequence.pinned:
            return False
        sequence.pinned.remove(page)
        self._residency.unpin(page)
        return True

    def release(self, sequence: SequencePages) -> None:
        """Takes all pins of a sequence away."""
        for page in sequence.pinned:
            self._residency.unpin(page)
        sequence.pinned.clear()

    def add(self, sequence: SequencePages, *pages: int) -> None:
        """Pins pages."""
        for page in pages:
            self._residency.pin(page)
        sequence.pinned += pages
