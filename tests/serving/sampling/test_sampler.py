import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm53.model.sharding import make_mesh
from kvcache import SequenceState
from serving.sampling import Sampler, SamplingState, SlotSampling
from serving.sampling.sampler import sample_rows
from tests.serving.sampling import reference

pytestmark = pytest.mark.compiles
VOCAB, SLOTS, CROWD = 45, 9, 11
sampler_of = functools.cache(lambda num_devices: Sampler(VOCAB, SLOTS, make_mesh(num_devices)))
sampled_rows = jax.jit(sample_rows)


def make_sequences(slots: int, num_devices: int = 1) -> SequenceState:
    sequences = SequenceState(
        jnp.full((slots, 2), -1, jnp.int32),
        jnp.arange(slots, dtype=jnp.int32),
        jnp.full((slots,), 7, jnp.int32),
        jnp.zeros((slots, 4), jnp.float32),
        jnp.zeros((slots,), bool),
    )
    everywhere = jax.sharding.NamedSharding(make_mesh(num_devices), jax.sharding.PartitionSpec())
    return jax.device_put(sequences, everywhere)


class Run:
    """State of sampler and sequences, driven step by step."""

    def __init__(self, num_devices: int = 1) -> None:
        mesh = make_mesh(num_devices)
        self.sampler = sampler_of(num_devices)
        self.state = SamplingState.create(SLOTS, VOCAB, mesh)
        self.sequences = make_sequences(SLOTS, num_devices)

    def assign(self, slot: int, values: SlotSampling, output_ids: Sequence[int] = ()) -> None:
        self.state = self.sampler.assign(self.state, slot, values, output_ids)

    def step(self, logits: dict[int, np.ndarray], groups: Sequence[int]) -> list[int]:
        """Samples groups, each a slot or -1, and returns their tokens; -1 has none."""
        rows = np.stack([logits.get(slot, np.zeros(VOCAB, np.float32)) for slot in groups])
        tokens, self.state, self.sequences = self.sampler.sample(
            self.state,
            self.sequences,
            jnp.array(groups, jnp.int32),
            jnp.asarray(rows),
            jnp.full(len(groups), -1, jnp.int32),
        )
        return tokens.tolist()


def as_numpy(tree: Any) -> list[np.ndarray]:
    return [np.array(leaf) for leaf in jax.tree.leaves(tree)]


sampling = functools.partial(SlotSampling, seed=11)
DRAWS, FEW = 4096, 11
FEW_LOGITS = np.array([2, 1.5, 1.5, 1, 0.5, 0, 0, -0.5, -1, -2, -np.inf], np.float32)


def draw(values: SlotSampling) -> np.ndarray:
    """How often each of `FEW` tokens is the n-th output, over n, with one state otherwise."""
    one = values.as_state(FEW)
    rows = jax.tree.map(lambda array: jnp.repeat(array, DRAWS, axis=0), one)
    rows = dataclasses.replace(rows, num_output=jnp.arange(DRAWS, dtype=jnp.int32))
    tokens = sampled_rows(jnp.tile(FEW_LOGITS, (DRAWS, 1)), rows)
    return np.bincount(tokens, minlength=FEW)


def p_value(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """Of a chi-square test; tokens of probability 0 must not occur."""
    possible = probabilities > 0
    assert not counts[~possible].any()
    expected = probabilities[possible] * counts.sum()
    statistic = ((counts[possible] - expected) ** 2 / expected).sum()
    freedom = possible.sum() - 1
    return float(jax.scipy.stats.chi2.sf(statistic, freedom)) if freedom else 1.0


PROMPT = {"prompt_token_ids": [0, 5, 8]}


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 3.0},
        {"top_k": 4},
        {"top_p": 0.7},
        {"min_p": 0.3},
        {"temperature": 2.0, "top_k": 6, "top_p": 0.8, "min_p": 0.2},
        {"logit_bias": {9: 3.0, 0: -1.0}, "top_p": 0.9},
        {"logit_bias": {9: 100.0}},
        {"logit_bias": {0: -100.0, 10: 100.0}},
        {"repetition_penalty": 2.0, **PROMPT},
        {"repetition_penalty": 0.5, "top_k": 5, **PROMPT},
        {"allowed_token_ids": [1, 4, 9], "temperature": 1.5},
        {"bad_words": [[1], [3]], "min_p": 0.1},
    ],
    ids=str,
)
def test_draws_follow_the_distribution(values: dict) -> None:
    """Draws that are not distributed as temperature, filters, masks and penalties define."""
    request = sampling(**values)
    assert p_value(draw(request), reference.distribution(FEW_LOGITS, request, [])) > 1e-3


def test_the_distribution_is_told_from_its_neighbours() -> None:
    """A chi-square test that would pass whatever was drawn."""
    counts = draw(sampling())
    neighbours = (sampling(temperature=1.15), sampling(logit_bias={9: 1.5}), sampling(min_p=0.02))
    for neighbour in neighbours:
        probabilities = reference.distribution(FEW_LOGITS, neighbour, [])
        assert np.any(counts[probabilities == 0]) or p_value(counts, probabilities) < 1e-4


def test_seeds_differ() -> None:
    """Seeds of which some bits do not count, or whose draws are related."""
    rows = np.zeros((8, VOCAB), np.float32)
    found = set()
    for seed in (0, 1, -1, 2**32, 2**32 + 1, 2**63, 5):
        one = sampling(seed=seed).as_state(VOCAB)
        state = jax.tree.map(lambda array: jnp.repeat(array, 8, axis=0), one)
        state = dataclasses.replace(state, num_output=jnp.arange(8, dtype=jnp.int32))
        found.add(tuple(sampled_rows(rows, state).tolist()))
    assert len(found) == 7


REQUESTS = {
    slot: SlotSampling(
        seed=slot % 3,
        temperature=[0.0, 0.8, 1.3][slot % 3],
        top_p=[1.0, 0.9][slot % 2],
        top_k=[0, 20][slot % 2],
        frequency_penalty=0.3,
        repetition_penalty=1.2,
        prompt_token_ids=[slot, 40],
    )
    for slot in range(SLOTS)
}
STEPS = 5


def logits_at(step: int, request: int) -> np.ndarray:
    return np.random.default_rng([step, request]).normal(0, 2, VOCAB).astype(np.float32)


def run_alone(request: int, slot: int, num_devices: int = 1) -> list[int]:
    run = Run(num_devices)
    run.assign(slot, REQUESTS[request])
    return [run.step({slot: logits_at(step, request)}, [slot])[0] for step in range(STEPS)]


def test_tokens_do_not_depend_on_the_batch() -> None:
    """Tokens that change in a crowd, with the slot, the order or padding."""
    rng = np.random.default_rng(0)
    slot_of = dict(zip(REQUESTS, rng.permutation(SLOTS).tolist(), strict=True))
    run = Run()
    for request, values in REQUESTS.items():
        run.assign(slot_of[request], values)
    crowd: dict[int, list[int]] = {request: [] for request in REQUESTS}
    for step in range(STEPS):
        logits = {slot_of[request]: logits_at(step, request) for request in REQUESTS}
        groups = rng.permutation([*slot_of.values(), *[-1] * (CROWD - SLOTS)]).tolist()
        tokens = dict(zip(groups, run.step(logits, groups), strict=True))
        for request in REQUESTS:
            crowd[request].append(tokens[slot_of[request]])
    for request in REQUESTS:
        assert run_alone(request, slot=0) == crowd[request]
    assert len({tuple(tokens) for tokens in crowd.values()}) == SLOTS


RESUMED = SlotSampling(
    seed=3,
    temperature=0.9,
    repetition_penalty=1.3,
    presence_penalty=0.4,
    frequency_penalty=0.2,
    min_tokens=22,
    stop_ids=[3],
    logit_bias={3: 3.0, 8: 2.0},
    bad_words=[[8, 3], [3] * 8, [3, 3, 7], [44, 3]],
    prompt_token_ids=[1, 2, 3],
)


@pytest.mark.parametrize("stops", [(0,), (1, 2), (17, 20)])
def test_going_on_in_another_slot(stops: tuple[int, ...]) -> None:
    """History, recent tokens, draws or `min_tokens` that start anew where a sequence goes on."""
    run, slot = Run(), 1
    run.assign(slot, RESUMED)
    expected = [run.step({slot: logits_at(step % 2, 0)}, [slot])[0] for step in range(30)]
    assert 3 in expected[22:]
    last = as_numpy(jax.tree.map(lambda array: array[slot], run.state))
    slot, output = 2, []
    run.assign(slot, RESUMED)
    for step in range(30):
        if step in stops:
            slot += 2
            run.assign(slot, RESUMED, output)
        output += run.step({slot: logits_at(step % 2, 0)}, [slot])
    assert output == expected
    for found, wanted in zip(
        as_numpy(jax.tree.map(lambda array: array[slot], run.state)), last, strict=True
    ):
        np.testing.assert_array_equal(found, wanted)


def test_two_devices_choose_alike() -> None:
    """State that is not donated, or not the same, on a mesh of two."""
    for request in (0, 1, 2):
        assert run_alone(request, 3, num_devices=2) == run_alone(request, 3)


def test_greedy_output_follows_the_definition() -> None:
    """History, recent tokens or their number that do not follow the output."""
    values = SlotSampling(
        seed=0,
        temperature=0.0,
        repetition_penalty=1.3,
        presence_penalty=0.4,
        frequency_penalty=0.2,
        min_tokens=6,
        stop_ids=[3],
        logit_bias={3: 5.0, 8: 2.0},
        bad_words=[[8, 3], [8], [3] * 8, [3, 3, 7], [44, 3]],
        prompt_token_ids=[1, 2, 3],
    )
    run = Run()
    run.assign(4, values)
    output: list[int] = []
    for step in range(40):
        logits = logits_at(step % 2, 0)
        expected = int(np.argmax(reference.adjust(logits, values, output)))
        assert run.step({4: logits}, [4]) == [expected]
        output.append(expected)
    assert run.state.num_output.tolist() == [0] * 4 + [40] + [0] * 4
    assert run.state.recent[4].tolist() == output[-15:]
    assert 3 not in output[:6]
    assert 3 in output
    assert len(set(output)) > 3


def test_greedy_takes_the_lowest_of_equals() -> None:
    """Ties that go to another token; a temperature just above greedy draws."""
    logits = np.zeros(VOCAB, np.float32)
    logits[[40, 9, 20]] = 5
    run = Run()
    run.assign(0, SlotSampling(seed=1, temperature=9.9e-6))
    assert [run.step({0: logits}, [0])[0] for _ in range(3)] == [9, 9, 9]
    run.assign(0, SlotSampling(seed=1, temperature=1.1e-5))
    assert {run.step({0: logits}, [0])[0] for _ in range(20)} == {9, 20, 40}


def test_only_sampled_slots_change() -> None:
    """A step that touches another slot, or lets padding write."""
    run = Run()
    run.assign(2, SlotSampling(seed=1, temperature=0.0))
    logits = np.zeros(VOCAB, np.float32)
    logits[30] = 1
    before = as_numpy((run.state, run.sequences))
    groups = [-1, 2, *[-1] * (CROWD - 2)]
    assert run.step({2: logits, -1: logits}, groups) == [-1, 30, *[-1] * (CROWD - 2)]
    after = as_numpy((run.state, run.sequences))
    others = [slot for slot in range(SLOTS) if slot != 2]
    for old, new in zip(before, after, strict=True):
        np.testing.assert_array_equal(new[others], old[others])
    assert run.sequences.last_token.tolist() == [7, 7, 30, 7, 7, 7, 7, 7, 7]
    assert run.state.history[2].nonzero()[0].tolist() == [30]
    assert run.state.recent[2].tolist() == [-1] * 14 + [30]
    before = as_numpy((run.state, run.sequences))
    assert run.step({}, [-1] * CROWD) == [-1] * CROWD
    for old, new in zip(before, as_numpy((run.state, run.sequences)), strict=True):
        np.testing.assert_array_equal(new, old)


def test_step_is_in_place_and_does_not_sort() -> None:
    """A step that copies the history of all slots, or sorts the vocabulary."""
    run = Run()
    logits = jnp.zeros((1, VOCAB), jnp.float32)
    slots = jnp.array([0], jnp.int32)
    arguments = (run.state, run.sequences, slots, logits, slots)
    compiled = run.sampler.sample.lower(*arguments).compile()
    hlo = compiled.as_text() or ""
    assert "sort(" not in hlo
    history = f"s32[{SLOTS},{VOCAB}]"
    assert history in hlo
    assert not [line for line in hlo.splitlines() if f"= {history}" in line and " copy(" in line]
    memory: Any = compiled.memory_analysis()
    donated = jax.tree.leaves((run.state, run.sequences))
    assert memory.alias_size_in_bytes >= sum(leaf.nbytes for leaf in donated)
    pointer = run.state.history.unsafe_buffer_pointer()
    run.step({}, [0])
    assert run.state.history.unsafe_buffer_pointer() == pointer
    assert donated[-1].is_deleted()
