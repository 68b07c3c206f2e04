import functools

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.append_rows import append_rows
from pallas_kernels.append_rows.specs import SPECS
from scripts.aot.aot import compile_for_h200
from tests.aot.slabs import argument, check_kernel, integers, num_bytes


@pytest.mark.parametrize("name", [name for name in SPECS if name.startswith("glm")])
def test_append_rows(name: str) -> None:
    """A slab not updated in place, a kernel that spills, rows that are quantised before it runs."""
    spec = SPECS[name]
    row_format, slab = spec.slabs.row_format, argument(spec.slabs.slab)

    def values(width: int) -> jax.ShapeDtypeStruct:
        return argument(jax.ShapeDtypeStruct((spec.tokens, width), jnp.dtype(spec.dtype)))

    pages = integers(spec.tokens)
    arguments = (
        slab,
        integers(),
        values(row_format.latent_dim),
        values(row_format.rope_dim),
        pages,
        pages,
    )
    append = functools.partial(append_rows, row_format=row_format)
    report = compile_for_h200(lambda *arrays: append(*arrays), arguments, donate=[0])
    (kernel,) = report.kernels
    check_kernel(kernel, "append_rows", 32)
    assert report.copies == []
    assert report.temp_bytes == 0
    assert report.device.aliased_bytes == num_bytes(slab)
    assert report.launch_counts == {"append_rows": 1}
