"""The attention kernel in Mosaic's interpreter, which looks for races, against the reference."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common.implementation import Implementation, override_implementation
from pallas_kernels.common.row_format import RowFormat
from pallas_kernels.common.slab_spec import GLM_ROWS
from pallas_kernels.sparse_attention import (
    merge_attention,
    mosaic_gpu,
    prepare_query,
    sparse_attention,
)
from pallas_kernels.sparse_attention.column_order import LATENT
from pallas_kernels.sparse_attention.packed import unpack
from pallas_kernels.sparse_attention.specs import (
    SPECS,
    AttentionSpec,
    random_query,
    random_rows,
    random_slabs,
)
from tests.helpers.bits import assert_same_bits

pytestmark = pytest.mark.compiles
RACE = "RACE DETECTED"
LAYER, SCALE = 1, 1 / 16
JUNK = (-1, 2**31 - 1)  # what lies beyond the end of a selection


@functools.cache
def compiled(kind: str, implementation: Implementation) -> Callable:
    """The op, jitted."""
    return jax.jit(
        functools.partial(
            sparse_attention,
            scale=SCALE,
            row_format=GLM_ROWS[kind],
            implementation=implementation,
        )
    )


@functools.cache
def drawn(spec: AttentionSpec) -> tuple[jax.Array, ...]:
    rng = np.random.default_rng(0)
    slab, host = random_slabs(spec, LAYER, rng)
    return random_query(spec, rng), slab, host, random_rows(spec, rng)


def arguments(spec: AttentionSpec, counts: tuple[int, ...]) -> list[jax.Array]:
    """Arguments of the op, what is not selected being junk."""
    query, slab, host, row_ids = drawn(spec)
    count = jnp.asarray(counts, jnp.int32)
    junk = jnp.asarray(np.resize(JUNK, spec.k), jnp.int32)
    row_ids = jnp.where(jnp.arange(spec.k) < count[:, None], row_ids, junk)
    return [query, slab, host, jnp.int32(LAYER), row_ids, count]


def attend(kind: str, implementation: Implementation, *arrays: jax.Array | None) -> jax.Array:
    return compiled(kind, implementation)(*arrays)


def assert_close(found: jax.Array, expected: jax.Array) -> None:
    """Means and log-sum-exps differ by rounding alone; what follows them is zero."""
    assert found.dtype == expected.dtype and found.shape == expected.shape
    assert (found[..., LATENT + 2 :] == 0).all()
    (mean, lse), (mean_of, lse_of) = (
        (np.asarray(x) for x in unpack(each)) for each in (found, expected)
    )
    np.testing.assert_allclose(lse, lse_of, rtol=2e-6, atol=2e-6)
    assert np.abs(mean - mean_of).max() <= 2**-7 * np.abs(mean_of).max()


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        # Whole tiles and none; a block has two rows, and then one.
        ("odd_fp8", (64, 33, 0)),
        ("odd_bfloat16", (0, 99, 1)),
        ("odd_wide", (32, 5)),
    ],
)
def test_attention(name: str, counts: tuple[int, ...], capsys: pytest.CaptureFixture[str]) -> None:
    """A row of another index, layer or memory; a head or value that is another's; a tile too many;
    a slot refilled while it is read."""
    spec = SPECS[name]
    operands, kind = arguments(spec, counts), spec.slabs.row_format.kind
    found = attend(kind, "interpreter", *operands)
    assert_close(found, attend(kind, "reference", *operands))
    nothing = found[:, np.asarray(counts) == 0]
    assert (nothing[..., :LATENT] == 0).all()
    assert np.isneginf(np.asarray(unpack(nothing)[1])).all()
    assert RACE not in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["fp8", "bfloat16"])
def test_bits_of_a_row(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Bits that change with the batch, the block's earlier rows, or where a row lies."""
    spec = dataclasses.replace(SPECS["odd_fp8"], slabs=SPECS[f"odd_{kind}"].slabs, parts=1)
    spec = dataclasses.replace(spec, part_heads=64)
    query, slab, host, layer, row_ids, count = arguments(spec, (3, 40, 34))
    whole = attend(kind, "interpreter", query, slab, host, layer, row_ids, count)
    alone = attend(kind, "interpreter", query[:, 2:], slab, host, layer, row_ids[2:], count[2:])
    assert_same_bits(alone[:, 0], whole[:, 2])
    # The same rows in another order of the memories: host rows where slab rows were.
    num_rows = slab.size // slab.shape[-1]
    rows, host_rows = np.array(slab).reshape(num_rows, -1), np.array(host)
    host_rows = host_rows.reshape(-1, *host.shape[2:])
    ids = np.array(row_ids[2, :34])
    own = LAYER * slab.shape[1] * slab.shape[2]
    values = np.stack(
        [
            host_rows[each - num_rows, LAYER] if each >= num_rows else rows[(own + each) % num_rows]
            for each in ids
        ]
    )
    moved = np.where(np.arange(34) % 3 == 0, num_rows + np.arange(34) // 3, 2 * np.arange(34))
    for each, value in zip(moved, values, strict=True):
        if each >= num_rows:
            host_rows[each - num_rows, LAYER] = value
        else:
            rows[(own + each) % num_rows] = value
    elsewhere = attend(
        kind,
        "interpreter",
        query[:, 2:],
        jnp.asarray(rows).reshape(slab.shape),
        jnp.asarray(host_rows).reshape(host.shape),
        layer,
        jnp.asarray(moved, jnp.int32)[None],
        count[2:],
    )
    assert_same_bits(elsewhere[:, 0], whole[:, 2])
    assert RACE not in capsys.readouterr().out


def test_extreme_scores() -> None:
    """Weights that overflow or all vanish, a row of infinities that nobody selects."""
    spec = dataclasses.replace(SPECS["odd_bfloat16"], parts=1, part_heads=64, rows=1)
    query, slab, _, layer, row_ids, count = arguments(spec, (40,))
    query = query.at[:, :, :32].multiply(3e3)
    row_ids = jnp.where(row_ids == 1, 2, row_ids) % (slab.size // slab.shape[-1])
    row_ids = jnp.where(row_ids == 0, 3, row_ids)
    slab = slab.at[LAYER, 0, 0].set(jnp.nan)
    operands = (query, slab, None, layer, row_ids, count)
    found = attend("bfloat16", "interpreter", *operands)
    expected = attend("bfloat16", "reference", *operands)
    lse = np.asarray(unpack(expected)[1])
    assert np.abs(lse).max() > 1e4
    assert_close(found, expected)


def test_model_order() -> None:
    """An order of values that one of the functions keeps and another does not."""
    spec = dataclasses.replace(SPECS["odd_fp8"], parts=1, part_heads=64, rows=1)
    query, slab, host, layer, row_ids, count = arguments(spec, (20,))

    def run(query: jax.Array) -> jax.Array:
        prepared = prepare_query(query[..., :LATENT], query[..., LATENT:], GLM_ROWS["fp8"])
        attended = sparse_attention(
            prepared[None], slab, host, layer, row_ids, count, SCALE, GLM_ROWS["fp8"]
        )
        return merge_attention(attended, GLM_ROWS["fp8"])

    expected = np.asarray(jax.jit(run)(query[0]))
    with override_implementation("interpreter"):
        found = np.asarray(jax.jit(run)(query[0]))
        # Heads that the kernel does not take: their reference keeps the order too.
        few = np.asarray(jax.jit(run)(query[0, :, :4]))
    np.testing.assert_allclose(found, expected, rtol=0, atol=2**-7)
    np.testing.assert_allclose(few, expected[:, :4], rtol=0, atol=2**-7)


def test_planted_race(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Races that the interpreter does not see, so that the tests above prove nothing."""
    spec = dataclasses.replace(SPECS["odd_bfloat16"], parts=1, part_heads=64, rows=1)
    score = mosaic_gpu._score

    def without_waiting(*args: object) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(plgpu, "barrier_wait", lambda barrier: None)
            score(*args)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(mosaic_gpu, "_score", without_waiting)
    query, slab, host, layer, row_ids, count = arguments(spec, (20,))
    sparse_attention(
        query,
        slab,
        host,
        layer,
        row_ids,
        count,
        SCALE,
        spec.slabs.row_format,
        implementation="interpreter",
    ).block_until_ready()
    assert RACE in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "row_format", "reason"),
    [
        ({}, GLM_ROWS["float32"], "float32 rows and bfloat16 queries"),
        ({"query_dtype": "float32"}, GLM_ROWS["fp8"], "fp8 rows and float32 queries"),
        ({}, RowFormat("fp8", 256, 64, 1e-4), r"rows of 256 \+ 64 values"),
        ({"part_heads": 12}, GLM_ROWS["fp8"], "2 parts of 12 heads"),
        ({"part_heads": 16}, GLM_ROWS["fp8"], "2 parts of 16 heads"),
        ({"rows": 0}, GLM_ROWS["fp8"], "no rows"),
    ],
)
def test_unsupported_shapes(changes: dict, row_format: RowFormat, reason: str) -> None:
    """Shapes that the kernel would attend to wrongly, given to it, or that nothing takes."""
    spec = dataclasses.replace(SPECS["odd_fp8"], **changes)
    slabs = dataclasses.replace(spec.slabs, row_format=row_format)
    spec = dataclasses.replace(spec, slabs=slabs)
    run = functools.partial(sparse_attention, scale=SCALE, row_format=row_format)
    shapes = (spec.query, slabs.slab, slabs.host, jnp.int32(0), spec.row_ids, spec.count)
    with pytest.raises(ValueError, match=f"'interpreter': {reason}"):
        jax.eval_shape(functools.partial(run, implementation="interpreter"), *shapes)
    assert jax.eval_shape(run, *shapes).shape[:3] == spec.query.shape[:3]
