"""Sequences that grow beyond what was reserved for them, under random histories of each policy."""

import dataclasses
from collections import Counter

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvcache import KVCache, KVGeometry, OutOfPagesError, SimulatedDevice
from kvcache.tiers.page_states import NO_PAGE_INDEX, PageState
from pallas_kernels.common.row_format import RowFormat

PAGE, SLOTS, STEP_ROWS, LONGEST = 4, 3, 8, 40
ROW = RowFormat("float32", 1, 0, 1.0)


def geometry(device_pages: int, host_pages: int, *, swaps: bool = False) -> KVGeometry:
    return KVGeometry(
        group_layers=(1,),
        device_pages=device_pages,
        host_pages=host_pages,
        num_devices=1,
        rows_per_device=PAGE,
        max_sequences=SLOTS,
        max_pages_per_sequence=LONGEST // PAGE,
        row_format=ROW,
        index_row_format=ROW,
        row_cache_rows=PAGE if host_pages and not swaps else 0,
        staging_pages=1 if host_pages and not swaps else 0,
    )


@dataclasses.dataclass
class Grown:
    """A running sequence: its tokens, and where its prompt ends."""

    token_ids: list[int]
    prompt: int


class Growth(RuleBasedStateMachine):
    """Opens, grows, preempts and closes sequences as a scheduler does."""

    swaps: bool
    sizes: st.SearchStrategy[tuple[int, int]]
    counts: Counter[str]

    @initialize(data=st.data())
    def start(self, data: st.DataObject) -> None:
        sizes = geometry(*data.draw(self.sizes), swaps=self.swaps)
        self.cache = KVCache(sizes, SimulatedDevice(sizes), max_step_rows=STEP_ROWS)
        self.most = sizes.device_pages if self.swaps else sizes.num_pages
        self.running: dict[int, Grown] = {}
        self.past: list[list[int]] = []

    @precondition(lambda self: len(self.running) < SLOTS)
    @rule(
        stream=st.integers(0, 2),
        prompt=st.integers(1, 24),
        more=st.integers(0, 2),
        spare=st.integers(0, 2),
        use_prefix=st.sampled_from([True, True, False]),
    )
    def open(self, stream: int, prompt: int, more: int, spare: int, use_prefix: bool) -> None:
        self.try_to_open([stream] * prompt, more, spare, use_prefix)

    @precondition(lambda self: self.past and len(self.running) < SLOTS)
    @rule(data=st.data(), more=st.integers(0, 2))
    def come_back(self, data: st.DataObject, more: int) -> None:
        """A preempted sequence, or the next turn of one that has ended."""
        token_ids = data.draw(st.sampled_from(self.past))
        self.try_to_open([*token_ids, 9][:LONGEST], more, 1, True)

    def try_to_open(self, token_ids: list[int], more: int, spare: int, use_prefix: bool) -> None:
        slot, prompt = min(set(range(SLOTS)) - set(self.running)), len(token_ids)
        more = min(more, LONGEST - prompt)
        alone = not self.running
        try:
            found = self.cache.open(
                slot,
                token_ids,
                prompt + more,
                use_prefix=use_prefix,
                spare_pages=0 if alone else spare,
            )
        except OutOfPagesError:
            fits = self.cache.geometry.pages_for(prompt + more) <= self.most
            assert not (alone and fits), "refused, although nothing runs"
            self.counts["refused"] += 1
            return
        assert found < prompt
        self.running[slot] = Grown(list(token_ids), prompt)
        self.counts["found"] += found > 0

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        """A prefill of one sequence, or a decode of all whose prompts are computed."""
        lengths = {slot: self.cache.length(slot) for slot in self.running}
        prefilling = [slot for slot, one in self.running.items() if lengths[slot] < one.prompt]
        if prefilling and data.draw(st.booleans()):
            slot = data.draw(st.sampled_from(prefilling))
            rows = {slot: min(STEP_ROWS, self.running[slot].prompt - lengths[slot])}
            # What was reserved is always there for one.
            if len(self.running) == 1:
                assert self.cache.can_prepare(rows)
        else:
            rows = {
                slot: 1
                for slot, one in self.running.items()
                if one.prompt <= lengths[slot] < LONGEST
            }
        while rows and not self.cache.can_prepare(rows):
            slot = max(self.running)
            pages = self.cache.geometry.pages_for(lengths[slot] + rows.get(slot, 0))
            assert len(self.running) > 1 or pages > self.most, "a lone sequence cannot grow"
            self.close(slot, preempted=len(self.running) > 1)
            rows.pop(slot, None)
            self.counts["preempted"] += 1
        if not rows:
            return
        self.cache.prepare(rows, staging=bool(prefilling))
        self.check_places()
        for slot, count in rows.items():
            one = self.running[slot]
            one.token_ids += one.token_ids[:1] * (lengths[slot] + count - len(one.token_ids))
            tokens = one.token_ids[lengths[slot] : lengths[slot] + count]
            complete = lengths[slot] + count == one.prompt
            self.cache.advance(slot, tokens, prompt_complete=complete)
            self.counts["beyond the reservation"] += lengths[slot] + count > one.prompt + 2
        self.counts["steps"] += 1

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def close_one(self, data: st.DataObject) -> None:
        self.close(data.draw(st.sampled_from(sorted(self.running))), preempted=False)

    def close(self, slot: int, *, preempted: bool) -> None:
        length = self.cache.length(slot)
        self.cache.close(slot, preempted=preempted)
        self.past.append(self.running.pop(slot).token_ids[:length] or [0])

    def check_places(self) -> None:
        """What a step needs on the device lies there when it is launched."""
        residency = self.cache.residency
        for slot, one in self.running.items():
            pages = self.cache.pages_of(slot)
            indices = [residency.states.device_page_index(page) for page in pages]
            self.counts["in host memory"] += indices.count(NO_PAGE_INDEX)
            if self.swaps:
                assert NO_PAGE_INDEX not in indices, "a running sequence was not brought back whole"
            for page, index in zip(pages, indices, strict=True):
                if residency.states.state(page) is PageState.TAIL:
                    assert index != NO_PAGE_INDEX
            assert len(pages) >= self.cache.geometry.pages_for(self.cache.length(slot)), one

    @invariant()
    def whole(self) -> None:
        if hasattr(self, "cache"):
            self.cache.check_integrity()

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.counts["onloaded"] += self.cache.residency.pages_onloaded
        for slot in list(self.running):
            self.close(slot, preempted=False)
        self.cache.check_integrity()
        while self.cache.index.evict(self.cache.tick()):
            pass
        assert self.cache.pool.num_free == self.cache.geometry.num_pages, "pages leaked"


POLICIES = {
    "resident": (False, st.tuples(st.integers(3, 16), st.just(0))),
    "hybrid": (False, st.tuples(st.integers(5, 10), st.integers(1, 12))),
    "swap": (True, st.tuples(st.integers(5, 10), st.integers(1, 12))),
}


@pytest.mark.parametrize("policy", POLICIES)
def test_growth(policy: str) -> None:
    """A reservation that is broken, a step that finds no page though it was told of one, a sequence
    that can never go on, a page lost; under `swap` a step that would read host memory."""
    seen: Counter[str] = Counter()

    class Machine(Growth):
        swaps, sizes = POLICIES[policy]
        counts = seen

    run_state_machine_as_test(Machine, settings=settings(max_examples=100, stateful_step_count=30))
    assert seen["steps"] > 100 and seen["beyond the reservation"] > 5, seen


def test_swapped_sequences_come_back_whole() -> None:
    """A sequence that runs under `swap` while some of its pages are in host memory, one that is
    let in although not all of its pages find room on the device, or never again."""
    sizes = geometry(8, 12, swaps=True)
    cache = KVCache(sizes, SimulatedDevice(sizes), max_step_rows=STEP_ROWS)

    def run(slot: int, token_ids: list[int]) -> int:
        found = cache.open(slot, token_ids, len(token_ids) + 2)
        for start in range(found, len(token_ids), STEP_ROWS):
            chunk = token_ids[start : start + STEP_ROWS]
            cache.prepare({slot: len(chunk)}, staging=True)
            cache.advance(slot, chunk, prompt_complete=start + STEP_ROWS >= len(token_ids))
        cache.check_integrity()
        return found

    first, second = [1] * 21, [2] * 21
    assert run(0, first) == 0
    with pytest.raises(OutOfPagesError, match="must lie on the device, which has 8"):
        cache.open(1, second, len(second) + 2)
    cache.close(0, preempted=True)
    assert run(1, second) == 0
    assert cache.residency.pages_dropped >= 4
    with pytest.raises(OutOfPagesError, match="must lie on the device"):
        cache.open(0, [*first, 3], len(first) + 3)
    cache.close(1)
    assert run(0, [*first, 3]) == len(first)
    # The last page, which goes on, comes back as a copy.
    assert cache.residency.pages_onloaded >= 3 and cache.residency.pages_copied == 1
    indices = [cache.residency.states.device_page_index(page) for page in cache.pages_of(0)]
    assert NO_PAGE_INDEX not in indices
