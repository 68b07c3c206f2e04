"""The page policy without steps, at toy size; no time is judged."""

import pytest

from benchmarks import page_policy
from benchmarks.page_policy import PolicyBench, Timing, format_table, measure


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_policy, "TURNS", 2)


def test_policy_runs_as_in_serving() -> None:
    """A cache that never fills up, so that no page is cleaned or dropped, or is left in disorder
    by steps and turns."""
    bench = PolicyBench(context=2000, num_sequences=4, num_steps=96)
    residency = bench.cache.residency
    cleaned, dropped = residency.pages_cleaned, residency.pages_dropped
    observed = [bench.step()[1] for _ in range(96)]
    assert sum(observed) == 3
    assert residency.pages_cleaned > cleaned
    assert residency.pages_dropped > dropped
    for slot in range(2):
        bench.turn(slot)
    bench.cache.check_integrity()
    assert [bench.cache.length(slot) for slot in range(4)] == [2161, 2160, 2158, 2157]


def test_times_are_told_apart() -> None:
    """Observing steps counted among the others, or a turn left out."""
    timing = measure(1500, 3, 33)
    assert (len(timing.steps), len(timing.observations)) == (32, 1)
    assert (len(timing.opens), len(timing.closes)) == (2, 2)
    assert min(*timing.steps, *timing.observations, *timing.opens, *timing.closes) > 0


def test_table() -> None:
    """Means for medians, or a mean without the observations."""
    timing = Timing(8192, 10, [1.0, 1, 4], [10.0], [5.0, 6, 10], [1.0, 2, 6], 1000, 7)
    assert format_table([timing]).splitlines()[-1] == (
        "| 8,192 | 10 | 1.00 | 3.94 | 10.00 | 4.00 | 6.00 | 2.00 | 1,000 | 7 |"
    )
