import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from glm53.model.sharding import make_mesh
from pallas_kernels.index_scores import batched_index_scores
from pallas_kernels.index_scores.plan import BLOCK
from pallas_kernels.index_scores.specs import SPECS
from scripts.aot.aot import CompileReport, compile_for_h200

SHARED_BYTES = 227 << 10
"""Shared memory of a multiprocessor."""

REGISTERS = {"glm_fp8_8x1_1m": 168, "odd_fp8_float32": 168, "odd_fp8_e4m3": 168}
"""Most registers a thread where three warpgroups share a multiprocessor; two have 255 each."""


def compiled(name: str) -> CompileReport:
    spec = SPECS[name]
    one = NamedSharding(make_mesh(1), PartitionSpec())
    layer = jax.ShapeDtypeStruct((), jnp.int32)
    operands = (spec.query, spec.head_weights, spec.index_keys, layer, spec.pages, spec.num_keys)
    step = functools.partial(
        batched_index_scores, row_format=spec.row_format, implementation="mosaic_gpu"
    )
    return compile_for_h200(
        step, [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=one) for x in operands]
    )


def check_kernel(report: CompileReport, registers: int) -> None:
    (kernel,) = report.kernels
    assert kernel.spilled_bytes == 0
    assert kernel.registers <= registers
    assert kernel.shared_bytes <= SHARED_BYTES
    assert report.launch_counts["index_scores"] == 1
    assert report.launches <= 6


@pytest.mark.parametrize(
    "name",
    [
        # Shorter contexts have the same kernels.
        pytest.param(name, marks=pytest.mark.slow if name.endswith("_128k") else ())
        for name in SPECS
    ],
)
def test_scores(name: str) -> None:
    """Products kept in more registers than there are, a copy of the keys or of the scores, and
    e4m3 queries that are converted for tensor cores that read them as they are."""
    spec, report = SPECS[name], compiled(name)
    check_kernel(report, REGISTERS.get(name, 255))
    if spec.query_dtype == "float8_e4m3fn":
        # Only the queries change their order.
        assert len(report.copies) <= 1
        assert report.temp_bytes <= 64 << 10
        return
    assert report.copies == []
    # Queries in their parts, and counts; a context of no whole blocks is cut from more.
    parts = 3 * spec.query.size * jnp.dtype(jnp.float32).itemsize
    cut = 0 if spec.context % BLOCK == 0 else 8 * spec.sequences * spec.rows * spec.context
    assert report.temp_bytes <= parts + cut + (64 << 10)


def test_sharded() -> None:
    """Keys that are gathered or copied before each device scores its own."""
    spec, mesh = SPECS["glm_fp8_8x4_128k"], make_mesh(8)
    sharded, everywhere = PartitionSpec(None, None, "model"), PartitionSpec()

    def score(query, weights, keys, layer, pages, num_keys):
        return batched_index_scores(
            query,
            weights,
            keys,
            layer,
            pages,
            num_keys,
            spec.row_format,
            implementation="mosaic_gpu",
        )

    specs = (everywhere, everywhere, sharded, everywhere, everywhere, everywhere)
    layers, pages, rows, width = spec.index_keys.shape
    keys = jax.ShapeDtypeStruct((layers, pages, 8 * rows, width), spec.index_keys.dtype)
    layer = jax.ShapeDtypeStruct((), jnp.int32)
    operands = (spec.query, spec.head_weights, keys, layer, spec.pages, spec.num_keys)
    report = compile_for_h200(
        jax.shard_map(score, mesh=mesh, in_specs=specs, out_specs=sharded, check_vma=False),
        [
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))
            for x, spec in zip(operands, specs, strict=True)
        ],
    )
    check_kernel(report, 255)
    assert report.copies == []
    assert report.collectives == ()
