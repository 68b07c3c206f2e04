import jax
import numpy as np
import pytest

from serving.sampling import top_logprobs

pytestmark = pytest.mark.compiles
VOCAB = 45


def log_softmax(logits: np.ndarray) -> np.ndarray:
    logits = logits.astype(np.float64)
    shifted = logits - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def check(logits: np.ndarray, tokens: np.ndarray, count: int) -> None:
    """Compares with float64 and a stable sort."""
    found = top_logprobs(logits, tokens, count)
    expected = log_softmax(logits)
    # -0.0 and 0.0 compare equal here as well.
    order = np.argsort(-logits.astype(np.float64), axis=1, kind="stable")
    rows = np.arange(len(logits))
    best = order[:, :count]
    np.testing.assert_array_equal(found.token_ids, best)
    np.testing.assert_allclose(
        found.logprobs, np.take_along_axis(expected, best, axis=1), rtol=1e-5, atol=1e-5
    )
    np.testing.assert_allclose(found.logprob, expected[rows, tokens], rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(found.rank, 1 + np.argmax(order == tokens[:, None], axis=1))


@pytest.mark.parametrize("count", [0, 1, 5, VOCAB])
def test_against_float64(count: int) -> None:
    """Values, ranks and order, with ties, both zeros and -inf; no count, some, and all tokens."""
    rng = np.random.default_rng(count)
    logits = rng.normal(0, 4, (11, VOCAB)).astype(np.float32)
    logits[1:3] = rng.integers(-2, 2, (2, VOCAB))
    logits[3] = np.where(rng.random(VOCAB) < 0.5, -0.0, 0.0)
    logits[4, 3:] = -np.inf
    logits[5] = 3e38
    check(logits, rng.integers(0, VOCAB, 11).astype(np.int32), count)


def test_vocabulary_of_one() -> None:
    """The only token has probability 1."""
    check(np.array([[-7.0]], np.float32), np.array([0], np.int32), 1)


def test_large_vocabulary() -> None:
    """A normaliser that loses digits over the vocabulary of GLM-5.3."""
    logits = np.random.default_rng(0).normal(0, 0.1, (1, 154_880)).astype(np.float32)
    check(logits, np.array([154_879], np.int32), 5)


def test_rows_do_not_depend_on_each_other() -> None:
    """Bits that change with the batch."""
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 4, (11, VOCAB)).astype(np.float32)
    tokens = rng.integers(0, VOCAB, 11).astype(np.int32)
    together = top_logprobs(logits, tokens, 5)
    for row in (0, 7, 10):
        alone = top_logprobs(logits[row : row + 1], tokens[row : row + 1], 5)
        for one, all_rows in zip(jax.tree.leaves(alone), jax.tree.leaves(together), strict=True):
            np.testing.assert_array_equal(one[0], all_rows[row])


@pytest.mark.parametrize("count", [-1, VOCAB + 1])
def test_count_out_of_range(count: int) -> None:
    """A count that the vocabulary cannot give."""
    with pytest.raises(ValueError, match=rf"count must be in 0\.\.{VOCAB} .*, got {count}"):
        top_logprobs(np.zeros((1, VOCAB), np.float32), np.zeros(1, np.int32), count)
