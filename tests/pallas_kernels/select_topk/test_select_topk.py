import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels.select_topk import merge_topk, select_topk

pytestmark = pytest.mark.compiles
CONTEXT = 24
NONE = -1
FIRST = 1  # of the merged selections, as in the MTP layer
# Few distinct values, so that ties are the rule.
SCORES = st.one_of(
    st.sampled_from([-np.inf, -1.0, -0.0, 0.0, 1.0, np.inf]),
    st.floats(width=32, allow_nan=False, allow_subnormal=False),
)
ROWS = st.one_of(
    st.lists(SCORES, min_size=CONTEXT, max_size=CONTEXT),
    SCORES.map(lambda score: [score] * CONTEXT),
    st.lists(st.sampled_from([-0.0, 0.0]), min_size=CONTEXT, max_size=CONTEXT),
)
LAST = st.one_of(st.just(-1), st.integers(-1, CONTEXT - 1), st.just(CONTEXT - 1))
BATCH = st.tuples(ROWS, ROWS)
SIZES = st.sampled_from([1, 5, CONTEXT + 7])


@functools.cache
def compiled(k: int, first: int) -> Callable:
    return jax.jit(lambda scores, positions, last: select_topk(scores, positions, first, last, k))


@functools.cache
def compiled_sharded(k: int, shards: int) -> Callable:
    """Returns selection over a context of which shard i has the positions i modulo `shards`: the
    parts of all shards."""

    def run(scores: jax.Array, last: jax.Array) -> jax.Array:
        found = []
        for shard in range(shards):
            positions = jnp.arange(shard, CONTEXT, shards)
            part = scores[:, shard::shards]
            found.append(select_topk(part, positions, FIRST, last, k, ordered=False))
        lists = [jnp.stack(each) for each in zip(*found, strict=True)]
        return jax.vmap(functools.partial(merge_topk, *lists))(jnp.arange(shards))

    return jax.jit(run)


def best(scores: list[float], first: int, last: int, k: int) -> list[int]:
    """Returns the positions to select, best first."""
    allowed = [p for p in range(first, last + 1) if scores[p] > -np.inf]
    return sorted(allowed, key=lambda position: (-scores[position], position))[:k]


def filled(values: list, k: int, missing: float) -> list:
    return values + [missing] * (k - len(values))


@given(BATCH, st.tuples(LAST, LAST), SIZES, st.sampled_from([0, 2]))
def test_selection(scores: tuple, lasts: tuple[int, int], k: int, first: int) -> None:
    """A selection that is not the best by score, then position, or not within its bounds."""
    # Positions that are not their own index.
    positions = np.arange(CONTEXT, dtype=np.int32) * 3 + 1
    bounds = np.asarray(lasts, np.int32) * 3 + 1
    found = compiled(k, first * 3 + 1)(np.asarray(scores, np.float32), positions, bounds)
    for row, last, values, selected in zip(scores, lasts, *found, strict=True):
        expected = best(row, first, last, k)
        assert selected.tolist() == filled([3 * index + 1 for index in expected], k, NONE)
        assert values.tolist() == filled([row[index] for index in expected], k, -np.inf)
        # Told apart by their bits, equal scores would be ranked apart in a merge.
        assert not np.signbit(values[values == 0]).any()


@given(BATCH, st.tuples(LAST, LAST), st.sampled_from([5, CONTEXT]))
@pytest.mark.parametrize("shards", range(1, 9))
def test_merge_equals_the_unsharded_selection(
    shards: int, scores: tuple, lasts: tuple[int, int], k: int
) -> None:
    """A selection that depends on the number of devices, or is not in ascending order."""
    parts = compiled_sharded(k, shards)(np.asarray(scores, np.float32), np.asarray(lasts, np.int32))
    for shard, part in enumerate(parts):
        for row, last, selected in zip(scores, lasts, part, strict=True):
            owned = [p for p in sorted(best(row, FIRST, last, k)) if p % shards == shard]
            assert selected.tolist() == filled(owned, k, NONE)


def test_merge_of_signed_zeros() -> None:
    """Zeros of either sign ranked apart by the merge itself."""
    scores = jnp.asarray([[[0.0, 0.0]], [[-0.0, -1.0]], [[0.0, -0.0]]])
    positions = jnp.asarray([[[4, 7]], [[2, 5]], [[3, 9]]])
    for order in (slice(None), slice(None, None, -1)):
        lists = scores[order], positions[order]
        parts = [merge_topk(*lists, jnp.int32(shard)).tolist() for shard in range(3)]
        assert parts[order] == [[[NONE, NONE]], [[2, NONE]], [[3, NONE]]]


def test_ties_at_full_size() -> None:
    """An order of ties that holds for short contexts only; ReLU makes most scores exactly 0."""
    rng = np.random.default_rng(0)
    scores = np.maximum(rng.normal(size=20_000), 1.5).astype(np.float32)
    scores = np.where(scores > 1.5, scores, np.where(rng.random(20_000) < 0.5, 0.0, -0.0))
    ranked, last = jnp.asarray(scores[None], jnp.float32), jnp.asarray([19_990])
    _, found = select_topk(ranked, jnp.arange(20_000), 1, last, 2048)
    assert found[0].tolist() == best(scores.tolist(), 1, 19_990, 2048)
