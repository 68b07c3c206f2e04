"""Plans over the real bookkeeping of pages: what is moved, and when."""

import pytest

from tests.serving.scheduler.mock_engine import VOCABULARY, ToySequence, expected_output
from tests.serving.scheduler.soak import ROWS_PER_PAGE, Sizes, make_engine

CHUNK_PAGES = 70  # more than one launch of moves maps


@pytest.mark.parametrize("policy", ["resident", "swap", "hybrid"])
def test_pages_stay_until_the_chunk_that_writes_them_is_launched(policy: str) -> None:
    """Catches a chunk whose pages are replaced by equal ones of another sequence, and unmapped,
    before it is launched."""
    chunk_rows = CHUNK_PAGES * ROWS_PER_PAGE
    sizes = Sizes(
        device_pages=6 * CHUNK_PAGES,
        host_pages=0 if policy == "resident" else CHUNK_PAGES,
        max_num_seqs=2,
        max_step_rows=chunk_rows,
        max_num_batched_tokens=chunk_rows,
        row_cache_pages=1 if policy == "hybrid" else 0,
        staging_pages=0,
        with_hidden=False,
    )
    engine, cache, _ = make_engine(sizes, policy, pipelined=True)
    prompt = [1 + position % (VOCABULARY - 1) for position in range(2 * chunk_rows)]
    first = ToySequence([*prompt, 5], max_tokens=4)
    engine.scheduler.add(first)
    engine.step()
    # Computes and caches the same rows first.
    second = ToySequence([*prompt, 9], max_tokens=4, priority=1)
    engine.scheduler.add(second)
    while len(engine.scheduler):
        engine.step()
        engine.scheduler.check_integrity()
        cache.check_integrity()
    for sequence in (first, second):
        assert sequence.output_ids == expected_output(sequence.token_ids, sequence.max_tokens)
    assert engine.scheduler.counters.cached_tokens == chunk_rows, "the first replaced no pages"
