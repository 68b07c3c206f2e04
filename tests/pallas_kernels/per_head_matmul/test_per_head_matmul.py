"""Products by head, by the kernel in Mosaic's interpreter and the reference, against exact ones."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common.implementation import Implementation
from pallas_kernels.matmul import MatrixStack
from pallas_kernels.matmul.specs import random_stacks
from pallas_kernels.per_head_matmul import HeadRows, bind
from pallas_kernels.per_head_matmul.specs import SPECS
from tests.helpers.bits import assert_same_bits

pytestmark = pytest.mark.compiles
RACE = "RACE DETECTED"
LAYER = 1
ODD = [name for name in SPECS if name.startswith("odd")]
# A sixteenth of the bound that the operation states: roundings do not all point the same way.
TOLERANCE = 2.0**-20


@functools.cache
def compiled(name: str, implementation: Implementation) -> Callable:
    spec = SPECS[name]

    def multiply(stack: MatrixStack, rows: jax.Array) -> jax.Array:
        return bind(
            stack,
            LAYER,
            taken=spec.taken,
            transpose=spec.transpose,
            implementation=implementation,
        )(rows)

    return jax.jit(multiply)


@functools.cache
def matrix(name: str) -> MatrixStack:
    (stack,) = random_stacks(SPECS[name].matrix, np.random.default_rng(0))
    return stack


def rows_of(name: str, tokens: int) -> jax.Array:
    rng, shape = np.random.default_rng(1), SPECS[name].rows(tokens).shape
    sizes = 10.0 ** rng.integers(-6, 6, (*shape[:2], 1))
    return jnp.asarray(rng.standard_normal(shape) * sizes, jnp.bfloat16)


def exact(name: str, rows: jax.Array) -> tuple[np.ndarray, np.ndarray]:
    """Products in float64, and the sums of their terms' magnitudes."""
    spec, stack = SPECS[name], matrix(name)
    weight = np.asarray(stack.weight[LAYER].astype(jnp.float32), np.float64)
    if stack.scale is not None:
        scale = np.asarray(stack.scale[LAYER], np.float64)
        scale = scale.repeat(128, axis=0).repeat(128, axis=1)
        weight = weight * scale[-weight.shape[0] :]
    by_head = weight.reshape(spec.heads, spec.taken.per_head, -1)
    by_head = by_head[:, spec.taken.first : spec.taken.first + spec.taken.count]
    terms = "thw,hwo->tho" if spec.transpose else "thw,how->tho"
    values = np.asarray(rows.astype(jnp.float32), np.float64)
    product = np.einsum(terms, values, by_head)
    return product, np.einsum(terms, np.abs(values), np.abs(by_head))


@pytest.mark.parametrize("name", ODD)
def test_products(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A row, a scale or a head that is another's; rounding beyond that of the result."""
    rows = rows_of(name, 12)
    expected, magnitude = exact(name, rows)
    found = compiled(name, "interpreter")(matrix(name), rows)
    reference = compiled(name, "reference")(matrix(name), rows)
    assert found.dtype == reference.dtype == rows.dtype
    for product, allowed in ((found, TOLERANCE), (reference, 2.0**-9)):
        assert product.shape == expected.shape
        error = np.abs(np.asarray(product.astype(jnp.float32)) - expected)
        assert (error <= 2.0**-8 * np.abs(expected) + allowed * magnitude).all()
    assert RACE not in capsys.readouterr().out


@pytest.mark.parametrize("name", ["odd_fp8_keys", "odd_fp8_values"])
def test_bits_do_not_depend_on_other_rows(name: str) -> None:
    """A sum whose order changes with the number of rows, a NaN that reaches another row."""
    run, rows = compiled(name, "interpreter"), rows_of(name, 70)
    # Integers of one size, as XLA:CPU's order does depend on the number of rows.
    rows = jnp.round(rows / jnp.max(jnp.abs(rows), axis=-1, keepdims=True) * 8)
    rows = rows.at[3, 0, 5].set(jnp.nan)
    many, alone = run(matrix(name), rows), run(matrix(name), rows[69:])
    assert_same_bits(alone, many[69:])
    assert jnp.isnan(many[3, 0]).all()
    assert not jnp.isnan(many.at[3, 0].set(0)).any()


def test_planted_race(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Races that the interpreter does not see, so that the tests above prove nothing."""
    monkeypatch.setattr(plgpu, "barrier_wait", lambda barrier: None)
    spec, stack = SPECS["odd_fp8_keys"], matrix("odd_fp8_keys")
    multiply = bind(stack, 0, taken=spec.taken, transpose=True, implementation="interpreter")
    multiply(rows_of("odd_fp8_keys", 1)).block_until_ready()
    assert RACE in capsys.readouterr().out


@pytest.mark.parametrize(
    ("taken", "reason"),
    [
        (HeadRows(96, 0, 64), "96 rows per head"),
        (HeadRows(128, 32, 64), "32 rows before"),
        (HeadRows(192, 0, 72), "72 rows taken"),
    ],
)
def test_unsupported_rows(taken: HeadRows, reason: str) -> None:
    """Rows of a head that the kernel would multiply wrongly, given to it."""
    with pytest.raises(ValueError, match=f"'interpreter': {reason}"):
        bind(matrix("odd_fp8_keys"), 0, taken=taken, implementation="interpreter")
