"""Appending, and its kernel in Mosaic's interpreter, which looks for races."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.append_rows import append_rows
from pallas_kernels.append_rows.specs import SPECS, random_pages, random_rows
from pallas_kernels.common.row_format import RowFormat
from pallas_kernels.common.slab_spec import GLM_ROWS, random_bytes
from tests.helpers.bits import as_bits, assert_same_bits

pytestmark = pytest.mark.compiles
RACE = "RACE DETECTED"


@pytest.mark.parametrize("implementation", ["reference", "interpreter"])
@pytest.mark.parametrize("name", [name for name in SPECS if name.startswith("odd")])
def test_append_rows(name: str, implementation, capsys: pytest.CaptureFixture[str]) -> None:
    """A row at another page or not packed as its format says, or a dropped one that is written."""
    spec, rng = SPECS[name], np.random.default_rng(0)
    row_format = spec.slabs.row_format
    slab = random_bytes(rng, spec.slabs.slab)
    append = jax.jit(
        functools.partial(append_rows, row_format=row_format, implementation=implementation)
    )
    for layer in (0, 2):
        latent, rope = random_rows(spec, rng)
        pages, rows = random_pages(spec, rng)
        expected, packed = as_bits(slab), as_bits(row_format.pack(latent, rope))
        for token, (page, row) in enumerate(zip(pages.tolist(), rows.tolist(), strict=True)):
            if page >= 0:
                expected[layer, page, row] = packed[token]
        slab = append(slab, jnp.int32(layer), latent, rope, pages, rows)
        np.testing.assert_array_equal(as_bits(slab), expected)
    assert RACE not in capsys.readouterr().out


def extreme_rows(row_format: RowFormat) -> tuple[jax.Array, jax.Array]:
    """Rows of what is easily rounded wrongly, in all groups of a latent."""
    largest = np.float32(448) * np.float32(2.0) ** np.arange(-13, 112, 18, dtype=np.float32)
    edges = [np.nextafter(value, np.float32(way)) for value in largest for way in (0, np.inf)]
    halves = np.arange(0, 64, 0.5, dtype=np.float32) / 512  # half-way between the smallest codes
    ties = 1 + np.arange(128, dtype=np.float32) / 16  # half-way between larger ones
    repeated = [
        [0, -0.0],
        *([value, -value / 3, value / 1e4] for value in edges),
        *([value, 0] for value in largest),
        [1e-42, -1e-38, 3e-5],
        [np.finfo(np.float32).max, 1, -1e38],
        [np.inf, 1e30, -3.0],
    ]
    rows = [np.resize(np.array(values, np.float32), 128) for values in repeated]
    rows += [np.append(halves[1:], np.float32(448)), np.append(-ties[1:], np.float32(448))]
    groups = np.stack(rows)
    latent = np.concatenate(
        [np.roll(groups, shift, axis=0) for shift in range(row_format.num_scales)], axis=1
    )
    rope = np.resize(groups, (len(groups), row_format.rope_dim))
    return jnp.asarray(latent), jnp.asarray(rope)


@pytest.mark.parametrize("name", ["odd_fp8", "odd_keys_fp8", "odd_bfloat16"])
def test_extreme_values(name: str) -> None:
    """Rounding that differs: ties, subnormal numbers, the edges of scales, infinities, -0.0."""
    row_format = SPECS[name].slabs.row_format
    latent, rope = extreme_rows(row_format)
    slab = jnp.zeros((1, 1, len(latent), row_format.width), row_format.dtype)
    where = (jnp.zeros(len(latent), jnp.int32), jnp.arange(len(latent), dtype=jnp.int32))
    found, expected = (
        append_rows(slab, 0, latent, rope, *where, row_format, implementation=implementation)
        for implementation in ("interpreter", "reference")
    )
    assert_same_bits(found, expected)


def test_nan() -> None:
    """A NaN that becomes a number, or spoils what lies in other groups."""
    row_format = GLM_ROWS["fp8"]
    latent = jnp.ones((1, 512)).at[0, 130].set(jnp.nan)
    rope = jnp.ones((1, 64)).at[0, 3].set(jnp.nan)
    slab, zero = jnp.zeros((1, 1, 1, row_format.width), jnp.int32), jnp.zeros(1, jnp.int32)
    found = append_rows(slab, 0, latent, rope, zero, zero, row_format, implementation="interpreter")
    values = np.array(row_format.unpack(found)).reshape(-1)
    assert np.flatnonzero(np.isnan(values)).tolist() == [130, 512 + 3]
    others = np.r_[:128, 256:512, 512:515, 516:576]
    np.testing.assert_array_equal(values[others], 1)


@pytest.mark.parametrize(
    ("row_format", "reason"),
    [
        (RowFormat("fp8", 96, 0, 1e-4), "latent width of 96"),
        (RowFormat("float32", 128, 16, 1e-4), "rope width of 16"),
    ],
)
def test_unsupported_rows(row_format: RowFormat, reason: str) -> None:
    """Widths that the kernel would take wrongly, or refuses without a reason."""
    slab = jnp.zeros((1, 1, 2, row_format.width), row_format.dtype)
    latent, rope = jnp.ones((2, row_format.latent_dim)), jnp.ones((2, row_format.rope_dim))
    where = (jnp.zeros(2, jnp.int32), jnp.arange(2))
    with pytest.raises(ValueError, match=reason):
        append_rows(slab, 0, latent, rope, *where, row_format, implementation="interpreter")
    found = append_rows(slab, 0, latent, rope, *where, row_format)
    assert_same_bits(found[0, 0], row_format.pack(latent, rope))
