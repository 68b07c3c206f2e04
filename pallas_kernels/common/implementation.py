"""Choice of the implementation of an operation: its kernel or its reference.

Every operation takes `implementation=`. Left at None, it is the kernel on a GPU where the shapes
are supported, and the reference elsewhere.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any, Literal

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

Implementation = Literal["reference", "mosaic_gpu", "interpreter"]
Kernel = Callable[..., Any]
"""An operation's kernel: its arrays, and `interpret`, for `plgpu.kernel`."""

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


def run(
    implementation: Implementation | None,
    reference: Callable[..., Any],
    kernel: Kernel,
    unsupported: str | None,
    *arrays: Any,
) -> Any:
    """Runs an operation.

    Args:
        implementation: which one; None chooses.
        reference: takes `arrays`.
        kernel: takes `arrays` and `interpret`.
        unsupported: why the kernel cannot take these shapes, None if it can.
        arrays: arrays, or trees of them.

    Raises:
        ValueError: the kernel is asked for, and cannot take these shapes.
    """
    implementation = implementation or default_implementation(unsupported)
    if implementation == "reference":
        return reference(*arrays)
    if unsupported:
        raise ValueError(f"implementation={implementation!r}: {unsupported}")
    interpret = plgpu.InterpretGPUParams(detect_races=True)
    return kernel(*arrays, interpret=None if implementation == "mosaic_gpu" else interpret)


def default_implementation(unsupported: str | None = None) -> Implementation:
    """Default implementation of an operation that is traced now.

    For callers of operations too: a kernel costs next to nothing where there is nothing to do, so
    it is called in any case, since a GPU's branches and loops wait for the host to read back their
    condition. A reference is better skipped.

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
