"""Rows fetched from host memory, by the reference and by the kernel in Mosaic's interpreter."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common import ring_copy
from pallas_kernels.common.row_format import RowFormat
from pallas_kernels.common.slab_spec import SlabSpec, random_bytes
from pallas_kernels.fetch_rows import fetch_rows, mosaic_gpu, reference
from pallas_kernels.fetch_rows.specs import SPECS, FetchSpec, row_lists
from tests.helpers.bits import assert_same_bits

pytestmark = pytest.mark.compiles
INTERPRET = plgpu.InterpretGPUParams(detect_races=True)
RACE = "RACE DETECTED"
JUNK = (-1, 2**31 - 1)  # what lies beyond the end of a list
LISTS = [(0, 4), (6, 9), (3, 1), (5, 0)]  # layers, and how much of the lists is valid

cases = pytest.mark.parametrize("name", ["odd_narrow", "odd_bfloat16", "odd_fp8"])


@pytest.fixture(autouse=True)
def few_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that few transfers go round the ring."""
    monkeypatch.setattr(ring_copy, "MAX_SLOTS", 3)


def buffers(spec: FetchSpec, rng: np.random.Generator) -> tuple[jax.Array, jax.Array]:
    return random_bytes(rng, spec.buffer), random_bytes(rng, spec.slabs.host)


def lists(spec: FetchSpec, rng: np.random.Generator, count: int) -> tuple[jax.Array, ...]:
    junk = jnp.asarray(np.resize(JUNK, spec.rows - count), jnp.int32)
    host_rows, targets = (each.at[count:].set(junk) for each in row_lists(spec, rng))
    return host_rows, targets, jnp.int32(count)


@cases
def test_reference(name: str) -> None:
    """A row of another layer or place, one beyond the list, a row of the buffer that is lost."""
    spec, rng = SPECS[name], np.random.default_rng(0)
    rows, host = buffers(spec, rng)
    source = np.asarray(host).reshape(-1, *host.shape[2:])
    for layer, count in LISTS:
        host_rows, targets, valid = lists(spec, rng, count)
        expected = np.array(rows)
        expected[targets[:count]] = source[host_rows[:count], layer]
        found = jax.jit(reference.fetch_rows)(
            rows, host, jnp.int32(layer), host_rows, targets, valid
        )
        assert_same_bits(found, jnp.asarray(expected))


@cases
def test_kernel(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What `test_reference` names, and a slot that is refilled while it is read."""
    spec, rng = SPECS[name], np.random.default_rng(0)
    rows, host = buffers(spec, rng)
    kernel = jax.jit(functools.partial(mosaic_gpu.fetch_rows, num_blocks=2, interpret=INTERPRET))
    for layer, count in LISTS:
        arguments = (rows, host, jnp.int32(layer), *lists(spec, rng, count))
        assert_same_bits(kernel(*arguments), reference.fetch_rows(*arguments))
    assert RACE not in capsys.readouterr().out


def test_planted_race(capsys: pytest.CaptureFixture[str]) -> None:
    """Races that the interpreter does not see, so that the test above proves nothing."""
    spec, rng = SPECS["odd_narrow"], np.random.default_rng(0)
    rows, host = buffers(spec, rng)
    twice = (jnp.array([3, 5]), jnp.array([7, 7]), jnp.int32(2))
    fetch_rows(rows, host, 0, *twice, implementation="interpreter").block_until_ready()
    assert RACE in capsys.readouterr().out


def test_unsupported_rows() -> None:
    """Rows that no asynchronous copy can take, given to the kernel, or refused without reason."""
    row = RowFormat("bfloat16", 8, 4, 1e-4)
    slabs = SlabSpec(row_format=row, layers=3, rows_per_page=4, device_pages=1, host_pages=4)
    spec, rng = FetchSpec(slabs, 5), np.random.default_rng(0)
    arguments = (*buffers(spec, rng), 0, *lists(spec, rng, 3))
    with pytest.raises(ValueError, match="'interpreter': rows of 24 bytes"):
        fetch_rows(*arguments, implementation="interpreter")
    assert_same_bits(fetch_rows(*arguments), fetch_rows(*arguments, implementation="reference"))
