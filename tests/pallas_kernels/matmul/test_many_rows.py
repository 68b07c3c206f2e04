"""Products of many rows in Mosaic's interpreter, which looks for races, against exact ones."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.matmul import bind, bind_together
from pallas_kernels.matmul.specs import SPECS, random_rows, random_stacks
from tests.pallas_kernels.matmul.exact_products import exact_products

pytestmark = pytest.mark.compiles
RACE = "RACE DETECTED"
MANY = [name for name in SPECS if name.startswith("many")]
# Interpreted tensor cores add e4m3 products like others, as a GPU's do not.
TOLERANCE = 2.0**-20


@pytest.mark.parametrize("name", MANY)
def test_products(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A block of weights, a scale or a row that is another's, a NaN that reaches other rows."""
    spec, rng = SPECS[name], np.random.default_rng(0)
    stacks, rows = random_stacks(spec, rng), random_rows(spec, 130, rng)
    rows = rows.at[5, 200].set(jnp.nan)
    together = bind_together(
        stacks, [(1,), (1,)], dtype=jnp.float32, many_rows=True, implementation="interpreter"
    )
    for stack, product in zip(stacks, together(rows), strict=True):
        expected, magnitude = exact_products(stack, (1,), rows)
        assert product.shape == expected.shape
        assert np.isnan(product[5]).all()
        error = np.abs(np.asarray(product) - expected)
        assert (np.delete(error - TOLERANCE * magnitude, 5, axis=0) <= 0).all()
    assert RACE not in capsys.readouterr().out


def test_unsupported_outputs() -> None:
    """A matrix of which a tile would be read beyond its end."""
    (stack,) = random_stacks(SPECS["odd_fp8"], np.random.default_rng(0))
    with pytest.raises(ValueError, match="72 outputs, not a multiple of 64"):
        bind(stack, 1, many_rows=True, implementation="interpreter")
