import itertools

import hypothesis.extra.numpy as hnp
import jax
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from serving.sampling.filters import kept_tokens, token_distances
from tests.serving.sampling import reference

pytestmark = pytest.mark.compiles
ROWS = 8
distances_of, kept_of = jax.jit(token_distances), jax.jit(kept_tokens)


def kept(logits, *, temperature=1.0, min_p=0.0, top_k=0, top_p=1.0) -> list[int]:
    """The ids kept of one row of logits."""
    rows = np.tile(np.array(logits, np.float32), (ROWS, 1))
    distances = distances_of(rows, np.full(ROWS, temperature, np.float32))
    found = kept_of(
        distances,
        np.full(ROWS, min_p, np.float32),
        np.full(ROWS, top_k, np.int32),
        np.full(ROWS, top_p, np.float32),
    )
    return np.flatnonzero(np.asarray(found)[0]).tolist()


LOGITS = st.one_of(
    st.floats(-20, 20, width=32, allow_subnormal=False),
    st.integers(-3, 3).map(float),
    st.sampled_from([-np.inf, -0.0, 0.0, 3e38, -3e38, float(np.nextafter(np.float32(1), 2))]),
)


@st.composite
def cases(draw: st.DrawFn) -> tuple[np.ndarray, ...]:
    """Logits [rows, vocab], with a finite one in each row; temperature, min_p, top_k, top_p."""
    vocab_size = draw(st.sampled_from([1, 3, 13, 40]))
    logits = draw(hnp.arrays(np.float32, (ROWS, vocab_size), elements=LOGITS))
    logits[~np.isfinite(logits).any(axis=1), -1] = draw(st.sampled_from([0.0, -50.0, 1e30]))

    def column(elements: st.SearchStrategy, dtype: type) -> np.ndarray:
        return draw(hnp.arrays(dtype, ROWS, elements=elements))

    shares = st.one_of(st.just(1.0), st.floats(0.015625, 0.96875, width=32))
    return (
        logits,
        column(st.sampled_from([0.015625, 0.5, 1.0, 1.5, 100.0]), np.float32),
        column(st.one_of(st.just(0.0), st.floats(0.0, 1.0, width=32)), np.float32),
        column(st.integers(0, vocab_size + 2), np.int32),
        column(shares, np.float32),
    )


# Without shrinking, which takes minutes.
@settings(max_examples=100, phases=[Phase.explicit, Phase.generate])
@given(cases())
def test_kept_tokens_follow_the_definition(case: tuple[np.ndarray, ...]) -> None:
    """A filter that keeps a token too many or too few, whatever the logits and parameters.

    Where a weight or a mass lies within rounding of its limit, either side of it is right.
    """
    logits, temperature, min_p, top_k, top_p = case
    distances = np.asarray(distances_of(logits, temperature))
    with np.errstate(over="ignore"):
        expected = (logits.max(axis=1, keepdims=True) - logits) / temperature[:, None]
    np.testing.assert_allclose(distances, expected, rtol=1e-6)
    found = np.asarray(kept_of(distances, min_p, top_k, top_p))
    assert found.any(axis=1).all()
    for row in range(ROWS):
        # 1 is off, which is no limit.
        edges = [0.0] if top_p[row] == 1 else [0.0, -1e-5, 1e-5]
        rounded = (
            reference.keep(
                distances[row],
                min(1.0, float(min_p[row]) * scale),
                int(top_k[row]),
                float(top_p[row]) + edge,
            )
            for scale in (1.0, 1 - 1e-6, 1 + 1e-6)
            for edge in edges
        )
        assert any(np.array_equal(found[row], kept) for kept in rounded)


def test_top_k_keeps_ties_of_the_last() -> None:
    """Equal logits at the edge of top_k of which only some are kept."""
    logits = [1.0, 3.0, 2.0, 2.0, 2.0, -1.0]
    assert kept(logits, top_k=1) == [1]
    assert kept(logits, top_k=2) == kept(logits, top_k=4) == [1, 2, 3, 4]
    assert kept(logits, top_k=5) == [0, 1, 2, 3, 4]
    assert kept(logits, top_k=6) == kept(logits, top_k=2**31 - 1) == [0, 1, 2, 3, 4, 5]


def test_top_k_tells_neighbouring_floats_apart() -> None:
    """A search that ends before the last bit."""
    step = float(np.nextafter(np.float32(1), np.float32(0)))
    assert kept([1.0, 0.0, step, 0.0], top_k=2) == [0, 2]
    assert kept([1.0, 0.0, step, 0.0], top_k=1) == [0]


def test_top_p_at_exact_masses() -> None:
    """A mass that just reaches top_p, which is enough, and ties at the edge, which all stay."""
    # Weights 1, 1, 1 and others that add nothing to them: each share is exactly a third.
    logits = [-200.0, 5.0, 5.0, -300.0, 5.0]
    for top_p in (0.0, 0.3, 1 / 3, 0.5, 0.999):
        assert kept(logits, top_p=top_p) == [1, 2, 4]
    assert kept(logits, top_p=1.0) == [0, 1, 2, 3, 4]
    # Weights 1, 1, 0.5, 0.5 and 0: a third is needed to reach more than two thirds.
    logits = [0.0, 0.0, -np.log(2), -np.log(2), -np.inf]
    assert kept(logits, top_p=0.66) == [0, 1]
    assert kept(logits, top_p=0.67) == [0, 1, 2, 3]


def test_min_p_at_the_edge() -> None:
    """A min_p that is not relative to the largest weight, or strict where equal is enough."""
    logits = [2.0, 2.0 - np.log(2), 2.0, -5.0]
    assert kept(logits, min_p=0.499) == [0, 1, 2]
    assert kept(logits, min_p=0.501) == kept(logits, min_p=1.0) == [0, 2]


def test_filters_follow_each_other() -> None:
    """Filters in another order, or shares of what the one before has dropped."""
    logits = np.log([0.4, 0.3, 0.2, 0.1])
    # Of the first two alone, the first has 4/7 of the mass.
    assert kept(logits, top_k=2, top_p=0.55) == [0]
    assert kept(logits, top_k=2, top_p=0.6) == [0, 1]
    # Without the last, the first two have 7/9.
    assert kept(logits, min_p=0.3, top_p=0.75) == [0, 1]
    assert kept(logits, min_p=0.3, top_p=0.8) == [0, 1, 2]
    assert kept(logits, min_p=0.6, top_k=3) == [0, 1]


def test_temperature_is_applied_before_filters() -> None:
    """Filters on probabilities at temperature 1."""
    logits = np.log([0.5, 0.3, 0.2])
    assert kept(logits, temperature=0.1, top_p=0.95) == [0]
    assert kept(logits, temperature=1.0, top_p=0.95) == [0, 1, 2]
    assert kept(logits, temperature=0.1, min_p=0.01) == [0]


@pytest.mark.parametrize("zeros", list(itertools.product([-0.0, 0.0], repeat=2)))
def test_signed_zeros_are_equal(zeros: tuple[float, float]) -> None:
    """A zero that ranks below another because of its sign."""
    assert kept([*zeros, -1.0], top_k=1) == kept([*zeros, -1.0], top_p=0.1) == [0, 1]


def test_vocabulary_of_one_and_one_hot() -> None:
    """Filters that drop the only token there is."""
    assert kept([-1e30], temperature=0.01, min_p=1.0, top_k=1, top_p=0.001) == [0]
    assert kept([-np.inf, 3.0, -np.inf], top_k=2, top_p=1.0) == [1]


def test_large_vocabulary() -> None:
    """Masses that lose digits over the vocabulary of GLM-5.3."""
    logits = np.random.default_rng(0).normal(0, 2, 154_880).astype(np.float32)
    found = len(kept(logits, top_p=0.9))
    distances = (logits.max() - logits).astype(np.float32)
    least, most = (reference.keep(distances, 0.0, 0, 0.9 + d).sum() for d in (-1e-5, 1e-5))
    assert least <= found <= most
    assert most - least < 20
    assert len(kept(logits, top_k=1000)) == 1000
