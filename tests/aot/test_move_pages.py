import jax
import pytest
from jax.sharding import PartitionSpec

from pallas_kernels.common.host_memory import as_device, as_host
from pallas_kernels.common.row_format import ROW_KINDS
from pallas_kernels.move_pages import copy_pages, offload_pages, onload_pages
from pallas_kernels.move_pages.specs import COPY_SPECS, SPECS
from scripts.aot.aot import CompileReport, compile_for_h200
from tests.aot.slabs import argument, check_kernel, integers, num_bytes, sharding

kinds = pytest.mark.parametrize("kind", ROW_KINDS)
COPIES = {name: spec for name, spec in (SPECS | COPY_SPECS).items() if name.startswith("glm")}


def check(report: CompileReport, name: str) -> None:
    (kernel,) = report.kernels
    check_kernel(kernel, name, 32)
    assert report.copies == []
    assert report.temp_bytes == 0
    assert report.launch_counts == {name: 1}


@kinds
def test_offload_pages(kind: str) -> None:
    """Host memory that is copied, or written anywhere but in place; a kernel that spills."""
    spec = SPECS[f"glm_{kind}"]

    def store(slab: jax.Array, host: jax.Array, moves: jax.Array) -> jax.Array:
        return as_host(offload_pages(slab, as_device(host), moves))

    host = argument(spec.slabs.host, host=True)
    report = compile_for_h200(
        store,
        (argument(spec.slabs.slab), host, integers(spec.moves, 2)),
        donate=[1],
        out_shardings=sharding(1, PartitionSpec(), host=True),
    )
    check(report, "offload_pages")
    assert report.host_parameters == ("host",)
    assert report.host.aliased_bytes == num_bytes(host)


@kinds
def test_onload_pages(kind: str) -> None:
    """Host memory that is copied whole, a slab not updated in place, a kernel that spills."""
    spec = SPECS[f"glm_{kind}"]

    def load(slab: jax.Array, host: jax.Array, moves: jax.Array) -> jax.Array:
        return onload_pages(slab, as_device(host), moves)

    slab, host = argument(spec.slabs.slab), argument(spec.slabs.host, host=True)
    report = compile_for_h200(load, (slab, host, integers(spec.moves, 2)), donate=[0])
    check(report, "onload_pages")
    assert report.host_parameters == ("host",)
    assert report.device.aliased_bytes == num_bytes(slab)


@pytest.mark.parametrize("name", COPIES)
def test_copy_pages(name: str) -> None:
    """A slab that is not updated in place, or refused for the odd length of its rows."""
    spec = COPIES[name]
    slab = argument(spec.slabs.slab)
    report = compile_for_h200(copy_pages, (slab, integers(spec.moves, 2)), donate=[0])
    check(report, "copy_pages")
    assert report.device.aliased_bytes == num_bytes(slab)
