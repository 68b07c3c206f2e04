"""A slab on the devices beside one in host memory, and ops that are compiled over both."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from glm53.model.sharding import make_mesh
from pallas_kernels.common.host_memory import HOST_MEMORY, as_device, as_host
from pallas_kernels.common.row_format import RowFormat, RowKind
from tests.helpers.in_place import check_in_place, fetch_copy, pointers

LAYERS, DEVICE_PAGES, HOST_PAGES, ROWS_PER_DEVICE = 3, 40, 30, 8
_SLAB, _HOST = PartitionSpec(None, None, "model"), PartitionSpec(None, "model")


class Bytes(NamedTuple):
    """One device's part of both slabs, with the bytes of an element on an axis of their own."""

    slab: np.ndarray  # [layers, device_pages, rows, width, bytes]
    host: np.ndarray  # [host_pages, rows, layers, width, bytes]


@dataclasses.dataclass(frozen=True)
class TwoMemories:
    """Both slabs, full of bytes that mean nothing."""

    num_devices: int
    slab: jax.Array
    host: jax.Array

    @classmethod
    def create(cls, num_devices: int, kind: RowKind) -> "TwoMemories":
        rng, row = np.random.default_rng(0), RowFormat(kind, 8, 4, 1e-4)
        mesh, rows = make_mesh(num_devices), ROWS_PER_DEVICE * num_devices
        shardings = (
            NamedSharding(mesh, _SLAB),
            NamedSharding(mesh, _HOST, memory_kind=HOST_MEMORY),
        )

        def junk(*shape: int) -> np.ndarray:
            drawn = rng.integers(0, 256, (*shape, row.width * row.dtype.itemsize), np.uint8)
            return drawn.view(row.dtype)

        slab, host = junk(LAYERS, DEVICE_PAGES, rows), junk(HOST_PAGES, rows, LAYERS)
        # Computed rather than put there, as numpy's own memory cannot be donated.
        both = jax.jit(lambda: (jnp.asarray(slab), jnp.asarray(host)), out_shardings=shardings)()
        return cls(num_devices, *both)

    def devices(self) -> list[Bytes]:
        """What each device has, copied."""

        def shards(array: jax.Array, axis: int) -> list[np.ndarray]:
            raw = fetch_copy(array)
            raw = raw.view(np.uint8).reshape(*raw.shape, raw.itemsize)
            return [part.copy() for part in np.split(raw, self.num_devices, axis)]

        return [
            Bytes(*both) for both in zip(shards(self.slab, 2), shards(self.host, 1), strict=True)
        ]

    def compile(self, op: Callable, *inputs: tuple[Any, PartitionSpec]) -> Callable:
        """Compiles `op(slab, host, *inputs)`, which returns both and must leave them in place.

        Each input is an example of it and how it is sharded.
        """
        mesh, specs = make_mesh(self.num_devices), (_SLAB, _HOST)

        def local(slab: jax.Array, host: jax.Array, *inputs: jax.Array) -> tuple:
            slab, host = op(slab, as_device(host), *inputs)
            return slab, as_host(host)

        mapped = jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(*specs, *(spec for _, spec in inputs)),
            out_specs=specs,
            check_vma=False,
        )
        shardings = (self.slab.sharding, self.host.sharding)
        jitted = jax.jit(mapped, donate_argnums=(0, 1), out_shardings=shardings)
        examples = [example for example, _ in inputs]
        compiled = jitted.lower(self.slab, self.host, *examples).compile()
        check_in_place(compiled, [self.slab, self.host])
        return compiled

    def run(self, compiled: Callable, *inputs: Any) -> "TwoMemories":
        """Calls what `compile` returned. This object's arrays are gone thereafter."""
        before = pointers(self.slab, self.host)
        slab, host = compiled(self.slab, self.host, *inputs)
        assert pointers(slab, host) == before
        assert host.sharding.memory_kind == HOST_MEMORY
        return TwoMemories(self.num_devices, slab, host)

    def check(self, expected: list[Bytes]) -> None:
        """Asserts that every byte is as expected."""
        for found, device in zip(self.devices(), expected, strict=True):
            np.testing.assert_array_equal(found.slab, device.slab)
            np.testing.assert_array_equal(found.host, device.host)
