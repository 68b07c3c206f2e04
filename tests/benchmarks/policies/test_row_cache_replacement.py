"""Replacement policies against hand-made sequences, plain references and each other."""

import itertools
import shutil
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.policies import recorded_selections
from benchmarks.policies.modelled_selections import modelled_selections
from benchmarks.policies.recorded_selections import (
    TEXT_WARM_UP,
    WARM_UP_STEPS,
    RankedSteps,
    Recording,
    Selections,
    needle_selections,
    recording_name,
    text_selections,
)
from benchmarks.policies.row_cache_replacement import (
    POLICIES,
    Policy,
    Step,
    format_table,
    miss_rate,
    simulate,
)

PRACTICAL = [name for name in POLICIES if name != "Belady's bound"]


def selections(
    steps: Sequence[Sequence[int]], scores: Sequence[Sequence[float]] | None = None
) -> Selections:
    """Steps of one cache: all positions are selected, or with scores the first of each step."""
    widest = max(map(len, steps))
    ranked = [[*step, *[-1] * (widest - len(step))] for step in steps]
    top_k = widest if scores is None else 1
    scored = np.ones((1, len(steps), widest)) if scores is None else np.array([scores])
    return Selections(np.array([ranked]), scored, top_k, warm_up=0)


def run(name: str, lookups: Selections, entries: int) -> list[Step]:
    """Steps of one cache, each with its rows afterwards."""
    policy: Policy = POLICIES[name](lookups, entries)
    return [Step(x.selected[0], x.missed[0], x.owners[0].copy()) for x in simulate(policy, lookups)]


def missed(name: str, steps: list[list[int]], entries: int) -> list[list[int]]:
    return [x.selected[x.missed].tolist() for x in run(name, selections(steps), entries)]


@st.composite
def sequences(draw: st.DrawFn, num_positions: int = 10) -> list[list[int]]:
    step = st.lists(st.integers(0, num_positions - 1), max_size=4, unique=True)
    steps = draw(st.lists(step, min_size=1, max_size=25))
    return [[0], *steps]


@pytest.mark.parametrize(
    ("name", "evicted"),
    [("LRU", 1), ("FIFO", 0), ("CLOCK", 0), ("segmented LRU", 1), ("LRU-2", 1)],
)
def test_first_replaced(name: str, evicted: int) -> None:
    """0 was used again and is the oldest: a policy that mistakes loads and uses."""
    after = run(name, selections([[0], [1], [2], [0], [3]]), entries=3)[-1]
    assert {0, 1, 2} - set(after.owners) == {evicted}


def test_clock_turns() -> None:
    """A hand that starts anew at each step, or bits that it does not clear.

    3 takes the place of 0 after a whole turn; 1 is used since and passed; 4 takes the place of 2;
    then 3, whose bit that turn did not reach, is passed and cleared, and 5 takes the place of 1.
    """
    steps = run("CLOCK", selections([[0], [1], [2], [3], [1], [4], [5]]), entries=3)
    assert [step.owners.tolist() for step in steps[3:]] == [
        [3, 1, 2],
        [3, 1, 2],
        [3, 1, 4],
        [3, 5, 4],
    ]


def test_clock_passes_rows_of_the_step() -> None:
    """A hand that clears the bit of 1 as it passes, in the step that uses 1: then 5 replaces it."""
    steps = run("CLOCK", selections([[0], [1], [2], [3], [1, 4], [5]]), entries=3)
    assert steps[-1].owners.tolist() == [5, 1, 4]


def test_segments_keep_the_newest() -> None:
    """Half the entries protect 1 and 2; 0, hit before them, goes back among 3 and the newcomers."""
    steps = run("segmented LRU", selections([[0, 1, 2, 3], [0], [1], [2], [4], [5]]), entries=4)
    assert sorted(steps[-1].owners) == [1, 2, 4, 5]


def test_scores_decide() -> None:
    """A moving average without its past, or never moved from the score at loading: 0 would go."""
    lookups = selections(
        [[0, 1, 2, 3], [1, 0, 2, 3], [2, 1, 0, 3], [0, 1, 2, 3], [3, 1, 2, 0]],
        [[4, 3.5, 3, -9], [9, 3.8, 3, -9], [5, 4.5, 3.9, -9], [8, 7, 0, -9], [10, 3, 2, 1]],
    )
    victims = {
        name: ({0, 1, 2} - set(run(name, lookups, entries=3)[-1].owners)).pop()
        for name in ("LRU", "current score", "smoothed score")
    }
    assert victims == {"LRU": 1, "current score": 0, "smoothed score": 2}


def test_frequency_outlives_replacement() -> None:
    """A count that starts anew when its row was replaced: then 1, used later, would stay."""
    steps = [[0], [0], [0], [1, 2], [0], [1], [3]]
    after = run("decayed frequency", selections(steps), entries=2)[-1]
    assert sorted(after.owners) == [0, 3]


def ordered_dict_lru(steps: list[list[int]], entries: int) -> list[list[int]]:
    """Misses of LRU; of rows used in one step the one in the lowest entry counts as older."""
    cached: OrderedDict[int, int] = OrderedDict()
    free, result = list(range(entries)), []
    for step in steps:
        result.append([position for position in step if position not in cached])
        for position in result[-1]:
            if not free:
                victim = next((held for held in cached if held not in step), None)
                if victim is None:
                    continue
                free.append(cached.pop(victim))
            cached[position] = free.pop(0)
        for position in sorted(set(step) & set(cached), key=lambda held: cached[held]):
            cached.move_to_end(position)
    return result


@settings(max_examples=40)
@given(sequences(), st.integers(1, 9))
def test_lru_is_lru(steps: list[list[int]], entries: int) -> None:
    """Any other order of victims, or a miss that is loaded in the wrong place."""
    assert missed("LRU", steps, entries) == ordered_dict_lru(steps, entries)


@settings(max_examples=40)
@given(sequences(), st.integers(1, 9), st.sampled_from(sorted(POLICIES)))
def test_cache_is_consistent(steps: list[list[int]], entries: int, name: str) -> None:
    """A hit on a row that is not there, a miss on one that is, a row cached twice or from nowhere,
    and, but for the bound, a selected row that is replaced or a row replaced before need."""
    held: set[int] = set()
    for lookups, step in zip(steps, run(name, selections(steps), entries), strict=True):
        assert step.selected[step.missed].tolist() == [x for x in lookups if x not in held]
        cached = step.owners[step.owners >= 0].tolist()
        assert len(cached) == len(set(cached))
        assert set(cached) <= held | set(lookups)
        if name in PRACTICAL:
            assert held & set(lookups) <= set(cached)
            assert len(cached) == min(entries, len(held | set(lookups)))
        held = set(cached)


def min_misses(steps: list[list[int]], entries: int) -> int:
    """Minimum of misses over all contents that a cache could have after each step."""
    costs: dict[frozenset[int], int] = {frozenset(): 0}
    for step in steps:
        following: dict[frozenset[int], int] = {}
        for held, cost in costs.items():
            present = held | set(step)
            cost += len(set(step) - held)
            for kept in itertools.combinations(present, min(entries, len(present))):
                key = frozenset(kept)
                following[key] = min(cost, following.get(key, cost))
        costs = following
    return min(costs.values())


@settings(max_examples=40)
@given(sequences(num_positions=6), st.integers(1, 3))
def test_belady_is_the_minimum(steps: list[list[int]], entries: int) -> None:
    """A bound that a cache can undercut, or that no cache reaches."""
    found = sum(map(len, missed("Belady's bound", steps, entries)))
    assert found == min_misses(steps, entries)


@settings(max_examples=40)
@given(sequences(), st.integers(1, 9), st.sampled_from(PRACTICAL))
def test_none_undercuts_belady(steps: list[list[int]], entries: int, name: str) -> None:
    """A policy that counts fewer misses than it had."""
    bound = sum(map(len, missed("Belady's bound", steps, entries)))
    assert bound <= sum(map(len, missed(name, steps, entries)))


def test_caches_are_apart() -> None:
    """Rows of one cache that another hits or replaces."""
    both = Selections(np.array([[[0], [1]], [[1], [1]]]), np.ones((2, 2, 1)), 1, warm_up=1)
    steps = list(simulate(POLICIES["LRU"](both, 2), both))
    assert [step.missed[:, 0].tolist() for step in steps] == [[True, True], [True, False]]
    assert miss_rate(POLICIES["LRU"](both, 2), both) == 0.5


def test_model_misses_as_published() -> None:
    """Selections that change much more or much less between steps than those of GLM-5.1."""
    model = modelled_selections(1, 180, top_k=64, warm_up=60)
    rates = [100 * miss_rate(POLICIES["LRU"](model, size * 64), model) for size in (1, 2, 4)]
    np.testing.assert_allclose(rates, [30.0, 13.4, 6.7], atol=2.5)


def test_table() -> None:
    """Shifted cells: at one top-k all policies that keep every hit have the same misses."""
    model = modelled_selections(1, 12, top_k=8, warm_up=6)
    head, _, *rows = format_table({"model": model}).splitlines()
    assert head.startswith("| policy | model 1k | model 2k | model 4k | published 1k |")
    cells = [[cell.strip() for cell in row.split("|")[1:-1]] for row in rows]
    assert [row[0] for row in cells] == list(POLICIES)
    assert len({row[1] for row in cells[:-1]}) == 1
    assert cells[0][4:] == ["30.0", "13.4", "6.7"]


def recording() -> Recording:
    """600 steps of 2 groups, and questions of 3 and 2 steps, with one row more."""
    best = np.array([169, 168, 167, *range(67)], np.int16)
    text = np.tile(best, (2, 600, 1))
    question = np.where(text[:, :3] == 169, 170, text[:, :3])
    read, lookups = (RankedSteps(x, np.ones(x.shape, np.float16)) for x in (text, question))
    return Recording(read, read[:WARM_UP_STEPS], (lookups, lookups[:2]))


def test_recording_is_read_back(tmp_path: Path) -> None:
    """Parts in another order, or questions left out."""
    saved = recording()
    saved.save(tmp_path / "new" / "recording.npz")
    loaded = Recording.load(tmp_path / "new" / "recording.npz")
    for old, new in zip(
        (saved.text, saved.warm_up, *saved.questions),
        (loaded.text, loaded.warm_up, *loaded.questions),
        strict=True,
    ):
        np.testing.assert_array_equal(old.positions, new.positions)
        np.testing.assert_array_equal(old.scores, new.scores)


def test_recordings_of_other_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recording taken for that of another text, or of weights that have changed."""
    document = {"id": "8000-0", "text": "one", "questions": []}
    names = {recording_name(document), recording_name(document | {"text": "two"})}
    model = shutil.copytree(recorded_selections.model_path("tiny"), tmp_path / "model")
    monkeypatch.setattr(recorded_selections, "model_path", lambda name: model)
    assert recording_name(document) in names
    weights = bytearray((model / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (model / "model.safetensors").write_bytes(weights)
    assert len(names | {recording_name(document)}) == 3


def test_recorded_lookups() -> None:
    """The 2 newest rows looked up, a question without its warm cache, or padding that selects."""
    text = text_selections([recording()])
    assert (text.ranked.shape, text.warm_up) == ((2, 600, 70), TEXT_WARM_UP)
    assert text.ranked[0, 0, :4].tolist() == [-1, -1, 167, 0]
    needles = needle_selections([recording()])
    assert (needles.ranked.shape, needles.warm_up) == ((4, WARM_UP_STEPS + 3, 70), WARM_UP_STEPS)
    assert needles.ranked[0, -4:, :3].tolist() == [[-1, -1, 167], *[[-1, 168, 167]] * 3]
    assert (needles.ranked[2:, -1] == -1).all()
    assert (needles.ranked[:2, -1, 3:] >= 0).all()
