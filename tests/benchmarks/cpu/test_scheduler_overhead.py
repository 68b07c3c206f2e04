"""Python side of simulated decode steps, at toy size, whatever time they take."""

import pytest

from benchmarks.cpu import scheduler_overhead, simulated_decode
from benchmarks.cpu.scheduler_overhead import (
    Stopwatch,
    Timing,
    format_steps,
    format_turns,
    measure,
)
from benchmarks.cpu.simulated_decode import DecodeSteps, IdleCache, simulated_cache


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_overhead, "TURNS", 2)
    monkeypatch.setattr(simulated_decode, "WARM_UP_STEPS", 4)
    monkeypatch.setattr(simulated_decode, "DEVICES", 1)
    monkeypatch.setattr(simulated_decode, "STEP_ROWS", 512)


def test_all_decode_while_as_many_wait() -> None:
    """Steps in which some do not decode, or that leave the bookkeeping in disorder; a turn that
    finds nothing of its conversation in the cache."""
    cache = simulated_cache(context=400, num_sequences=3, num_steps=8)
    bench = DecodeSteps(cache, context=400, num_sequences=3)
    counters = bench.scheduler.counters
    assert counters.decoded_tokens == 4 * 3
    bench.step()
    assert counters.decoded_tokens == 5 * 3
    assert (bench.scheduler.num_running, bench.scheduler.num_waiting) == (3, 3)
    launched = counters.prompt_tokens
    bench.turn(0)
    assert counters.prompt_tokens - launched == 1
    cache.check_integrity()


def test_steps_are_under_pressure() -> None:
    """A cache that is never full, so that no page is offloaded, dropped or evicted; one without row
    caches; or lengths that steps and turns leave wrong."""
    cache = simulated_cache(context=2000, num_sequences=4, num_steps=100)
    bench = DecodeSteps(cache, context=2000, num_sequences=4)
    residency, observed = cache.residency, cache.device.num_decays
    offloaded, dropped = residency.pages_offloaded, residency.pages_dropped
    evicted = Stopwatch()
    evicted.watch(cache.index, "evict")
    for _ in range(96):
        bench.step()
    assert cache.device.num_decays - observed == 3
    assert residency.pages_offloaded > offloaded
    assert residency.pages_dropped > dropped
    assert evicted.calls["evict"] > 0
    assert any(residency.leased_row_cache(slot) for slot in range(4))
    for number in range(2):
        bench.turn(number)
    cache.check_integrity()
    # Of 2,000 tokens less 0, 16, 32 and 48: as many as steps, and what begins a turn.
    assert sorted(cache.length(slot) for slot in range(4)) == [2054, 2070, 2086, 2102]


def test_sequences_fill_their_pages_in_turn() -> None:
    """All pages that fill up in the same step."""
    bench = DecodeSteps(IdleCache(), context=200, num_sequences=4)
    assert [len(bench._prompt(number)) for number in range(8)] == [200, 184, 168, 152] * 2


def test_times_are_told_apart() -> None:
    """Steps, changes of heat or turns that are not counted."""
    timing = measure(3, 300, 33)
    assert (len(timing.steps), len(timing.scheduling), len(timing.policy)) == (33, 33, 33)
    assert len(timing.observations) == 1
    assert timing.observations[0] in timing.steps
    assert (len(timing.ends), len(timing.returns)) == (2, 2)
    assert min(*timing.steps, *timing.scheduling, *timing.ends, *timing.returns) > 0
    spent = zip(timing.steps, timing.policy, strict=True)
    assert all(0 < policy < step for step, policy in spent)


def test_stopwatch_counts_nested_calls_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A nested method whose time counts twice, or an error that stops the watch."""

    class Watched:
        def outer(self, fails: bool = False) -> int:
            times.pop(0)
            if fails:
                raise RuntimeError("fails")
            return self.inner()

        def inner(self) -> int:
            return times.pop(0)

    times = list(range(100))
    monkeypatch.setattr("time.thread_time", lambda: times.pop(0))
    watch, watched = Stopwatch(), Watched()
    watch.watch(watched, "outer", "inner")
    assert watched.outer() == 2
    assert watch.seconds == 3
    with pytest.raises(RuntimeError):
        watched.outer(fails=True)
    assert watch.seconds == 5
    watched.inner()
    assert watch.seconds == 7
    assert watch.calls == {"outer": 2, "inner": 2}


def test_tables() -> None:
    """Means instead of medians, swapped columns, or parts that do not add up to the step."""
    times = [1.0, 1, 4], [0.25, 0.5, 0.75], [0.125, 0.25, 0.5], [4.0]
    timing = Timing(3, 8192, *times, [5.0, 6, 10], [1.0, 2, 6], 10, 1000, 7)
    longer = Timing(3, 9000, [2.0, 2, 8], *times[1:], [5.0, 6, 10], [1.0, 2, 6], 10, 1000, 7)
    lines = format_steps([timing, longer]).splitlines()
    assert lines[2:7] == [
        "| 3 | 8,192 | step | 1.000 | 2.000 | 3.940 | 1.000 | 1.00 |",
        "| 3 | 8,192 | scheduler | 0.500 | 0.500 | 0.745 | 0.250 | 1.00 |",
        "| 3 | 8,192 | bookkeeping | 0.375 | 1.208 | 2.947 | 0.250 | 1.00 |",
        "| 3 | 8,192 | policy | 0.250 | 0.292 | 0.495 | 0.125 | 1.00 |",
        "| 3 | 9,000 | step | 2.000 | 4.000 | 7.880 | 2.000 | 2.00 |",
    ]
    assert format_turns([timing]).splitlines()[-1] == (
        "| 3 | 8,192 | 4.00 | 6.00 | 2.00 | 10 | 1,000 | 7 |"
    )
