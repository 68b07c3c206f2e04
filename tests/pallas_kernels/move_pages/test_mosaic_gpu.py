"""The kernels of page moves in Mosaic's interpreter, which looks for races, against references."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common import ring_copy
from pallas_kernels.common.row_format import RowFormat
from pallas_kernels.common.slab_spec import SlabSpec, random_bytes
from pallas_kernels.move_pages import copy_pages, mosaic_gpu, offload_pages, reference
from pallas_kernels.move_pages.specs import COPY_SPECS, SPECS, random_moves
from tests.helpers.bits import assert_same_bits

pytestmark = pytest.mark.compiles
INTERPRET = plgpu.InterpretGPUParams(detect_races=True)
RACE = "RACE DETECTED"
COPIES = {"odd_narrow": SPECS["odd_narrow"]} | COPY_SPECS


@pytest.fixture(autouse=True)
def few_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that few transfers go round the ring."""
    monkeypatch.setattr(ring_copy, "MAX_SLOTS", 3)


@pytest.mark.parametrize("name", ["odd_narrow", "odd_bfloat16", "odd_fp8"])
def test_store_and_load_pages(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Layers mixed up or missing, a page at another place, padding that moves one."""
    spec, rng = SPECS[name], np.random.default_rng(0)
    slab, host = (random_bytes(rng, shape) for shape in (spec.slabs.slab, spec.slabs.host))
    on_device, in_host = spec.slabs.device_pages, spec.slabs.host_pages
    store, load = (
        jax.jit(functools.partial(kernel, num_blocks=2, interpret=INTERPRET))
        for kernel in (mosaic_gpu.offload_pages, mosaic_gpu.onload_pages)
    )
    for count in (0, 3):
        moves = random_moves(spec, rng, on_device, in_host, count)
        found, expected = store(slab, host, moves), reference.offload_pages(slab, host, moves)
        assert_same_bits(found, expected)
        moves = random_moves(spec, rng, in_host, on_device, count)
        found, expected = load(slab, host, moves), reference.onload_pages(slab, host, moves)
        assert_same_bits(found, expected)
    assert RACE not in capsys.readouterr().out


@pytest.mark.parametrize("name", [name for name in COPIES if name.startswith("odd")])
def test_copy_pages(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A layer or a part of a page that is not copied, or from elsewhere; rows of odd length."""
    spec, rng = COPIES[name], np.random.default_rng(0)
    slab, pages = random_bytes(rng, spec.slabs.slab), spec.slabs.device_pages
    copy = jax.jit(functools.partial(mosaic_gpu.copy_pages, num_blocks=2, interpret=INTERPRET))
    for count in (0, 3):
        moves = random_moves(spec, rng, pages, pages, count)
        assert_same_bits(copy(slab, moves), reference.copy_pages(slab, moves))
    assert RACE not in capsys.readouterr().out


@pytest.mark.parametrize("size", [1, 7])
def test_length_of_a_list(size: int, capsys: pytest.CaptureFixture[str]) -> None:
    """A list whose end is not found, above all a full one."""
    slabs = SlabSpec(
        row_format=RowFormat("float32", 8, 0, 1e-4),
        layers=1,
        rows_per_page=1,
        device_pages=16,
        host_pages=0,
    )
    slab = random_bytes(np.random.default_rng(0), slabs.slab)
    copy = jax.jit(functools.partial(mosaic_gpu.copy_pages, num_blocks=1, interpret=INTERPRET))
    for count in (0, 1, size // 2, size - 1, size):
        pairs = jnp.stack([jnp.arange(size), jnp.arange(size) + 8], axis=1)
        moves = jnp.where(jnp.arange(size)[:, None] < count, pairs, -1)
        assert_same_bits(copy(slab, moves), reference.copy_pages(slab, moves))
    assert RACE not in capsys.readouterr().out


def test_unsupported() -> None:
    """Pages that no asynchronous copy can take, given to a kernel, or refused without reason."""
    row = RowFormat("bfloat16", 3, 0, 1e-4)
    slabs = SlabSpec(row_format=row, layers=2, rows_per_page=4, device_pages=4, host_pages=4)
    rng, moves = np.random.default_rng(0), jnp.array([[1, 2], [-1, -1]])
    slab, host = random_bytes(rng, slabs.slab), random_bytes(rng, slabs.host)
    with pytest.raises(ValueError, match="rows of 6 bytes"):
        offload_pages(slab, host, moves, implementation="interpreter")
    with pytest.raises(ValueError, match="a layer's pages of 24 bytes"):
        copy_pages(slab, moves, implementation="interpreter")
    assert_same_bits(copy_pages(slab, moves), reference.copy_pages(slab, moves))
