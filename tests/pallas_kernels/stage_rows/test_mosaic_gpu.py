"""The staging kernels in Mosaic's interpreter, which looks for races, against the references."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common import ring_copy
from pallas_kernels.common.row_format import RowFormat
from pallas_kernels.common.slab_spec import SlabSpec, random_bytes
from pallas_kernels.stage_rows import mosaic_gpu, reference, stage_pages, stage_rows
from pallas_kernels.stage_rows.specs import SPECS, StageSpec, page_lists, row_lists
from tests.helpers.bits import assert_same_bits

pytestmark = pytest.mark.compiles
INTERPRET = plgpu.InterpretGPUParams(detect_races=True)
RACE = "RACE DETECTED"
JUNK = (-1, 2**31 - 1)  # what lies beyond the end of a list

cases = pytest.mark.parametrize("name", ["odd_narrow", "odd_bfloat16", "odd_fp8"])


@pytest.fixture(autouse=True)
def few_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that few transfers go round the ring."""
    monkeypatch.setattr(ring_copy, "MAX_SLOTS", 3)


def junk_beyond(values: jax.Array, count: int) -> jax.Array:
    return values.at[count:].set(jnp.asarray(np.resize(JUNK, values.size - count), jnp.int32))


@cases
def test_stage_rows(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A row of another layer or index, one beyond the list, a slot refilled while it is read."""
    spec, rng = SPECS[name], np.random.default_rng(0)
    slab, host = (random_bytes(rng, shape) for shape in (spec.slabs.slab, spec.slabs.host))
    kernel = jax.jit(functools.partial(mosaic_gpu.stage_rows, num_blocks=2, interpret=INTERPRET))
    for first, num_layers, count in [(0, 7, 4), (1, 4, 9), (4, 3, 1), (2, 5, 0)]:
        host_rows, device_rows = (junk_beyond(each, count) for each in row_lists(spec, rng))
        scalars = (jnp.int32(first), jnp.int32(num_layers))
        lists = (host_rows, device_rows, jnp.int32(count))
        found = kernel(slab, host, *scalars, *lists)
        assert_same_bits(found, reference.stage_rows(slab, host, *scalars, *lists))
    assert RACE not in capsys.readouterr().out


@cases
def test_stage_pages(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A page of another layer, an index past the end that is not taken round, one not listed."""
    spec, rng = SPECS[name], np.random.default_rng(0)
    slab, host = (random_bytes(rng, shape) for shape in (spec.slabs.slab, spec.slabs.host))
    kernel = jax.jit(functools.partial(mosaic_gpu.stage_pages, num_blocks=2, interpret=INTERPRET))
    for layer, count in [(0, 5), (6, 3), (4, 0)]:
        host_pages, device_pages = page_lists(spec, rng)
        last = spec.slabs.layers * spec.slabs.device_pages - 1
        device_pages = (
            jnp.where(device_pages == last, device_pages[0], device_pages).at[0].set(last)
        )
        lists = (junk_beyond(host_pages, count), junk_beyond(device_pages, count), jnp.int32(count))
        found = kernel(slab, host, jnp.int32(layer), *lists)
        assert_same_bits(found, reference.stage_pages(slab, host, jnp.int32(layer), *lists))
    assert RACE not in capsys.readouterr().out


def test_page_of_several_transfers(capsys: pytest.CaptureFixture[str]) -> None:
    """A part of a long page that is lost, or put at the place of another."""
    row = RowFormat("float32", 512, 64, 1e-4)
    slabs = SlabSpec(row_format=row, layers=2, rows_per_page=17, device_pages=2, host_pages=2)
    rng = np.random.default_rng(0)
    slab, host = random_bytes(rng, slabs.slab), random_bytes(rng, slabs.host)
    lists = (jnp.array([1, 0]), jnp.array([3, 1]), jnp.int32(2))
    found = stage_pages(slab, host, 1, *lists, implementation="interpreter")
    assert_same_bits(found, reference.stage_pages(slab, host, 1, *lists))
    assert RACE not in capsys.readouterr().out


def test_planted_race(capsys: pytest.CaptureFixture[str]) -> None:
    """Races that the interpreter does not see, so that the tests above prove nothing."""
    spec, rng = SPECS["odd_narrow"], np.random.default_rng(0)
    slab, host = (random_bytes(rng, shape) for shape in (spec.slabs.slab, spec.slabs.host))
    lists = (jnp.array([3, 5]), jnp.array([7, 7]), jnp.int32(2))
    stage_rows(slab, host, 0, 1, *lists, implementation="interpreter").block_until_ready()
    assert RACE in capsys.readouterr().out


def test_planted_read_beyond_the_end() -> None:
    """Reads beyond an array that the interpreter does not see."""
    spec, rng = SPECS["odd_narrow"], np.random.default_rng(0)
    slab, host = (random_bytes(rng, shape) for shape in (spec.slabs.slab, spec.slabs.host))
    lists = (jnp.array([3]), jnp.array([7]))
    with pytest.raises(jax.errors.JaxRuntimeError, match="IndexError"):
        staged = stage_rows(slab, host, 0, 1, *lists, jnp.int32(2), implementation="interpreter")
        staged.block_until_ready()
    # The interpreter serves on.
    lists = (*lists, jnp.int32(1))
    found = stage_rows(slab, host, 0, 1, *lists, implementation="interpreter")
    assert_same_bits(found, reference.stage_rows(slab, host, 0, 1, *lists))


@pytest.mark.parametrize("op", [stage_rows, stage_pages])
def test_unsupported_rows(op) -> None:
    """Rows that no asynchronous copy can take, given to the kernel, or refused without reason."""
    row = RowFormat("bfloat16", 8, 4, 1e-4)
    slabs = SlabSpec(row_format=row, layers=3, rows_per_page=4, device_pages=4, host_pages=4)
    spec, rng = StageSpec(slabs, 5, 3), np.random.default_rng(0)
    slab, host = random_bytes(rng, slabs.slab), random_bytes(rng, slabs.host)
    if op is stage_rows:
        arguments = (slab, host, 0, 2, *row_lists(spec, rng), jnp.int32(3))
    else:
        arguments = (slab, host, 0, *page_lists(spec, rng), jnp.int32(3))
    with pytest.raises(ValueError, match="'interpreter': rows of 24 bytes"):
        op(*arguments, implementation="interpreter")
    assert_same_bits(op(*arguments), op(*arguments, implementation="reference"))
