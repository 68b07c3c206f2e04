import functools

import jax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from glm53.model.sharding import make_mesh
from pallas_kernels.resolve_rows import resolve_rows
from pallas_kernels.resolve_rows.specs import SPECS
from scripts.aot.aot import compile_for_h200

ONE = NamedSharding(make_mesh(1), PartitionSpec())


@pytest.mark.parametrize(
    "name",
    [
        "glm_1x8",
        "glm_4x8",
        pytest.param("glm_4x32", marks=pytest.mark.slow),
        pytest.param("glm_6x32", marks=pytest.mark.slow),
    ],
)
def test_resolution(name: str) -> None:
    """Row-cache rows that spill, state that is copied, a loop or a sort of many launches."""
    spec = SPECS[name]
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=ONE), spec.shapes
    )
    step = functools.partial(resolve_rows, **spec.static, implementation="mosaic_gpu")
    report = compile_for_h200(step, shapes, donate=(0,))
    (kernel,) = report.kernels
    assert kernel.spilled_bytes == 0
    assert kernel.shared_bytes <= 36 << 10
    assert report.copies == []
    state = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(spec.shapes[0]))
    assert report.device.aliased_bytes == state
    assert report.loops == ()
    assert report.launch_counts["resolve_rows"] == 1
    assert report.launches <= 14
