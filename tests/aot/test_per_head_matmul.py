import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from glm53.model.sharding import make_mesh
from pallas_kernels.matmul import MatrixStack
from pallas_kernels.per_head_matmul import bind
from pallas_kernels.per_head_matmul.specs import SPECS
from scripts.aot.aot import compile_for_h200
from tests.aot.slabs import check_kernel


@pytest.mark.parametrize("tokens", [8, 64, 128])
@pytest.mark.parametrize("name", [name for name in SPECS if name.startswith("glm")])
def test_products(name: str, tokens: int) -> None:
    """Spilled registers, a copy of weights, rows or products."""
    spec = SPECS[name]

    def multiply(stack: MatrixStack, layer: jax.Array, rows: jax.Array) -> jax.Array:
        return bind(stack, layer, taken=spec.taken, transpose=spec.transpose)(rows)

    one = NamedSharding(make_mesh(1), PartitionSpec())
    arguments = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=one),
        [spec.stack, jax.ShapeDtypeStruct((), jnp.int32), spec.rows(tokens)],
    )
    report = compile_for_h200(multiply, arguments)
    (kernel,) = report.kernels
    check_kernel(kernel, "per_head_matmul", 168)
    assert report.copies == []
    assert report.temp_bytes <= 1 << 10
    assert report.launch_counts == {"per_head_matmul": 1}
