"""Host memory as an operand of a kernel, read and written in place.

XLA keeps arrays of the two memories apart in its types and moves whole arrays between them. A
kernel may follow a pointer into pinned host memory, so it is given the host array under a device
type; the casts below change the type and nothing else.
"""

import os

import jax
import jax.numpy as jnp
from jax.experimental.compute_on import compute_on
from jax.extend import core
from jax.interpreters import mlir
from jaxtyping import Array, Shaped

from pallas_kernels.common.jax_internals import backends_are_initialized

HOST_MEMORY = "pinned_host"
"""Memory kind of host arrays."""
LIMIT_VARIABLE = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
"""GiB of host memory that a process may pin for all its GPUs, read when jax starts to use them."""

_DEFAULT_LIMIT = 64
_ROOM_FOR_TRANSFERS = 4  # GiB, beside the arrays that lie there

_reinterpret = core.Primitive("reinterpret_memory_space")
_reinterpret.def_abstract_eval(lambda aval, *, space: aval.update(memory_space=space))
mlir.register_lowering(_reinterpret, lambda context, operand, *, space: [operand])


def as_device(array: Shaped[Array, "*shape"]) -> Shaped[Array, "*shape"]:
    """A traced host array under a device type, without a copy."""
    return _reinterpret.bind(array, space=jax.memory.Space.Device)


def as_host(array: Shaped[Array, "*shape"]) -> Shaped[Array, "*shape"]:
    """The inverse of `as_device`."""
    return _reinterpret.bind(array, space=jax.memory.Space.Host)


def host_zeros(shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> Shaped[Array, "*shape"]:
    """Zeros in host memory, under a host type, written by the host itself.

    XLA would write them to the device's memory first, which may have no room.
    """
    on_host = compute_on(compute_type="device_host", out_memory_spaces=jax.memory.Space.Host)
    return on_host(lambda: jnp.zeros(shape, dtype))()


def reserve_host_memory(num_bytes: int) -> None:
    """Has jax pin as much host memory as arrays of `num_bytes` in all need.

    jax reads the limit when it starts to use the GPUs: this is of use before, and changes nothing
    if the limit is as high.
    """
    if pinnable_bytes() < num_bytes and not backends_are_initialized():
        os.environ[LIMIT_VARIABLE] = str(limit_for(num_bytes))


def pinnable_bytes() -> int:
    """Bytes of arrays that may lie in host memory, all of the process together."""
    return max(_limit() - _ROOM_FOR_TRANSFERS, 0) << 30


def _limit() -> int:
    text = os.environ.get(LIMIT_VARIABLE, "")
    return int(text) if text.isdecimal() else _DEFAULT_LIMIT


def limit_for(num_bytes: int) -> int:
    """The least value of `LIMIT_VARIABLE` for arrays of so many bytes in all."""
    return -(-num_bytes // 2**30) + _ROOM_FOR_TRANSFERS
