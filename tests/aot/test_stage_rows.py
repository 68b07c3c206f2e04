import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec

from glm53.model.sharding import make_mesh
from pallas_kernels.common.host_memory import as_device
from pallas_kernels.common.row_format import ROW_KINDS
from pallas_kernels.stage_rows import stage_pages, stage_rows
from pallas_kernels.stage_rows.specs import SPECS
from scripts.aot.aot import compile_for_h200
from tests.aot.slabs import HOST, SLAB, argument, check_kernel, integers, num_bytes

kinds = pytest.mark.parametrize("kind", ROW_KINDS)


def check(name: str, op: Any, kind: str, *lists: jax.ShapeDtypeStruct) -> None:
    """Compiles an op on both slabs for one H200."""
    slabs = SPECS[f"glm_{kind}"].slabs
    slab, host = argument(slabs.slab), argument(slabs.host, host=True)
    report = compile_for_h200(
        lambda slab, host, *lists: op(slab, as_device(host), *lists),
        (slab, host, *lists),
        donate=[0],
    )
    (kernel,) = report.kernels
    check_kernel(kernel, name, 48)
    assert report.host_parameters == ("host",)
    assert report.copies == []
    assert report.temp_bytes == 0
    assert report.device.aliased_bytes == num_bytes(slab)
    assert report.launch_counts == {name: 1}


@kinds
def test_stage_rows(kind: str) -> None:
    """Host memory that is copied whole, a slab not updated in place, a kernel that spills."""
    rows, one = integers(SPECS[f"glm_{kind}"].misses), integers()
    check("stage_rows", stage_rows, kind, one, one, rows, rows, one)


@kinds
def test_stage_pages(kind: str) -> None:
    """As for rows."""
    pages, one = integers(SPECS[f"glm_{kind}"].pages), integers()
    check("stage_pages", stage_pages, kind, one, pages, pages, one)


def test_eight_devices() -> None:
    """A slab that is copied where shard_map or scan meets the kernel."""
    spec, everywhere = SPECS["glm_fp8"], PartitionSpec()

    @functools.partial(
        jax.shard_map,
        mesh=make_mesh(8),
        in_specs=(SLAB, HOST, everywhere, everywhere),
        out_specs=SLAB,
        check_vma=False,
    )
    def step(slab: jax.Array, host: jax.Array, rows: jax.Array, count: jax.Array) -> jax.Array:
        host = as_device(host)

        def group(slab: jax.Array, first_layer: jax.Array) -> tuple[jax.Array, None]:
            slab = stage_rows(slab, host, first_layer, 4, rows, rows, count)
            return stage_pages(slab, host, first_layer, rows, rows, count), None

        return lax.scan(group, slab, 3 + 4 * jnp.arange(19))[0]

    slab = argument(spec.slabs.slab, 8, SLAB)
    host = argument(spec.slabs.host, 8, HOST, host=True)
    arguments = (slab, host, integers(64, num_devices=8), integers(num_devices=8))
    report = compile_for_h200(step, arguments, donate=[0])
    assert report.host_parameters == ("host",)
    assert report.copies == []
    assert report.device.aliased_bytes == num_bytes(slab) // 8
    assert report.temp_bytes < 4 << 10
    assert report.launch_counts["stage_rows"] == report.launch_counts["stage_pages"] == 19
