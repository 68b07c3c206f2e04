"""The scheduler and the pages without steps, at toy size; no time is judged."""

import pytest

from benchmarks import scheduler_overhead
from benchmarks.scheduler_overhead import Bench, Timing, format_table, measure, simulated_cache


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_overhead, "TURNS", 2)
    monkeypatch.setattr(scheduler_overhead, "WARM_UP_STEPS", 4)
    monkeypatch.setattr(scheduler_overhead, "DEVICES", 1)


def test_all_decode_while_as_many_wait() -> None:
    """Steps in which some do not decode, or that leave the account in disorder; a turn that finds
    nothing of its conversation in the cache."""
    cache = simulated_cache(most_tokens=500, num_sequences=3)
    bench = Bench(cache, context=400, num_sequences=3)
    counters = bench.scheduler.counters
    assert counters.decoded_tokens == 4 * 3
    bench.step()
    assert counters.decoded_tokens == 5 * 3
    assert (bench.scheduler.num_running, bench.scheduler.num_waiting) == (3, 3)
    launched = counters.prompt_tokens
    bench.turn(0)
    assert counters.prompt_tokens - launched == 1
    cache.check_integrity()


def test_times_are_told_apart() -> None:
    """Steps that are left out, or turns."""
    timing = measure(300, 2, 5)
    counts = [len(t) for t in (timing.steps, timing.scheduling, timing.ends, timing.returns)]
    assert counts == [5, 5, 2, 2]
    assert min(*timing.steps, *timing.scheduling, *timing.ends, *timing.returns) > 0


def test_table() -> None:
    """Means for medians, or a column of another."""
    timing = Timing(8192, [1.0, 1, 4], [0.25, 0.5, 3], [5.0, 6, 10], [1.0, 2, 6])
    assert format_table([timing]).splitlines()[-1] == (
        "| 8,192 | 1.00 | 1.00 | 3.94 | 2.00 | 0.50 | 6.00 | 2.00 |"
    )
