"""Pages of the sequences that run: the page table of each, and who reads which page."""

import dataclasses
from collections.abc import Collection, Mapping, Sequence, Set

from kvcache.counters import CacheCounters
from kvcache.geometry import KVGeometry
from kvcache.prefix.index import Publication


@dataclasses.dataclass(eq=False, slots=True)
class SequencePages:
    """Page table of a running sequence.

    Attributes:
        token_ids: tokens of its full pages.
        pages: its pages in order.
        reserved_pages: pages reserved for it in all.
        publication: its progress in the prefix index; None if its pages are not published.
        pinned: its sealed pages that stay on the device.
        counters: what is counted on the host.
    """

    token_ids: list[int]
    pages: list[int]
    reserved_pages: int
    publication: Publication | None
    pinned: list[int]
    counters: CacheCounters

    @property
    def outstanding(self) -> int:
        """Pages that are still reserved for it."""
        return max(self.reserved_pages - len(self.pages), 0)


class RunningSequences:
    """Page tables of the sequences in numbered slots.

    Args:
        geometry: sizes of the store.
    """

    def __init__(self, geometry: KVGeometry) -> None:
        self._geometry, self._rows_per_page = geometry, geometry.rows_per_page
        self._running: dict[int, SequencePages] = {}
        # What a step looks at of all slots, close together in memory: the rows of a sequence's
        # pages that are not computed, and the tokens after its full pages.
        self._rows_left = [0] * geometry.max_sequences
        self._new_tokens: list[list[int]] = [[] for _ in range(geometry.max_sequences)]
        self._readers: dict[int, set[int]] = {}  # page to the slots that read it

    def __getitem__(self, slot: int) -> SequencePages:
        return self._running[slot]

    @property
    def slots(self) -> Set[int]:
        """Slots with a sequence."""
        return self._running.keys()

    @property
    def sequences(self) -> Collection[SequencePages]:
        """All of them."""
        return self._running.values()

    def length(self, slot: int) -> int:
        """Tokens of a sequence whose rows are computed."""
        return len(self._running[slot].token_ids) + len(self._new_tokens[slot])

    def new_tokens(self, slot: int) -> Sequence[int]:
        """Tokens of a sequence after its full pages."""
        return self._new_tokens[slot]

    def readers(self, page: int) -> Set[int]:
        """Slots whose sequences read a page."""
        return self._readers.get(page, set())

    def open(self, slot: int, sequence: SequencePages, new_tokens: Sequence[int]) -> None:
        """Takes a sequence.

        Args:
            slot: its slot, which is free.
            sequence: its page table.
            new_tokens: tokens after its full pages whose rows will be on its next page.
        """
        self._running[slot] = sequence
        self._new_tokens[slot][:] = new_tokens
        self._rows_left[slot] = len(sequence.pages) * self._rows_per_page - self.length(slot)
        for page in sequence.pages:
            self._readers.setdefault(page, set()).add(slot)

    def close(self, slot: int) -> None:
        """Forgets a sequence."""
        for page in self._running.pop(slot).pages:
            readers = self._readers[page]
            readers.discard(slot)
            if not readers:
                del self._readers[page]

    def missing_pages(self, rows: Mapping[int, int]) -> list[tuple[int, int]]:
        """By slot, how many pages those sequences lack whose last page has no room for a step.

        Args:
            rows: how many rows the step appends, by slot.
        """
        rows_left = self._rows_left
        return [
            (slot, self._geometry.pages_for(count - rows_left[slot]))
            for slot, count in rows.items()
            if count > rows_left[slot]
        ]

    def add_page(self, slot: int, page: int) -> None:
        """Appends a page that no other sequence reads."""
        self._readers[page] = {slot}
        self._running[slot].pages.append(page)
        self._rows_left[slot] += self._rows_per_page

    def replace_page(self, slot: int, index: int, page: int) -> None:
        """Puts another's page in place of a sequence's own."""
        pages = self._running[slot].pages
        del self._readers[pages[index]]
        pages[index] = page
        self._readers.setdefault(page, set()).add(slot)

    def append(self, slot: int, token_ids: Sequence[int]) -> bool:
        """Appends tokens whose rows are computed; whether they fill a page."""
        new_tokens = self._new_tokens[slot]
        new_tokens += token_ids
        self._rows_left[slot] -= len(token_ids)
        return len(new_tokens) >= self._rows_per_page

    def fill_pages(self, slot: int) -> list[int]:
        """Moves the new tokens of full pages to the sequence; returns those pages."""
        new_tokens, sequence = self._new_tokens[slot], self._running[slot]
        filled = len(sequence.token_ids) // self._rows_per_page
        num_full = len(new_tokens) // self._rows_per_page * self._rows_per_page
        sequence.token_ids += new_tokens[:num_full]
        del new_tokens[:num_full]
        return sequence.pages[filled : len(sequence.token_ids) // self._rows_per_page]

    def check_integrity(self, references: Mapping[int, int]) -> None:
        """Proves that lengths, tokens and readers agree with the page tables.

        Args:
            references: references of the pages that have any.

        Raises:
            AssertionError: naming what does not.
        """
        held: dict[int, int] = {}
        for slot, sequence in self._running.items():
            for page in sequence.pages:
                held[page] = held.get(page, 0) + 1
                assert slot in self.readers(page), f"page {page} does not know slot {slot}"
            left = len(sequence.pages) * self._rows_per_page - self.length(slot)
            assert self._rows_left[slot] == left, f"slot {slot} has {left} rows left"
            assert len(sequence.token_ids) % self._rows_per_page == 0, f"slot {slot}: half a page"
            assert len(self._new_tokens[slot]) < self._rows_per_page, f"slot {slot} lacks a page"
        assert held.keys() == self._readers.keys(), "pages that no sequence has are read"
        assert held == references, f"pages have references {references}, should have {held}"
