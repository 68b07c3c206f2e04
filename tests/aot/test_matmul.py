import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from glm53.model.sharding import make_mesh
from pallas_kernels.matmul import MatrixStack, bind_together
from pallas_kernels.matmul.plan import ROWS, choose_split, num_tiles
from pallas_kernels.matmul.specs import SPECS, MatmulSpec
from scripts.aot.aot import CompileReport, compile_for_h200
from tests.aot.slabs import check_kernel

GLM = [name for name in SPECS if not name.startswith(("odd", "many"))]


def multiply(
    stacks: list[MatrixStack], index: jax.Array, rows: jax.Array, **options: Any
) -> tuple[jax.Array, ...]:
    indices = [(index,) * (stack.weight.ndim - 2) for stack in stacks]
    return bind_together(stacks, indices, **options)(rows)


def compiled(spec: MatmulSpec, tokens: int, **options: Any) -> CompileReport:
    one = NamedSharding(make_mesh(1), PartitionSpec())
    index = jax.ShapeDtypeStruct((), jnp.int32)
    arguments = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=one),
        [spec.stacks(), index, spec.rows(tokens)],
    )
    return compile_for_h200(functools.partial(multiply, **options), arguments)


@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        # Fewer rows have the same code and fewer registers, more are several tiles.
        pytest.param(name, tokens, marks=() if tokens == most else pytest.mark.slow)
        for name in GLM
        for most in (56 if SPECS[name].fp8 else 32,)
        for tokens in {8, 32, most, 128}
    ],
)
def test_products(name: str, tokens: int) -> None:
    """Spilled registers, a copy of weights, rows or products, a launch for a scalar."""
    spec = SPECS[name]
    dtype = None if spec.fp8 else jnp.float32
    report = compiled(spec, tokens, dtype=dtype)
    (kernel,) = report.kernels
    check_kernel(kernel, "matmul", 128)
    assert report.copies == []
    assert report.launch_counts["matmul"] == 1
    # Parts of a sum are added up in one launch for each matrix, which also cuts off what a tile
    # has more than the matrix.
    split = choose_split(spec.outputs, spec.inputs)
    padded = [num_tiles(outputs) * ROWS for outputs in spec.outputs]
    if split == 1 and tuple(padded) == spec.outputs:
        assert report.launches == 1
        assert report.temp_bytes <= 1 << 10
    else:
        assert report.launches == 1 + len(spec.outputs)
        assert report.temp_bytes <= 4 * split * tokens * sum(padded) + (1 << 10)


@pytest.mark.parametrize(
    "name", ["q_a_and_kv_a", "q_a_and_kv_a_rounded", "o", "o_rounded", "shared_down", "router"]
)
def test_many_rows(name: str) -> None:
    """Spilled registers, a copy of weights or products, weights that are converted in memory."""
    spec, tokens = SPECS[name], 8192
    report = compiled(spec, tokens, many_rows=True)
    for kernel in report.kernels:
        check_kernel(kernel, "matmul_many_rows", 168)
    assert report.launch_counts["matmul_many_rows"] == len(spec.outputs)
    # Rows that are converted, padded, and cut off again.
    assert report.launches <= 7 * len(spec.outputs)
    assert report.temp_bytes <= 2 * tokens * (3 * spec.inputs + 2 * sum(spec.outputs)) + (1 << 21)
