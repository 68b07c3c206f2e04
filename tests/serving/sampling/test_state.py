import dataclasses
import functools

import jax
import numpy as np
import pytest

from glm53.model.sharding import make_mesh
from serving.sampling import Sampler, SamplingState, SlotSampling
from serving.sampling.adjust import allowed_tokens
from serving.sampling.state import (
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_STOP_IDS,
)

VOCAB, SLOTS = 70, 3
sampling = functools.partial(SlotSampling, seed=0)


def as_numpy(state: SamplingState) -> dict[str, np.ndarray]:
    return {field.name: np.array(getattr(state, field.name)) for field in dataclasses.fields(state)}


FULL = SlotSampling(
    seed=2**40 + 5,
    temperature=0.75,
    top_p=0.5,
    top_k=7,
    min_p=0.25,
    repetition_penalty=1.25,
    presence_penalty=-0.5,
    frequency_penalty=0.125,
    min_tokens=4,
    stop_ids=(3, 9),
    logit_bias={5: 1.5, 2: -2.5},
    allowed_token_ids=[0, 31, 32, 63, 64, 69],
    bad_words=[[4], [1, 2, 3]],
    prompt_token_ids=[6, 6, 69],
)


@pytest.mark.compiles
def test_assign_fills_one_slot() -> None:
    """A field that is not set or is set wrong, or a neighbour's that changes."""
    sampler = Sampler(VOCAB, SLOTS, make_mesh())
    state = SamplingState.create(SLOTS, VOCAB, make_mesh())
    before = as_numpy(state)
    after = as_numpy(sampler.assign(state, 1, FULL))
    for name, array in before.items():
        np.testing.assert_array_equal(after[name][[0, 2]], array[[0, 2]], err_msg=name)
    one = {name: array[1] for name, array in after.items()}
    for name in ("temperature", "top_p", "top_k", "min_p", "min_tokens"):
        assert one[name] == getattr(FULL, name)
    for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
        assert one[name] == getattr(FULL, name)
    assert one["key"].tolist() == [2**8, 5]
    assert one["num_output"] == 0
    assert one["stop_ids"].tolist() == [3, 9] + [-1] * (MAX_STOP_IDS - 2)
    assert one["bias_ids"].tolist() == [5, 2] + [-1] * (MAX_LOGIT_BIAS - 2)
    assert one["bias"].tolist() == [1.5, -2.5] + [0] * (MAX_LOGIT_BIAS - 2)
    assert [word[word >= 0].tolist() for word in one["bad_words"][:2]] == [[4], [1, 2, 3]]
    assert one["bad_words"][1].tolist()[-4:] == [-1, 1, 2, 3]
    assert (one["bad_words"][2:] == -1).all()
    assert (one["recent"] == -1).all()
    assert np.flatnonzero(one["history"] < 0).tolist() == [6, 69]
    assert not (one["history"] & 0x7FFFFFFF).any()


@pytest.mark.compiles
def test_assign_forgets_the_last_request() -> None:
    """A request that inherits the history, key or masks of the one before in its slot."""
    sampler = Sampler(VOCAB, SLOTS, make_mesh())
    state = SamplingState.create(SLOTS, VOCAB, make_mesh())
    fresh = as_numpy(sampler.assign(state, 2, SlotSampling(seed=1)))
    state = sampler.assign(SamplingState.create(SLOTS, VOCAB, make_mesh()), 2, FULL)
    state = dataclasses.replace(
        state, num_output=state.num_output + 1, recent=state.recent * 0, history=state.history + 1
    )
    again = as_numpy(sampler.assign(state, 2, SlotSampling(seed=1)))
    for name, array in fresh.items():
        np.testing.assert_array_equal(again[name][2], array[2], err_msg=name)


@pytest.mark.compiles
def test_new_slots_are_greedy_and_open() -> None:
    """Unassigned slots with a mask or a penalty, or state that is not on every device."""
    state = SamplingState.create(SLOTS, VOCAB, make_mesh(2))
    assert all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(state))
    assert all(len(leaf.sharding.device_set) == 2 for leaf in jax.tree.leaves(state))
    assert state.temperature.tolist() == [0] * SLOTS
    assert state.repetition_penalty.tolist() == [1] * SLOTS
    assert np.asarray(allowed_tokens(state.allowed, VOCAB)).all()
    assert not np.asarray(state.history).any()


@pytest.mark.compiles
@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 64, 70])
def test_allowed_bits(vocab_size: int) -> None:
    """An allowed id that is lost or moved at the edge of a 32-bit word."""
    for token in {0, 30, 31, 32, 62, 63, 64, vocab_size - 1}:
        if token < vocab_size:
            state = SlotSampling(seed=0, allowed_token_ids=[token]).as_state(vocab_size)
            allowed = np.asarray(allowed_tokens(state.allowed, vocab_size))
            assert np.flatnonzero(allowed[0]).tolist() == [token]
    everything = SlotSampling(seed=0).as_state(vocab_size)
    assert np.asarray(allowed_tokens(everything.allowed, vocab_size)).sum() == vocab_size


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"stop_ids": range(129)}, "stop_ids has 129 ids, the limit is 128"),
        (
            {"logit_bias": dict.fromkeys(range(1025), 1.0)},
            "logit_bias has 1025 tokens, the limit is 1024",
        ),
        ({"bad_words": [[1]] * 257}, "bad_words has 257 words, the limit is 256"),
        ({"bad_words": [[1], [2] * 17]}, r"bad_words\[1\] has 17 tokens, the limit is 16"),
        ({"allowed_token_ids": []}, "allowed_token_ids is empty"),
        ({"logit_bias": {4: float("inf")}}, "logit_bias of token 4 must be finite, got inf"),
        ({"logit_bias": {4: 1e39}}, r"logit_bias of token 4 must be finite, got 1e\+39"),
        ({"seed": 2**64}, "seed must be a 64-bit integer, got 18446744073709551616"),
        ({"seed": -(2**63) - 1}, "seed must be a 64-bit integer"),
    ],
)
def test_what_a_slot_cannot_hold(values: dict, message: str) -> None:
    """A request that is cut to fit, or refused without its field, value and limit."""
    with pytest.raises(ValueError, match=message):
        sampling(**values)


@pytest.mark.parametrize(
    "values",
    [
        {"stop_ids": [70]},
        {"logit_bias": {70: 1.0}},
        {"allowed_token_ids": [3, 70]},
        {"prompt_token_ids": [-1]},
        {"bad_words": [[1], [70]]},
    ],
)
def test_ids_outside_the_vocabulary(values: dict) -> None:
    """An id that would wrap around or be dropped."""
    (name,) = values
    with pytest.raises(ValueError, match=rf"{name}(\[1\])? holds token id (70|-1), .* 0\.\.69"):
        sampling(**values).as_state(VOCAB)


def test_limits_are_reached() -> None:
    """A slot that does not hold as much as its limits say."""
    values = SlotSampling(
        seed=-(2**63),
        stop_ids=range(MAX_STOP_IDS),
        logit_bias=dict.fromkeys(range(MAX_LOGIT_BIAS), -1.0),
        bad_words=[list(range(MAX_BAD_WORD_TOKENS))] * MAX_BAD_WORDS,
    )
    state = values.as_state(2000)
    assert state.stop_ids.tolist() == [list(range(MAX_STOP_IDS))]
    assert state.bias_ids.tolist() == [list(range(MAX_LOGIT_BIAS))]
    assert (np.asarray(state.bad_words) == np.arange(MAX_BAD_WORD_TOKENS)).all()
    assert state.key.tolist() == [[2**31, 0]]


@pytest.mark.compiles
@pytest.mark.parametrize("slot", [-1, SLOTS])
def test_no_such_slot(slot: int) -> None:
    """A request that is written nowhere, or to another's slot."""
    state = SamplingState.create(SLOTS, VOCAB, make_mesh())
    with pytest.raises(ValueError, match=f"slot {slot} is not in 0..2"):
        Sampler(VOCAB, SLOTS, make_mesh()).assign(state, slot, SlotSampling(seed=0))
