"""Slabs of one H200 and of eight, as arguments of a program that is compiled for them."""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from glm53.model.sharding import make_mesh
from pallas_kernels.common.host_memory import HOST_MEMORY
from scripts.aot.aot import KernelReport

SLAB, HOST = PartitionSpec(None, None, "model"), PartitionSpec(None, "model")
SHARED_BYTES = 227 << 10
"""Shared memory of a multiprocessor."""


def sharding(num_devices: int, spec: PartitionSpec, host: bool = False) -> NamedSharding:
    memory = HOST_MEMORY if host else None
    return NamedSharding(make_mesh(num_devices), spec, memory_kind=memory)


def argument(
    array: jax.ShapeDtypeStruct,
    num_devices: int = 1,
    spec: PartitionSpec = PartitionSpec(),  # noqa: B008
    host: bool = False,
) -> jax.ShapeDtypeStruct:
    """One whose sharded axis is that much longer on several devices."""
    shape = [
        size * num_devices if axis is not None else size
        for size, axis in zip(array.shape, (*spec, *[None] * array.ndim), strict=False)
    ]
    return jax.ShapeDtypeStruct(
        tuple(shape), array.dtype, sharding=sharding(num_devices, spec, host)
    )


def integers(*shape: int, num_devices: int = 1) -> jax.ShapeDtypeStruct:
    return argument(jax.ShapeDtypeStruct(shape, jnp.int32), num_devices)


def num_bytes(array: jax.ShapeDtypeStruct) -> int:
    return array.size * array.dtype.itemsize


def check_kernel(kernel: KernelReport, name: str, max_registers: int) -> None:
    assert kernel.name == name
    assert kernel.spilled_bytes == 0
    assert kernel.registers <= max_registers
    assert kernel.shared_bytes <= SHARED_BYTES
