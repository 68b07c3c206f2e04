from collections import Counter

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvcache import CacheCounters, KVGeometry
from kvcache.running_sequences import RunningSequences, SequencePages
from pallas_kernels.common.row_format import RowFormat

SLOTS, ROWS = 3, 4
SIZES = KVGeometry(
    group_layers=(1,),
    device_pages=8,
    num_devices=2,
    rows_per_device=ROWS // 2,
    max_sequences=SLOTS,
    max_pages_per_sequence=8,
    row_format=RowFormat("float32", 1, 0, 1.0),
    index_row_format=RowFormat("float32", 1, 0, 1.0),
)


def page_table(pages: list[int], token_ids: list[int]) -> SequencePages:
    return SequencePages(token_ids, pages, len(pages), None, [], CacheCounters())


class RunningMachine(RuleBasedStateMachine):
    """Drives page tables beside lists of pages and of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.running = RunningSequences(SIZES)
        self.pages: dict[int, list[int]] = {}
        self.tokens: dict[int, list[int]] = {}
        self.num_pages = 0

    def new_page(self) -> int:
        self.num_pages += 1
        return self.num_pages

    @precondition(lambda self: len(self.pages) < SLOTS)
    @rule(shared=st.integers(0, 3))
    def open(self, shared: int) -> None:
        slot = next(slot for slot in range(SLOTS) if slot not in self.pages)
        donor = next(iter(self.pages), None)
        pages = [] if donor is None else self.pages[donor][:shared]
        known = [] if donor is None else self.tokens[donor][: len(pages) * ROWS]
        pages = pages[: len(known) // ROWS]
        known = known[: len(pages) * ROWS]
        self.running.open(slot, page_table(list(pages), list(known)), [])
        self.pages[slot], self.tokens[slot] = list(pages), list(known)

    @precondition(lambda self: self.pages)
    @rule(data=st.data(), count=st.integers(1, 9))
    def step(self, data: st.DataObject, count: int) -> None:
        """Adds what pages a step lacks, and appends its tokens."""
        slot = data.draw(st.sampled_from(sorted(self.pages)))
        needed = -(-(len(self.tokens[slot]) + count) // ROWS) - len(self.pages[slot])
        missing = self.running.missing_pages({slot: count})
        assert missing == ([(slot, needed)] if needed > 0 else [])
        for _ in range(max(needed, 0)):
            self.pages[slot].append(self.new_page())
            self.running.add_page(slot, self.pages[slot][-1])
        full = len(self.tokens[slot]) // ROWS
        self.tokens[slot] += range(count)
        if self.running.append(slot, list(range(count))):
            filled = self.running.fill_pages(slot)
            assert filled == self.pages[slot][full : len(self.tokens[slot]) // ROWS]

    @precondition(lambda self: len(self.pages) > 1)
    @rule()
    def adopt(self) -> None:
        """Reads the first page of another sequence in place of the own."""
        first, second = sorted(self.pages)[:2]
        if not (self.pages[first] and self.pages[second]):
            return
        own, other = self.pages[second][0], self.pages[first][0]
        if own != other and len(self.running.readers(own)) == 1:
            self.running.replace_page(second, 0, other)
            self.pages[second][0] = other

    @precondition(lambda self: self.pages)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.pages)))
        self.running.close(slot)
        del self.pages[slot], self.tokens[slot]

    @invariant()
    def same(self) -> None:
        assert set(self.running.slots) == set(self.pages)
        for slot, pages in self.pages.items():
            assert self.running[slot].pages == pages
            assert self.running.length(slot) == len(self.tokens[slot])
            known = [*self.running[slot].token_ids, *self.running.new_tokens(slot)]
            assert known == self.tokens[slot]
        for page in range(1, self.num_pages + 1):
            readers = {slot for slot, pages in self.pages.items() if page in pages}
            assert self.running.readers(page) == readers
        self.running.check_integrity(Counter(p for pages in self.pages.values() for p in pages))


TestRunningSequences = RunningMachine.TestCase


def test_integrity_check_finds_corruption() -> None:
    """A page of two sequences that is counted once, and a reader that is not known."""
    running = RunningSequences(SIZES)
    running.open(0, page_table([5], [1, 2, 3, 4]), [])
    running.check_integrity({5: 1})
    with pytest.raises(AssertionError, match="references"):
        running.check_integrity({5: 2})
    running[0].pages.append(6)
    with pytest.raises(AssertionError, match="page 6 does not know slot 0"):
        running.check_integrity({5: 1, 6: 1})
