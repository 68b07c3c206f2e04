"""Choice of the implementation of an operation: its kernel or its reference.

Operations take `implementation=`. Left at None, it is the kernel on a GPU where the shapes are
supported, and the reference elsewhere. Callers never ask which one runs; they skip idle work
with `run_if`.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool

Implementation = Literal["reference", "mosaic_gpu", "interpreter"]

_overridden: contextvars.ContextVar[Implementation | None] = contextvars.ContextVar(
    "implementation", default=None
)


@contextlib.contextmanager
def override_implementation(implementation: Implementation) -> Iterator[None]:
    """Overrides the default implementation of operations that are traced meanwhile.

    Shapes that a kernel does not support still run their reference. jax's caches are cleared before
    and after, since they hold what was traced with another preference.
    """
    token = _overridden.set(implementation)
    jax.clear_caches()
    try:
        yield
    finally:
        _overridden.reset(token)
        jax.clear_caches()


def run[**Arrays, Result](
    implementation: Implementation | None,
    reference: Callable[Arrays, Result],
    kernel: Callable[..., Result],
    unsupported: str | None,
    *arrays: Arrays.args,
    **named_arrays: Arrays.kwargs,
) -> Result:
    """Runs an operation.

    Args:
        implementation: which one; None chooses.
        reference: takes `arrays`.
        kernel: takes `arrays` and `interpret`, of type `Interpret`.
        unsupported: why the kernel cannot take these shapes, None if it can.
        arrays: what the operation is given.
        named_arrays: likewise.

    Raises:
        ValueError: the kernel is asked for, and cannot take these shapes.
    """
    implementation = implementation or default_implementation(unsupported)
    if implementation == "reference":
        return reference(*arrays, **named_arrays)
    if unsupported:
        raise ValueError(f"implementation={implementation!r}: {unsupported}")
    interpret = plgpu.InterpretGPUParams(detect_races=True)
    interpret = None if implementation == "mosaic_gpu" else interpret
    return kernel(*arrays, **named_arrays, interpret=interpret)


def run_if[State](
    wanted: Bool[Array, ""], function: Callable[[State], State], state: State
) -> State:
    """Runs a function of operations, or skips it where it has nothing to do.

    References are skipped. Kernels always run: with nothing to do they cost next to nothing, while
    a GPU's branches and loops wait for the host to read back their condition.

    Args:
        wanted: whether there is something to do.
        function: from a state to the next; returns the same values where not `wanted`.
        state: a tree of arrays, which is updated in place.
    """
    if default_implementation() != "reference":
        return function(state)
    # A loop, which unlike a branch updates arrays in place.
    return lax.fori_loop(0, wanted.astype(jnp.int32), lambda _, state: function(state), state)


def default_implementation(unsupported: str | None = None) -> Implementation:
    """Default implementation of an operation that is traced now.

    Args:
        unsupported: why the kernel cannot take the shapes, None if it can.
    """
    if unsupported:
        return "reference"
    return _overridden.get() or ("mosaic_gpu" if _traced_for_gpu() else "reference")


def _traced_for_gpu() -> bool:
    """Whether the mesh of the program, or the default device where it has none, is of GPUs."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return (jax.default_backend() if device is None else device.platform) == "gpu"
