"""The device state of the cache, and the transitions that write and find rows.

Transitions are pure functions that run inside `shard_map`: arrays are one device's part. Under jit
with the store donated they update in place.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int, Shaped

from kvcache.cache_compiled import cache_compiled
from kvcache.device.host_tier import HostTier
from kvcache.geometry import KVGeometry
from pallas_kernels.append_rows import append_rows as write_rows
from pallas_kernels.common.compiler_options import gpu_options
from pallas_kernels.common.host_memory import HOST_MEMORY, as_device, as_host, host_zeros
from pallas_kernels.common.pytree import pytree_dataclass

MESH_AXIS = "model"

_SHARDED_AXIS = {
    "slab": 2,
    "index_keys": 2,
    "host.slab": 1,
    "host.row_cache.row": 2,
    "host.row_cache.mean": 2,
    "host.row_cache.entry": 1,
    "host.selections": 0,
    "host.reads": 1,
}
"""Axis of a field that is sharded; the others are replicated."""


@pytree_dataclass
class KVStore:
    """Bytes of all cached rows, and the tier of each page.

    Attributes:
        slab: MLA rows [layers, device_pages, rows_per_page, width], sharded on rows_per_page.
        index_keys: index keys [index_layers, pages, rows_per_page, width], sharded likewise. They
            stay on the device as long as the page exists in any tier.
        device_page_index: int32 [pages], the page's index in `slab`, or -1. Replicated.
        host_page_index: int32 [pages], the page's index in the host tier, or -1. Replicated.
        host: the host tier, None where every page stays on the device.
    """

    slab: Shaped[Array, "layers device_pages rows_per_page width"]
    index_keys: Shaped[Array, "index_layers pages rows_per_page index_width"]
    device_page_index: Int[Array, " pages"]
    host_page_index: Int[Array, " pages"]
    host: HostTier | None

    @classmethod
    def _empty(cls, geometry: KVGeometry) -> "KVStore":
        row, key = geometry.row_format, geometry.index_row_format
        rows = geometry.rows_per_page
        nowhere = jnp.full((geometry.num_pages,), -1, jnp.int32)
        return cls(
            jnp.zeros((geometry.num_layers, geometry.device_pages, rows, row.width), row.dtype),
            jnp.zeros((geometry.num_index_layers, geometry.num_pages, rows, key.width), key.dtype),
            nowhere,
            nowhere,
            HostTier.empty(geometry) if geometry.has_host_tier else None,
        )

    @classmethod
    def _by_name(cls, geometry: KVGeometry, value: Any) -> "KVStore":
        """`value(field name)` in place of each field's array."""
        shapes = jax.eval_shape(lambda: cls._empty(geometry))
        return jax.tree_util.tree_map_with_path(
            lambda path, _: value(".".join(key.name for key in path)), shapes
        )

    @classmethod
    def specs(cls, geometry: KVGeometry) -> "KVStore":
        """The PartitionSpec of each field, in place of its array."""
        return cls._by_name(geometry, _spec)

    @classmethod
    def shardings(cls, geometry: KVGeometry, mesh: Mesh) -> "KVStore":
        """The sharding of each field, its memory included, in place of its array."""

        def sharding(name: str) -> NamedSharding:
            memory = HOST_MEMORY if name == "host.slab" else None
            return NamedSharding(mesh, _spec(name), memory_kind=memory)

        return cls._by_name(geometry, sharding)

    @classmethod
    def create(cls, geometry: KVGeometry, mesh: Mesh) -> "KVStore":
        """An empty store on the mesh: no page lies in any tier."""
        return cls.creation(geometry, mesh)()

    @classmethod
    @cache_compiled
    def creation(cls, geometry: KVGeometry, mesh: Mesh) -> Callable[[], "KVStore"]:
        """The jitted function that makes an empty store."""

        def build() -> KVStore:
            return _with_host_zeros(cls._empty(geometry), mesh)

        return jax.jit(
            build,
            out_shardings=cls.shardings(geometry, mesh),
            compiler_options=gpu_options(mesh),
        )


def _with_host_zeros(store: KVStore, mesh: Mesh) -> KVStore:
    """An empty store whose host slab each device's host has made."""
    if store.host is None:
        return store
    slab, spec = store.host.slab, _spec("host.slab")
    shape = NamedSharding(mesh, spec).shard_shape(slab.shape)
    zeros = jax.shard_map(
        lambda: host_zeros(shape, slab.dtype),
        mesh=mesh,
        in_specs=(),
        out_specs=spec,
        check_vma=False,
    )
    return dataclasses.replace(store, host=dataclasses.replace(store.host, slab=zeros()))


def on_device(store: KVStore) -> KVStore:
    """The store inside a step, its host memory under a device type; see `host_memory`."""
    return _cast_host(store, as_device)


def in_host(store: KVStore) -> KVStore:
    """The inverse of `on_device`, at the end of a step."""
    return _cast_host(store, as_host)


def _cast_host(store: KVStore, cast: Callable[[jax.Array], jax.Array]) -> KVStore:
    if store.host is None:
        return store
    host = dataclasses.replace(store.host, slab=cast(store.host.slab))
    return dataclasses.replace(store, host=host)


def _spec(name: str) -> PartitionSpec:
    if name not in _SHARDED_AXIS:
        return PartitionSpec()
    return PartitionSpec(*[None] * _SHARDED_AXIS[name], MESH_AXIS)


def append_rows(
    store: KVStore,
    geometry: KVGeometry,
    layer: int | Int[Array, ""],
    latent: Float[Array, "tokens latent"],
    rope: Float[Array, "tokens rope"],
    pages: Int[Array, " tokens"],
    positions: Int[Array, " tokens"],
    device: Int[Array, ""],
) -> KVStore:
    """Writes MLA rows of one layer to their pages; other devices' rows and padding are dropped.

    Args:
        latent: normalised latent of each row.
        rope: rotated part of each row.
        pages: page of each row; a negative one, beyond a sequence's last, drops the row.
        positions: position of each row; -1 is padding.
        device: this device's index along the mesh axis.
    """
    kept = _owned(geometry, positions, device) & (pages >= 0)
    device_pages = jnp.where(kept, store.device_page_index[jnp.maximum(pages, 0)], -1)
    rows = geometry.local_row(positions)
    slab = write_rows(store.slab, layer, latent, rope, device_pages, rows, geometry.row_format)
    return dataclasses.replace(store, slab=slab)


def append_index_keys(
    store: KVStore,
    geometry: KVGeometry,
    index_layer: int | Int[Array, ""],
    keys: Float[Array, "tokens key_dim"],
    pages: Int[Array, " tokens"],
    positions: Int[Array, " tokens"],
    device: Int[Array, ""],
) -> KVStore:
    """Writes index keys of one layer to their pages, as `append_rows` does."""
    kept = _owned(geometry, positions, device) & (pages >= 0)
    pages, rows = jnp.where(kept, pages, -1), geometry.local_row(positions)
    rope = jnp.zeros((keys.shape[0], 0), keys.dtype)
    index_keys = write_rows(
        store.index_keys, index_layer, keys, rope, pages, rows, geometry.index_row_format
    )
    return dataclasses.replace(store, index_keys=index_keys)


def translate_positions(
    store: KVStore,
    geometry: KVGeometry,
    block_tables: Int[Array, "rows context_pages"],
    positions: Int[Array, "rows k"],
    device: Int[Array, ""],
) -> tuple[Int[Array, "rows k"], Int[Array, "rows k"]]:
    """Where positions lie on this device, and their pages; the same for every layer.

    Args:
        block_tables: pages of each row's sequence.
        positions: positions in that sequence; -1 is none.
        device: this device's index along the mesh axis.

    Returns:
        Physical ids: a row of the slab's layer where the page is on the device; `slab_rows` plus a
        row of the host tier where it is there only. And pages. Both are -1 for none, for other
        devices' positions, and for pages that lie nowhere.
    """
    valid = _owned(geometry, positions, device)
    page_index = jnp.where(valid, positions // geometry.rows_per_page, 0)
    pages = jnp.take_along_axis(block_tables, page_index, axis=1)
    valid &= pages >= 0
    pages = jnp.where(valid, pages, 0)
    row = geometry.local_row(positions)
    device_page = store.device_page_index[pages]
    row_ids = device_page * geometry.rows_per_device + row
    if store.host is not None:
        host_page = store.host_page_index[pages]
        host_row = geometry.slab_rows + host_page * geometry.rows_per_device + row
        row_ids = jnp.where(device_page >= 0, row_ids, host_row)
        device_page = jnp.maximum(device_page, host_page)  # only its sign counts from here on
    valid &= device_page >= 0
    return jnp.where(valid, row_ids, -1), jnp.where(valid, pages, -1)


def _owned(geometry: KVGeometry, positions: Int[Array, "..."], device: Int[Array, ""]) -> jax.Array:
    return (positions >= 0) & (positions % geometry.num_devices == device)
