import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec

from glm53.model.sharding import make_mesh
from pallas_kernels.common.host_memory import as_device
from pallas_kernels.common.row_format import ROW_KINDS
from pallas_kernels.fetch_rows import fetch_rows
from pallas_kernels.fetch_rows.specs import SPECS
from scripts.aot.aot import compile_for_h200
from tests.aot.slabs import HOST, argument, check_kernel, integers, num_bytes


@pytest.mark.parametrize("kind", ROW_KINDS)
def test_fetch_rows(kind: str) -> None:
    """Host memory that is copied whole, a buffer not updated in place, a kernel that spills."""
    spec = SPECS[f"glm_{kind}"]
    rows, host = argument(spec.buffer), argument(spec.slabs.host, host=True)
    listed, one = integers(spec.rows), integers()
    report = compile_for_h200(
        lambda rows, host, *lists: fetch_rows(rows, as_device(host), *lists),
        (rows, host, one, listed, listed, one),
        donate=[0],
    )
    (kernel,) = report.kernels
    check_kernel(kernel, "fetch_rows", 48)
    assert report.host_parameters == ("host",)
    assert report.copies == []
    assert report.temp_bytes == 0
    assert report.device.aliased_bytes == num_bytes(rows)
    assert report.launch_counts == {"fetch_rows": 1}


def test_eight_devices() -> None:
    """Host memory or a buffer that is copied where shard_map or scan meets the kernel."""
    spec, everywhere = SPECS["glm_fp8"], PartitionSpec()

    @functools.partial(
        jax.shard_map,
        mesh=make_mesh(8),
        in_specs=(everywhere, HOST, everywhere, everywhere),
        out_specs=everywhere,
        check_vma=False,
    )
    def step(rows: jax.Array, host: jax.Array, listed: jax.Array, count: jax.Array) -> jax.Array:
        host = as_device(host)

        def fetch(rows: jax.Array, layer: jax.Array) -> tuple[jax.Array, None]:
            return fetch_rows(rows, host, layer, listed, listed, count), None

        return lax.scan(fetch, rows, 3 + jnp.arange(76))[0]

    rows, host = argument(spec.buffer, 8), argument(spec.slabs.host, 8, HOST, host=True)
    lists = (integers(spec.rows, num_devices=8), integers(num_devices=8))
    report = compile_for_h200(step, (rows, host, *lists), donate=[0])
    assert report.host_parameters == ("host",)
    assert report.copies == []
    assert report.device.aliased_bytes == num_bytes(rows)
    assert report.temp_bytes < 4 << 10
    assert report.launch_counts["fetch_rows"] == 76


def test_slices() -> None:
    """A kernel that XLA joins with slices of its lists, and that then writes to another array."""
    spec = SPECS["glm_fp8"]
    rows, host = argument(spec.buffer), argument(spec.slabs.host, host=True)

    def step(rows: jax.Array, host: jax.Array, lists: jax.Array, count: jax.Array) -> jax.Array:
        return fetch_rows(rows, as_device(host), 3, lists[0], lists[1], count)

    lists = integers(2, spec.rows)
    report = compile_for_h200(step, (rows, host, lists, integers()), donate=[0])
    assert report.copies == []
    assert report.temp_bytes < 32 << 10  # the lists
    assert report.launch_counts["fetch_rows"] == 1
    assert report.launches <= 3
