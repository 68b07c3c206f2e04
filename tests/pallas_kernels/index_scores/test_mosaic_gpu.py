"""The scoring kernel in Mosaic's interpreter, which looks for races, against the reference."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common.implementation import Implementation
from pallas_kernels.common.row_format import RowFormat
from pallas_kernels.common.slab_spec import GLM_KEYS
from pallas_kernels.index_scores import (
    KEY_BLOCK,
    batched_index_scores,
    mosaic_gpu,
)
from pallas_kernels.index_scores.specs import (
    SPECS,
    ScoreSpec,
    random_keys,
    random_pages,
    random_queries,
)
from pallas_kernels.select_topk import select_topk
from tests.helpers.bits import assert_same_bits

pytestmark = pytest.mark.compiles
RACE = "RACE DETECTED"
LAYER = 1
# A sixteenth of the bound that the operation states: roundings do not all point the same way.
TOLERANCE = 2.0**-20


@functools.cache
def compiled(name: str, implementation: Implementation) -> Callable:
    """The op of a spec, jitted."""
    return jax.jit(
        functools.partial(
            batched_index_scores,
            row_format=SPECS[name].row_format,
            implementation=implementation,
        )
    )


@functools.cache
def drawn(spec: ScoreSpec) -> tuple[jax.Array, ...]:
    rng = np.random.default_rng(0)
    query, weights = random_queries(spec, rng)
    return query, weights, random_keys(spec, LAYER, rng), jnp.int32(LAYER), random_pages(spec, rng)


def arguments(spec: ScoreSpec, num_keys: tuple[int, ...]) -> list[jax.Array]:
    return [*drawn(spec), jnp.array(num_keys, jnp.int32)]


def magnitudes(spec: ScoreSpec, query, weights, keys, layer, pages, num_keys) -> np.ndarray:
    """`sum_h |w[h]| * sum_d |q[h, d] * k[s, d]|`, which a score's error is in proportion to."""
    values = np.abs(np.asarray(spec.row_format.unpack(keys[layer, pages]), np.float64))
    values = values.reshape(spec.sequences, spec.context, -1)
    query, weights = (
        np.abs(np.asarray(x.astype(jnp.float32), np.float64)) for x in (query, weights)
    )
    products = np.einsum("nrhd,nsd->nrsh", query, values)
    return np.einsum("nrsh,nrh->nrs", products, weights)


def assert_close(found: np.ndarray, expected: np.ndarray, scale: np.ndarray) -> None:
    """The same blocks are left out, and what was scored differs by rounding alone."""
    found, expected = np.asarray(found), np.asarray(expected)
    assert found.dtype == expected.dtype and found.shape == expected.shape
    scored = expected > -np.inf
    np.testing.assert_array_equal(found > -np.inf, scored)
    error = np.abs(np.where(scored, found, 0) - np.where(scored, expected, 0))
    assert (error <= TOLERANCE * scale).all(), (error / scale).max()


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("odd_fp8", [(192, 1, 0)]),
        ("odd_fp8_float32", [(672, KEY_BLOCK, KEY_BLOCK + 1)]),
        ("odd_fp8_e4m3", [(5, 0, 128)]),
        ("odd_bfloat16", [(513, 0, 768), (0, 0, 0)]),
        ("odd_bfloat16_float32", [(100, 128, 1)]),
    ],
)
def test_scores(name: str, counts: list[tuple], capsys: pytest.CaptureFixture[str]) -> None:
    """A key, page, layer, head or row that is another's; a block left out, or scored in vain."""
    spec = SPECS[name]
    for num_keys in counts:
        operands = arguments(spec, num_keys)
        expected = compiled(name, "reference")(*operands)
        found = compiled(name, "interpreter")(*operands)
        assert_close(found, expected, magnitudes(spec, *operands))
    assert RACE not in capsys.readouterr().out


def test_extreme_queries() -> None:
    """Scaling that overflows, loses small heads, or divides a head of zeros by its size."""
    spec = SPECS["odd_fp8"]
    operands = arguments(spec, (192, 192, 192))
    factors = np.ones((spec.sequences, spec.rows, spec.heads, 1), np.float32)
    factors[0, 0] = 2.0 ** np.linspace(-60, 60, spec.heads)[:, None].round()
    factors[0, 1] = 0
    factors[1, 0, ::2] = -0.0
    factors[2, 2] = 2.0**40
    operands[0] = operands[0] * jnp.asarray(factors, operands[0].dtype)
    expected = compiled("odd_fp8", "reference")(*operands)
    found = compiled("odd_fp8", "interpreter")(*operands)
    assert (found[0, 1] == 0).all()
    assert_close(found, expected, magnitudes(spec, *operands))


def test_selection() -> None:
    """Equal keys that score apart, and a selection that differs by more than rounding."""
    spec = SPECS["odd_fp8"]
    operands = arguments(spec, (192, 192, 192))
    keys = operands[2]
    operands[2] = keys.at[LAYER, :, 1::2].set(keys[LAYER, :, 0::2])
    expected = compiled("odd_fp8", "reference")(*operands)
    found = compiled("odd_fp8", "interpreter")(*operands)
    assert_same_bits(found[..., 1::2], found[..., 0::2])
    scale = magnitudes(spec, *operands)
    positions, last = jnp.arange(spec.context), jnp.full(spec.rows, spec.context - 1)
    for sequence in range(spec.sequences):
        selected, should = (
            select_topk(each[sequence], positions, 0, last, 33)[1] for each in (found, expected)
        )
        for row in range(spec.rows):
            scores = np.asarray(expected[sequence, row])
            least = scores[np.asarray(should[row])].min()
            swapped = np.setxor1d(selected[row], should[row])
            allowed = 2 * TOLERANCE * scale[sequence, row].max()
            assert (np.abs(scores[swapped] - least) <= allowed).all()


def test_bits_do_not_depend_on_neighbours() -> None:
    """A score that changes with its sequence's or page's number, or with other rows' queries."""
    spec = SPECS["odd_fp8"]
    query, weights, keys, layer, pages, num_keys = arguments(spec, (192, 192, 192))
    run = compiled("odd_fp8", "interpreter")
    before = run(query, weights, keys, layer, pages, num_keys)
    order = jnp.array([2, 0, 1])
    query, weights, pages = query[order].at[:, 1].multiply(3), weights[order], pages[order]
    keys, pages = jnp.roll(keys, 5, axis=1), (pages + 5) % spec.num_pages
    after = run(query, weights, keys, layer, pages, jnp.array([192, 0, 192]))
    for index in (0, 2):
        for row in (0, 2):
            assert_same_bits(after[index, row], before[order[index], row])


def test_planted_race(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Races that the interpreter does not see, so that the tests above prove nothing."""
    spec = SPECS["odd_bfloat16_float32"]
    score = mosaic_gpu._Warpgroup.score
    no_wait = plgpu.barrier_wait

    def without_waiting(*args: object) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(plgpu, "barrier_wait", lambda barrier: None)
            score(*args)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(mosaic_gpu._Warpgroup, "score", without_waiting)
    query, weights, keys, layer, pages, num_keys = arguments(spec, (128, 0, 0))
    batched_index_scores(
        query, weights, keys, layer, pages, num_keys, spec.row_format, implementation="interpreter"
    ).block_until_ready()
    assert RACE in capsys.readouterr().out
    assert plgpu.barrier_wait is no_wait


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"row_format": RowFormat("float32", 128, 0, 1e-4)}, "float32 keys"),
        ({"row_format": RowFormat("fp8", 64, 0, 1e-4)}, "keys of 64 values"),
        ({"heads": 12}, "12 heads"),
        ({"rows_per_page": 8}, "8 rows per page"),
        ({"rows": 0}, "3 sequences of 0 rows"),
        ({"sequences": 257}, "257 sequences of 3 rows"),
        ({"row_format": GLM_KEYS["bfloat16"], "query_dtype": "float8_e4m3fn"}, "e4m3 queries"),
    ],
)
def test_unsupported_shapes(changes: dict, reason: str) -> None:
    """Shapes that the kernel would score wrongly, given to it, or that nothing scores."""
    spec = dataclasses.replace(SPECS["odd_fp8"], **changes)
    score = functools.partial(batched_index_scores, row_format=spec.row_format)
    shapes = (spec.query, spec.head_weights, spec.index_keys, jnp.int32(0), spec.pages)
    with pytest.raises(ValueError, match=f"'interpreter': {reason}"):
        jax.eval_shape(
            functools.partial(score, implementation="interpreter"), *shapes, spec.num_keys
        )
    scores = jax.eval_shape(score, *shapes, spec.num_keys)
    assert scores.shape == (spec.sequences, spec.rows, spec.context)
