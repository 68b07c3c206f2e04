"""Host memory as an operand of a kernel, read and written in place.

XLA keeps arrays of the two memories apart in its types and moves whole arrays between them. A
kernel may follow a pointer into pinned host memory, so it is given the host array under a device
type; the casts below change the type and nothing else.
"""

import jax
from jax.extend import core
from jax.interpreters import mlir
from jaxtyping import Array, Shaped

HOST_MEMORY = "pinned_host"
"""Memory kind of host arrays."""

_reinterpret = core.Primitive("reinterpret_memory_space")
_reinterpret.def_abstract_eval(lambda aval, *, space: aval.update(memory_space=space))
mlir.register_lowering(_reinterpret, lambda context, operand, *, space: [operand])


def as_device(array: Shaped[Array, "*shape"]) -> Shaped[Array, "*shape"]:
    """A traced host array under a device type, without a copy."""
    return _reinterpret.bind(array, space=jax.memory.Space.Device)


def as_host(array: Shaped[Array, "*shape"]) -> Shaped[Array, "*shape"]:
    """The inverse of `as_device`."""
    return _reinterpret.bind(array, space=jax.memory.Space.Host)
