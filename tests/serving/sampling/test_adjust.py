import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from serving.sampling import SamplingState, SlotSampling
from serving.sampling.adjust import adjust_logits
from serving.sampling.state import MAX_BAD_WORD_TOKENS
from tests.serving.sampling import reference

pytestmark = pytest.mark.compiles
VOCAB = 45  # no multiple of 8 or 32
WINDOW = MAX_BAD_WORD_TOKENS - 1
adjusted_of = jax.jit(adjust_logits)


def state_after(values: SlotSampling, output: Sequence[int], vocab_size: int) -> SamplingState:
    """State of one slot once the request has chosen `output`."""
    state = values.as_state(vocab_size)
    history = np.array(state.history)
    np.add.at(history[0], list(output), 1)
    recent = ([-1] * WINDOW + list(output))[-WINDOW:]
    return dataclasses.replace(
        state,
        num_output=jnp.array([len(output)], jnp.int32),
        recent=jnp.array([recent], jnp.int32),
        history=jnp.asarray(history),
    )


def adjust(logits: np.ndarray, values: SlotSampling, output: Sequence[int] = ()) -> np.ndarray:
    state = state_after(values, output, len(logits))
    return np.asarray(adjusted_of(np.asarray(logits, np.float32)[None], state))[0]


def masked(values: SlotSampling, output: Sequence[int] = ()) -> list[int]:
    return np.flatnonzero(adjust(np.zeros(VOCAB), values, output) == -np.inf).tolist()


sampling = functools.partial(SlotSampling, seed=0)


def random_case(rng: np.random.Generator) -> tuple[np.ndarray, SlotSampling, list[int]]:
    """Logits, a request with all adjustments, and an output that often completes bad words."""
    output = rng.integers(0, 4, rng.integers(0, 30)).tolist()
    lengths = [n for n in range(1, MAX_BAD_WORD_TOKENS + 1) if n - 1 <= len(output)]
    words = []
    for length in rng.choice(lengths, 4).tolist():
        start = output[len(output) - length + 1 :] if rng.random() < 0.7 else [1] * (length - 1)
        words.append([*start, int(rng.integers(0, VOCAB))])
    values = sampling(
        repetition_penalty=float(rng.choice([1.0, 0.5, 1.5, 3.0])),
        presence_penalty=float(rng.uniform(-2, 2)),
        frequency_penalty=float(rng.uniform(-2, 2)),
        min_tokens=int(rng.integers(0, 30)),
        stop_ids=rng.integers(0, VOCAB, 3).tolist(),
        logit_bias={int(t): float(rng.normal() * 10) for t in rng.integers(0, VOCAB, 5)},
        allowed_token_ids=sorted(set(rng.integers(0, VOCAB, rng.integers(1, 60)).tolist())),
        bad_words=words,
        prompt_token_ids=rng.integers(0, VOCAB, 10).tolist(),
    )
    logits = rng.normal(0, 5, VOCAB).astype(np.float32)
    logits[rng.random(VOCAB) < 0.1] = -np.inf
    return logits, values, output


def test_adjustments_follow_the_definition() -> None:
    """Adjustments in another order or with another meaning, all of them together."""
    rng = np.random.default_rng(0)
    for _ in range(200):
        logits, values, output = random_case(rng)
        expected = reference.adjust(logits, values, output)
        np.testing.assert_allclose(adjust(logits, values, output), expected, rtol=1e-5, atol=1e-5)


def test_nothing_set_changes_no_bit() -> None:
    """A neutral request whose logits are rounded."""
    logits = np.random.default_rng(0).normal(0, 9, VOCAB).astype(np.float32)
    values = sampling(prompt_token_ids=range(20), stop_ids=[4])
    np.testing.assert_array_equal(adjust(logits, values, [1, 1, 30]), logits)


def test_repetition_covers_prompt_and_output() -> None:
    """A repetition penalty that leaves out the prompt, counts, or has the wrong sign."""
    logits = np.array([2.0, -2.0, 2.0, -2.0, 2.0, 0.0])
    values = sampling(repetition_penalty=4.0, prompt_token_ids=[0, 1, 1, 5])
    found = adjust(logits, values, [2, 3, 3, 0])
    assert found.tolist() == [0.5, -8.0, 0.5, -8.0, 2.0, 0.0]
    values = dataclasses.replace(values, repetition_penalty=0.5)
    assert adjust(logits, values, [2, 3, 3, 0]).tolist() == [4.0, -1.0, 4.0, -1.0, 2.0, 0.0]


@pytest.mark.parametrize("sign", [1, -1])
def test_presence_and_frequency_cover_the_output(sign: int) -> None:
    """Penalties that count the prompt, or presence that counts repeats; negative ones reward."""
    values = sampling(prompt_token_ids=[0, 1, 1], presence_penalty=0.5 * sign)
    expected = np.array([0.0, -0.5, -0.5, 0.0]) * sign
    assert adjust(np.zeros(4), values, [1, 2, 2, 2]).tolist() == expected.tolist()
    values = sampling(prompt_token_ids=[0, 1, 1], frequency_penalty=0.5 * sign)
    expected = np.array([0.0, -0.5, -1.5, 0.0]) * sign
    assert adjust(np.zeros(4), values, [1, 2, 2, 2]).tolist() == expected.tolist()


def test_min_tokens_masks_stop_ids() -> None:
    """A stop id that is open a token too early or too late."""
    values = sampling(min_tokens=2, stop_ids=[3, 44])
    assert masked(values) == masked(values, [7]) == [3, 44]
    assert masked(values, [7, 7]) == masked(values, [7, 7, 7]) == []
    assert masked(sampling(stop_ids=[3, 44])) == []


@pytest.mark.parametrize("length", range(1, MAX_BAD_WORD_TOKENS + 1))
def test_bad_word_of_each_length(length: int) -> None:
    """A word whose last token stays open, is closed early, or after another beginning."""
    word = [10 + i for i in range(length)]
    values = sampling(bad_words=[word])
    start, last = word[:-1], word[-1]
    assert masked(values, start) == masked(values, [1, 2, *start]) == [last]
    if start:
        assert masked(values) == masked(values, start[1:]) == []
        assert masked(values, [*start, 1]) == masked(values, [9, *start[1:]]) == []
        # The word is of the output alone.
        assert masked(dataclasses.replace(values, prompt_token_ids=start)) == []


def test_bad_words_with_overlapping_beginnings() -> None:
    """A word that hides another, or a beginning that is found only where it is not repeated."""
    values = sampling(bad_words=[[1, 1, 2], [1, 3], [1, 1, 1, 4], [5], [], [2, 6]])
    assert masked(values) == [5]
    assert masked(values, [1]) == [3, 5]
    assert masked(values, [1, 1]) == [2, 3, 5]
    assert masked(values, [2, 1, 1, 1]) == [2, 3, 4, 5]
    assert masked(values, [1, 1, 2]) == [5, 6]


def test_allowed_tokens() -> None:
    """An id at the edge of a mask word that is open or closed by mistake."""
    allowed = [0, 31, 32, 44]
    expected = sorted(set(range(VOCAB)) - set(allowed))
    assert masked(sampling(allowed_token_ids=allowed)) == expected


def test_masks_leave_a_token() -> None:
    """Masks that together leave nothing to choose: the later one yields, for that step only."""
    only = sampling(allowed_token_ids=[4, 5], bad_words=[[4], [7, 5]])
    others = sorted(set(range(VOCAB)) - {4, 5})
    assert masked(only) == [*others[:4], 4, *others[4:]]
    assert masked(only, [7]) == others
    # Only 5 is open, and it is a stop id: min_tokens yields.
    stop = dataclasses.replace(only, stop_ids=[5], min_tokens=9)
    assert masked(stop) == masked(only)
    everything = sampling(bad_words=[[token] for token in range(VOCAB)])
    assert masked(everything) == []


def test_logit_bias() -> None:
    """A bias on the wrong token, or one that opens what a mask has closed."""
    values = sampling(logit_bias={0: 100.0, 44: -100.0, 3: 100.0}, bad_words=[[3]])
    expected = np.zeros(VOCAB)
    expected[[0, 44, 3]] = 100, -100, -np.inf
    np.testing.assert_array_equal(adjust(np.zeros(VOCAB), values), expected)


def test_bias_comes_before_penalties() -> None:
    """A repetition penalty that sees the sign of the logit without its bias."""
    values = sampling(logit_bias={0: 4.0}, repetition_penalty=2.0, prompt_token_ids=[0])
    assert adjust(np.array([-2.0, 0.0]), values)[0] == 1.0


@pytest.mark.parametrize("penalty", [1e-38, 1e38])
def test_overflow_masks_nothing(penalty: float) -> None:
    """Penalties beyond the range of float32, of which infinities would make NaN."""
    values = sampling(repetition_penalty=penalty, prompt_token_ids=range(3))
    found = adjust(np.array([30.0, -40.0, 20.0, -np.inf]), values)
    assert np.isfinite(found).tolist() == [True, True, True, False]
    assert found[1] == found.min(where=np.isfinite(found), initial=0)
