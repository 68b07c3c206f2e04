"""Products by the kernel in Mosaic's interpreter, which looks for races, against exact ones."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common.implementation import Implementation
from pallas_kernels.matmul import MatrixStack, bind_together, mosaic_gpu, plan
from pallas_kernels.matmul.specs import SPECS, random_rows, random_stacks
from tests.helpers.bits import assert_same_bits
from tests.pallas_kernels.matmul.exact_products import exact_products

pytestmark = pytest.mark.compiles
RACE = "RACE DETECTED"
# A sixteenth of the bound that the operation states: roundings do not all point the same way.
TOLERANCE = 2.0**-20


@pytest.fixture(autouse=True)
def one_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that few blocks of inputs go round the ring."""
    monkeypatch.setattr(plan, "MAX_SLOTS", 1)


@functools.cache
def compiled(name: str, implementation: Implementation) -> Callable:
    """Products in float32 of a spec's matrices at the last index of their stacks."""

    def multiply(stacks: list[MatrixStack], rows: jax.Array) -> tuple[jax.Array, ...]:
        indices = [last_index(name)] * len(stacks)
        together = bind_together(stacks, indices, dtype=jnp.float32, implementation=implementation)
        return together(rows)

    return jax.jit(multiply)


def last_index(name: str) -> tuple[int, ...]:
    return tuple(size - 1 for size in SPECS[name].stack)


@functools.cache
def matrices(name: str) -> list[MatrixStack]:
    return random_stacks(SPECS[name], np.random.default_rng(0))


def rows_of(name: str, tokens: int) -> jax.Array:
    return random_rows(SPECS[name], tokens, np.random.default_rng(1))


def exact(name: str, stack: MatrixStack, rows: jax.Array) -> tuple[np.ndarray, np.ndarray]:
    return exact_products(stack, last_index(name), rows)


@pytest.mark.parametrize(
    ("name", "tokens"),
    [("odd_fp8", 12), ("odd_fp8_part", 7), ("odd_fp8_rounded", 72), ("odd_bfloat16", 3)],
)
def test_products(name: str, tokens: int, capsys: pytest.CaptureFixture[str]) -> None:
    """A block of weights, a scale or a row that is another's, a sum that leaves some out."""
    rows = rows_of(name, tokens)
    found = compiled(name, "interpreter")(matrices(name), rows)
    reference = compiled(name, "reference")(matrices(name), rows)
    for stack, product, rounded in zip(matrices(name), found, reference, strict=True):
        expected, magnitude = exact(name, stack, rows)
        assert product.shape == expected.shape
        error = np.abs(np.asarray(product) - expected)
        assert (error <= TOLERANCE * magnitude).all(), (error / magnitude).max()
        apart = np.abs(np.asarray(product) - np.asarray(rounded))
        assert (apart <= (2.0**-9 + 2.0**-16) * magnitude).all()
    assert RACE not in capsys.readouterr().out


@pytest.mark.parametrize("name", ["odd_fp8", "odd_bfloat16"])
def test_bits_do_not_depend_on_other_rows(name: str) -> None:
    """A sum whose order changes with the number of rows or with a row's place among them.

    Products within a block are of small integers and so exact, as XLA:CPU adds them in an order
    that does depend on the number of rows. Those of different blocks differ in size.
    """
    run, rng, spec = compiled(name, "interpreter"), np.random.default_rng(2), SPECS[name]
    integers = rng.integers(-8, 9, (70, spec.inputs // 128, 128))
    sizes = 2.0 ** np.linspace(-12, 12, spec.inputs // 128).round()[:, None]
    rows = jnp.asarray((integers * sizes).reshape(70, -1), jnp.bfloat16)
    stacks = [
        dataclasses.replace(
            stack, weight=jnp.round(stack.weight.astype(jnp.float32) / 8).astype(stack.weight.dtype)
        )
        for stack in matrices(name)
    ]
    many, alone = run(stacks, rows), run(stacks, rows[69:])
    few = run(stacks, rows[60:70])
    for product, one, some, stack in zip(many, alone, few, stacks, strict=True):
        assert_same_bits(one, product[69:])
        assert_same_bits(some, product[60:])
        expected, _ = exact(name, stack, rows)
        assert (np.asarray(product) != expected.astype(np.float32)).any()  # order matters


@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")
@pytest.mark.parametrize("name", ["odd_fp8", "odd_fp8_rounded"])
def test_extreme_rows(name: str) -> None:
    """Scaling that overflows or divides by zero, a NaN that reaches other rows, or is lost."""
    rows = rows_of(name, 8)
    factors = np.array([0, -0.0, 2.0**100, 2.0**-60, np.inf, np.nan, 1, 1])
    rows = (rows.astype(jnp.float32) * jnp.asarray(factors, jnp.float32)[:, None]).astype(
        rows.dtype
    )
    rows = rows.at[6, 5].set(jnp.nan).at[7, 130].set(-jnp.inf)
    (found,) = compiled(name, "interpreter")(matrices(name), rows)
    assert (found[:2] == 0).all()
    assert np.isnan(found[4:]).all()
    expected, magnitude = exact(name, matrices(name)[0], rows[2:4])
    error = np.abs(np.asarray(found[2:4]) - expected)
    assert (error <= TOLERANCE * magnitude).all()


def test_no_rows() -> None:
    (found,) = compiled("odd_fp8", "interpreter")(matrices("odd_fp8"), rows_of("odd_fp8", 0))
    assert found.shape == (0, 72)


@pytest.mark.parametrize("function", ["total", "pass_on"])
def test_planted_race(
    function: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Races that the interpreter does not see, so that the tests above prove nothing."""
    monkeypatch.setattr(plan, "MAX_SLOTS", 2)  # a barrier may not be passed by unseen
    waiting = getattr(mosaic_gpu._Work, function)

    def without_waiting(*args: object) -> object:
        with monkeypatch.context() as patch:
            patch.setattr(plgpu, "barrier_wait", lambda barrier: None)
            return waiting(*args)

    monkeypatch.setattr(mosaic_gpu._Work, function, without_waiting)
    multiply = bind_together(matrices("odd_fp8_rounded"), [(1,)], implementation="interpreter")
    jax.block_until_ready(multiply(rows_of("odd_fp8_rounded", 3)))
    assert RACE in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": jnp.float32}, "float32 rows, not bfloat16"),
        ({"weight": jnp.zeros((2, 72, 1024), jnp.bfloat16)}, "bfloat16 weights, not float8"),
        ({"weight": jnp.zeros((2, 72, 1000), jnp.float8_e4m3fn)}, "1000 inputs"),
        ({"weight": jnp.zeros((2, 196, 1024), jnp.float8_e4m3fn)}, "196 outputs"),
        ({"output_part": jnp.int32(0)}, "parts of 72 outputs"),
    ],
)
def test_unsupported_shapes(changes: dict, reason: str) -> None:
    """Matrices that the kernel would multiply wrongly, given to it."""
    (stack,) = matrices("odd_fp8")
    fields = {name: getattr(stack, name) for name in ("weight", "scale", "dtype", "output_part")}
    changed = MatrixStack(**(fields | changes))
    with pytest.raises(ValueError, match=f"'interpreter': {reason}"):
        bind_together([changed], [(1,)], implementation="interpreter")


def test_matrices_that_differ() -> None:
    """Matrices of which only one is multiplied rightly."""
    (odd,), (rounded,) = matrices("odd_fp8"), matrices("odd_fp8_rounded")
    plain = matrices("odd_bfloat16")[0]
    for other, index, reason in (
        (plain, (), "bfloat16 and float8_e4m3fn weights together"),
        (rounded, (1,), "rows rounded for some"),
        (matrices("odd_fp8_part")[0], (1, 2), "matrices of 384 and of 1024 inputs"),
    ):
        with pytest.raises(ValueError, match=reason):
            bind_together([odd, other], [(1,), index], implementation="interpreter")
