"""Norm, and its kernel in Mosaic's interpreter, which looks for races."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.rms_norm import NormedRows, rms_norm
from pallas_kernels.rms_norm.specs import SPECS, NormSpec, random_rows
from tests.helpers.bits import assert_same_bits

pytestmark = pytest.mark.compiles
RACE = "RACE DETECTED"
EPS = 1e-5
ODD = [name for name in SPECS if name.startswith("odd")]


def weights_of(spec: NormSpec) -> jax.Array:
    return jnp.asarray(np.random.default_rng(1).normal(size=spec.weights.shape), jnp.bfloat16)


def norm(implementation: str, **options) -> functools.partial:
    return functools.partial(
        jax.jit(rms_norm, static_argnames=("eps", "quantized", "implementation")),
        eps=EPS,
        implementation=implementation,
        **options,
    )


@pytest.mark.parametrize("name", ODD)
def test_reference(name: str) -> None:
    """A weight of another layer, an update that is not added, a sum in the rows' own precision."""
    spec, rng = SPECS[name], np.random.default_rng(0)
    rows, update = random_rows(spec, rng), random_rows(spec, rng)
    for layer in range(spec.layers):
        found = norm("reference")(rows, update, weights_of(spec), layer)
        assert_same_bits(found.residual, rows + update)
        values = np.asarray(rows + update, np.float64)
        values /= np.sqrt((values**2).mean(axis=-1, keepdims=True) + EPS)
        expected = values * np.asarray(weights_of(spec)[layer], np.float64)
        # Three roundings to half of the last place.
        np.testing.assert_allclose(found.rows, expected, rtol=3 * 2**-8, atol=1e-30)
        assert found.quantized is None


def assert_close(found: NormedRows, expected: NormedRows) -> None:
    """A sum in another order may round the norm, and so a value, the other way."""
    assert_same_bits(found.residual, expected.residual)
    assert expected.quantized is not None and found.quantized is not None
    rows = [np.asarray(each.rows, np.float32) for each in (found, expected)]
    # Each of two roundings may be off by one in the last place.
    np.testing.assert_allclose(*rows, rtol=2**-6, atol=1e-30)
    assert np.mean(rows[0] != rows[1]) < 0.02
    # What is quantised are the normalised rows themselves.
    values, scale = found.quantized.values, np.asarray(found.quantized.scale)
    groups = rows[0].reshape(rows[0].shape[0], -1, 128)
    scaled = np.asarray(values, np.float32).reshape(groups.shape)
    assert np.all(np.exp2(np.round(np.log2(scale))) == scale)
    spread = scale.T[..., None]
    assert np.all(np.abs(groups - scaled * spread) <= np.abs(groups) * 2**-4 + spread * 2**-10)
    largest = np.abs(groups).max(axis=-1)
    assert np.all((largest <= 448 * scale.T) & ((largest > 224 * scale.T) | (largest == 0)))


@pytest.mark.parametrize("with_update", [False, True])
@pytest.mark.parametrize("name", ODD)
def test_kernel(name: str, with_update: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """What `test_reference` names; a row or a group that is normalised with another's sum."""
    spec, rng = SPECS[name], np.random.default_rng(0)
    rows, update = random_rows(spec, rng), random_rows(spec, rng)
    arguments = (rows, update if with_update else None, weights_of(spec), spec.layers - 1)
    found = norm("interpreter", quantized=True)(*arguments)
    # In one program with the norm, XLA may leave the sum unrounded.
    residual = rows + update if with_update else rows
    assert_close(found, norm("reference", quantized=True)(residual, None, *arguments[2:]))
    assert RACE not in capsys.readouterr().out


def test_rows_do_not_depend_on_others() -> None:
    """Bits that change with the number of rows, or with the row that a row is."""
    spec, rng = SPECS["odd_long"], np.random.default_rng(0)
    rows, update = random_rows(spec, rng), random_rows(spec, rng)
    kernel = norm("interpreter", quantized=True)
    whole = kernel(rows, update, weights_of(spec), 1)
    order = [3, 0]
    part = kernel(rows[np.array(order)], update[np.array(order)], weights_of(spec), 1)
    assert whole.quantized is not None and part.quantized is not None
    for index, row in enumerate(order):
        assert_same_bits(part.rows[index], whole.rows[row])
        assert_same_bits(part.quantized.values[index], whole.quantized.values[row])
        assert_same_bits(part.quantized.scale[:, index], whole.quantized.scale[:, row])


@pytest.mark.parametrize(
    ("width", "dtype", "reason"),
    [
        (384, jnp.bfloat16, "a width of 384 is no multiple of 512"),
        (512, jnp.float32, "rows of float32, not bfloat16"),
    ],
)
def test_unsupported(width: int, dtype: jax.typing.DTypeLike, reason: str) -> None:
    """Rows that the kernel cannot take, given to it, or refused without a kernel."""
    rows, weights = jnp.ones((2, width), dtype), jnp.ones((3, width), dtype)
    with pytest.raises(ValueError, match=f"'interpreter': {reason}"):
        rms_norm(rows, None, weights, 0, EPS, implementation="interpreter")
    assert rms_norm(rows, None, weights, 0, EPS).rows.shape == rows.shape
