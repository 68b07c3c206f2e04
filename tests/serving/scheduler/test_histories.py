"""Histories of requests over a simple exact cache, as hypothesis invents and shortens them."""

from hypothesis import given, settings
from hypothesis import strategies as st

from serving.scheduler import Scheduler
from tests.serving.scheduler.fake_cache import FakeCache
from tests.serving.scheduler.history import Arrival, History
from tests.serving.scheduler.mock_engine import VOCABULARY, MockEngine, RowsOfSlots

AGE_WEIGHT = 0.5
ROWS_PER_PAGE = 4

arrivals = st.builds(
    Arrival,
    number=st.integers(0, 7),
    kept=st.integers(0, 16),
    new_tokens=st.lists(st.integers(1, VOCABULARY - 1), min_size=1, max_size=24).map(tuple),
    max_tokens=st.integers(1, 20),
    priority=st.integers(-1, 1),
    copies=st.integers(1, 3),
    reuse_prefix=st.booleans(),
)
events = st.one_of(
    arrivals,
    st.tuples(st.just("abort"), st.integers(0, 7)),
    st.tuples(st.just("steps"), st.integers(1, 6)),
    st.just(("fail", 0)),
)


@settings(max_examples=150)
@given(
    num_pages=st.integers(3, 24),
    max_num_seqs=st.integers(1, 5),
    max_step_rows=st.integers(1, 12),
    max_num_batched_tokens=st.integers(1, 24),
    history=st.lists(events, max_size=30),
    pipelined=st.booleans(),
)
def test_any_history_ends_with_the_same_tokens(
    num_pages: int,
    max_num_seqs: int,
    max_step_rows: int,
    max_num_batched_tokens: int,
    history: list[Arrival | tuple[str, int]],
    pipelined: bool,
) -> None:
    """Catches tokens lost, doubled or told to the wrong sequence, and sequences that never end."""

    def make() -> MockEngine:
        cache = FakeCache(num_pages, ROWS_PER_PAGE)
        scheduler = Scheduler(
            cache,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_step_rows=max_step_rows,
            age_weight=AGE_WEIGHT,
        )
        return MockEngine(cache, RowsOfSlots(cache), scheduler, pipelined=pipelined)

    # A row more than fit, as the last sampled token needs none.
    max_tokens = num_pages * ROWS_PER_PAGE + 1
    run = History(make(), max_tokens=max_tokens, age_weight=AGE_WEIGHT)
    for event in history:
        match event:
            case Arrival():
                run.add(event)
            case "abort", number:
                run.abort(number)
            case "steps", count:
                for _ in range(count):
                    run.step()
            case _:
                run.restart(make())
                run.check_integrity()
    run.drain(max_steps=20_000)
