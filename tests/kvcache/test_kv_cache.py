"""Short stories of sequences in a cache whose device keeps no bytes."""

import numpy as np
import pytest

from kvcache import KVCache, KVGeometry, OutOfPagesError, SimulatedDevice
from kvcache.tiers.page_states import PageState
from pallas_kernels.common.row_format import RowFormat

PAGE = 4
ROW = RowFormat("float32", 1, 0, 1.0)


def make(
    device_pages: int, host_pages: int = 0, *, swaps: bool = False, with_hidden: bool = False
) -> KVCache[SimulatedDevice]:
    geometry = KVGeometry(
        group_layers=(1,),
        device_pages=device_pages,
        host_pages=host_pages,
        num_devices=1,
        rows_per_device=PAGE,
        max_sequences=4,
        max_pages_per_sequence=device_pages + host_pages,
        row_format=ROW,
        index_row_format=ROW,
        row_cache_rows=PAGE if host_pages and not swaps else 0,
    )
    return KVCache(geometry, SimulatedDevice(geometry), max_step_rows=8, with_hidden=with_hidden)


def compute(cache: KVCache[SimulatedDevice], slot: int, token_ids: list[int]) -> None:
    """One step that appends rows."""
    cache.prepare({slot: len(token_ids)}, staging=True)
    cache.advance(slot, token_ids)


def test_pages_of_equal_prompts_can_all_be_given_up() -> None:
    """Catches a page cached after another sequence's equal one, which then can never go."""
    cache = make(8)
    prompt = list(range(12))
    cache.open(0, prompt, 12)
    cache.open(1, prompt, 12)  # nothing is cached yet
    compute(cache, 0, prompt[:8])
    compute(cache, 1, prompt)  # two pages like those of the other, and one that is new
    assert cache.pages_of(1)[:2] == cache.pages_of(0)[:2], "rows are stored twice"
    assert cache.pool.num_free == 5
    cache.close(0)
    room = cache.geometry.num_pages - len(cache.pages_of(1))
    cache.release_held(cache.hold_pages(room), due=None)
    cache.check_integrity()


def test_pages_brought_back_leave_the_page_to_copy() -> None:
    """Catches a page that is evicted for the pages before it, just when it was to be copied."""
    cache = make(device_pages=4, host_pages=1, swaps=True)
    first, second = [1] * 10, [2] * 8
    cache.open(0, first[:9], 9)
    compute(cache, 0, first[:8])
    compute(cache, 0, first[8:9])
    cache.close(0)
    cache.open(1, second, 8)
    compute(cache, 1, second)
    cache.close(1, preempted=True)
    # Both tiers are full, and the second is expected back sooner than the first.
    assert cache.open(0, first, 10) == 9
    cache.check_integrity()


def test_what_has_grown_counts_when_another_opens() -> None:
    """Catches sequences opened for reserved pages alone, when others have grown beyond theirs."""
    cache = make(device_pages=4, host_pages=8)
    cache.open(2, [3, 4], 2)
    compute(cache, 2, [3, 4])
    cache.close(2)
    for slot in range(2):
        cache.open(slot, [slot] * PAGE, PAGE)
        compute(cache, slot, [slot] * PAGE)
        compute(cache, slot, [5])
    # All device pages are taken for good; the page of [3, 4] would be copied to one.
    with pytest.raises(OutOfPagesError):
        cache.open(3, [3, 4, 5], PAGE)
    cache.check_integrity()


def test_row_cache_rows_are_leased_where_the_host_is_full_of_cached_pages() -> None:
    """Catches a sequence that reads in host memory for good, since nobody gives cached pages up."""
    cache = make(device_pages=8, host_pages=8)
    prompt = [0] * 5 * PAGE
    for first in range(4):
        cache.open(0, [first, *prompt], len(prompt) + 1)
        for start in range(0, len(prompt), PAGE):
            compute(cache, 0, [first, *prompt][start : start + PAGE])
        cache.close(0)
    residency = cache.residency
    cache.open(0, [2, *prompt], len(prompt) + 1)
    assert residency.states.room == residency.states.num_free_host == 0
    assert any(residency.states.state(page) is PageState.HOST for page in cache.pages_of(0))
    cache.prepare({0: 1})
    assert residency.leased_row_cache(0)
    cache.check_integrity()


def test_reads_belong_to_the_launch_that_tells_them() -> None:
    """Catches reads counted twice, for another slot, lost when a count wraps, or when a sequence
    has given its slot to another before its last launch is known."""
    cache = make(device_pages=4, host_pages=2)
    cache.open(1, [1, 2], 4)
    cache.open(2, [3, 4], 4)
    # Two devices' counts, side by side.
    first = np.array([[5, 1, 1, 1, 1, 1, 2, 0, 0, 0, 0, 0], [9, 0, 0, 0, 0, 0] * 2], np.int32)
    assert cache.note_reads(np.array([1, 2]), first)[:, 0].tolist() == [7, 18]
    assert cache.total.resident_reads == 25
    cache.close(1)
    cache.open(1, [5, 6], 4)
    later = first[:1] + 1
    assert cache.note_reads(np.array([1]), later).tolist() == [[2] * 6]
    counters = cache.read_counters(np.array([1, 2, 3, 4, 5, 6]))
    assert (counters.resident_reads, counters.missed_rows) == (1, 5)
    assert counters.staged_bytes == 6 * ROW.row_bytes
    assert cache.total.resident_reads == 27
    most = np.iinfo(np.int32).max
    wraps = np.array([[most, *[0] * 11]], np.int32)
    cache.note_reads(np.array([3]), wraps)
    wrapped = np.array([[-most, *[0] * 11]], np.int32)
    assert cache.note_reads(np.array([3]), wrapped)[0, 0] == 2


@pytest.mark.parametrize("with_hidden", [False, True])
@pytest.mark.parametrize("swaps", [False, True])
def test_a_page_that_has_left_is_computed_again(swaps: bool, with_hidden: bool) -> None:
    """Catches a sequence that copies a page in host memory for its last rows, and what follows
    them is not cached: by each turn of a conversation, all from there on is computed again."""
    cache = make(device_pages=6, host_pages=6, swaps=swaps, with_hidden=with_hidden)
    said, known = list(range(8)), 0  # and 8 again: the last row is computed on a copy
    for turn in range(3):
        found = cache.open(0, said, len(said))
        assert found == min(known, len(said) - 1) - (with_hidden and turn > 0)
        compute(cache, 0, said[found:])
        compute(cache, 0, [20 + turn])
        compute(cache, 0, [30 + turn])
        cache.close(0)
        for page in cache.residency.states.pages_in(PageState.DIRTY).tolist():
            cache.residency.offload(page)
        for page in cache.residency.states.pages_in(PageState.CLEAN).tolist():
            cache.residency.drop(page)
        cache.check_integrity()
        known = len(said) + 2
        said += [20 + turn, 30 + turn, 40] if turn else []
    cache.release_held(cache.hold_pages(cache.geometry.num_pages), due=None)
    cache.check_integrity()
