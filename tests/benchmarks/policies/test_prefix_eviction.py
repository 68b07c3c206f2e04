"""Hit rates of the policies on short runs of the benchmark's workloads."""

import random

import pytest

from benchmarks.policies import prefix_eviction
from benchmarks.policies.prefix_eviction import (
    POLICIES,
    Turn,
    agents,
    format_table,
    loop_and_scan,
    round_robin,
    share_found,
    shuffled_rounds,
    zipf,
)

CAPACITY = 64


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_eviction, "CAPACITY", CAPACITY)
    monkeypatch.setattr(prefix_eviction, "ROUNDS", 10)


def shares(turns: list[Turn]) -> dict[str, float]:
    return {name: share_found(turns, run(turns, CAPACITY)) for name, run in POLICIES.items()}


def test_baselines_find_what_they_must() -> None:
    """A weak baseline, which would flatter the index."""
    row = shares(round_robin(0.9))
    assert row == dict.fromkeys(POLICIES, 1.0)
    row = shares(round_robin(2.0))
    assert row["lru"] == 0.0
    assert 0.4 < row["clairvoyant"] <= 0.5
    # Of a cache of 64 pages, 8 are the turn's own: the oldest of 8 conversations is evicted.
    turns = [Turn(c, 8) for c in [*range(9), 1, 0]]
    assert prefix_eviction.lru_pages_found(turns, CAPACITY)[-2:] == [8, 0]
    assert prefix_eviction.clairvoyant_pages_found(turns, CAPACITY)[-2:] == [8, 8]


def test_index_has_no_cliff() -> None:
    """An index that finds nothing, or less than LRU, when conversations outgrow the capacity."""
    for turns in (round_robin(1.25), shuffled_rounds(1.25, random.Random(0))):
        row = shares(turns)
        assert row["lru"] + 0.2 < row["index"] <= row["clairvoyant"]
        assert row["index"] > 0.6
    row = shares(loop_and_scan(0.8))
    assert row["lru"] == 0.0
    assert row["index"] > 0.8
    row = shares(zipf(random.Random(0)))
    assert row["index"] >= row["lru"]
    row = shares(agents(1.25, random.Random(0)))
    assert row["index"] > row["lru"]


def test_conversations_grow_and_end() -> None:
    """Turns of agents that skip a page, or never end."""
    last: dict[int, int] = {}
    for turn in agents(1.0, random.Random(0)):
        assert last.get(turn.conversation, turn.num_pages - 1) == turn.num_pages - 1
        last[turn.conversation] = turn.num_pages
    assert max(last.values()) == 12
    assert len(last) > 8


def test_table() -> None:
    """Columns in another order than their headers."""
    shares = {"loop": {"clairvoyant": 1.0, "lru": 0.0, "index": 0.75, "random": 0.5}}
    assert format_table(shares).splitlines() == [
        "| workload | lru | random | index | clairvoyant |",
        "|---|---|---|---|---|",
        "| loop | 0.00 | 0.50 | 0.75 | 1.00 |",
    ]
