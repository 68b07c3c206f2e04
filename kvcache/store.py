"""The device state of the cache and its transitions.

Transitions are pure functions that run inside `shard_map`: arrays are one device's part. Under jit
with the store donated they update in place.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int, Shaped

from kvcache.geometry import KVGeometry
from kvcache.pytree import pytree_dataclass

MESH_AXIS = "model"


@pytree_dataclass
class KVStore:
    """Bytes of all cached rows, and the tier of each page.

    Attributes:
        slab: MLA rows [layers, device_pages, rows_per_page, width], sharded on rows_per_page.
        index_keys: index keys [index_layers, pages, rows_per_page, width], sharded likewise. They
            stay on the device as long as the page exists in any tier.
        device_page: int32 [pages], the page's place in `slab`, or -1. Replicated.
        host_page: int32 [pages], the page's place in the host tier, or -1. Replicated.
    """

    slab: Shaped[Array, "layers device_pages rows_per_page width"]
    index_keys: Shaped[Array, "index_layers pages rows_per_page index_width"]
    device_page: Int[Array, " pages"]
    host_page: Int[Array, " pages"]

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
        )

    @classmethod
    def specs(cls, geometry: KVGeometry) -> "KVStore":
        """The PartitionSpec of each field, in place of its array."""
        rows, replicated = PartitionSpec(None, None, MESH_AXIS, None), PartitionSpec()
        shapes = jax.eval_shape(lambda: cls._empty(geometry))
        return jax.tree.map(lambda leaf: rows if leaf.ndim == 4 else replicated, shapes)

    @classmethod
    def create(cls, geometry: KVGeometry, mesh: Mesh) -> "KVStore":
        """An empty store on the mesh: no page has a place in any tier."""
        shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), cls.specs(geometry))
        return jax.jit(lambda: cls._empty(geometry), out_shardings=shardings)()


def append_rows(
    store: KVStore,
    geometry: KVGeometry,
    layer: int | Int[Array, ""],
    rows: Shaped[Array, "tokens width"],
    pages: Int[Array, " tokens"],
    positions: Int[Array, " tokens"],
    device: Int[Array, ""],
) -> KVStore:
    """Writes MLA rows of one layer to their pages; other devices' rows and padding are dropped.

    Args:
        pages: page of each row; a negative one, beyond a sequence's last, drops the row.
        positions: position of each row; -1 is padding.
        device: this device's place along the mesh axis.
    """
    place = store.device_page[jnp.maximum(pages, 0)]
    kept = _owned(geometry, positions, device) & (pages >= 0) & (place >= 0)
    place = jnp.where(kept, place, geometry.device_pages)
    slab = store.slab.at[layer, place, geometry.local_row(positions)].set(rows, mode="drop")
    return dataclasses.replace(store, slab=slab)


def append_index_keys(
    store: KVStore,
    geometry: KVGeometry,
    index_layer: int | Int[Array, ""],
    keys: Shaped[Array, "tokens index_width"],
    pages: Int[Array, " tokens"],
    positions: Int[Array, " tokens"],
    device: Int[Array, ""],
) -> KVStore:
    """Writes index keys of one layer to their pages, as `append_rows` does."""
    kept = _owned(geometry, positions, device) & (pages >= 0)
    place = jnp.where(kept, pages, geometry.num_pages)
    index_keys = store.index_keys.at[index_layer, place, geometry.local_row(positions)].set(
        keys, mode="drop"
    )
    return dataclasses.replace(store, index_keys=index_keys)


def locate_rows(
    store: KVStore,
    geometry: KVGeometry,
    block_tables: Int[Array, "rows context_pages"],
    positions: Int[Array, "rows k"],
    device: Int[Array, ""],
) -> Int[Array, "rows k"]:
    """Physical ids of positions on this device, the same for every layer.

    Args:
        block_tables: pages of each row's sequence.
        positions: positions in that sequence; -1 is none.
        device: this device's place along the mesh axis.

    Returns:
        A row of the slab's layer where the page is on the device; `device_rows` plus a row of the
        host tier where it is there only; -1 for none and for other devices' positions.
    """
    valid = _owned(geometry, positions, device)
    page_index = jnp.where(valid, positions // geometry.rows_per_page, 0)
    pages = jnp.take_along_axis(block_tables, page_index, axis=1)
    valid &= pages >= 0
    pages = jnp.where(valid, pages, 0)
    on_device, on_host = store.device_page[pages], store.host_page[pages]
    row = geometry.local_row(positions)
    device_id = on_device * geometry.rows_per_device + row
    host_id = geometry.device_rows + on_host * geometry.rows_per_device + row
    located = jnp.where(on_device >= 0, device_id, jnp.where(on_host >= 0, host_id, -1))
    return jnp.where(valid, located, -1)


def map_pages(
    store: KVStore, pages: Int[Array, " changes"], device_pages: Int[Array, " changes"]
) -> KVStore:
    """Gives pages their place on the device, -1 for none; changes with page -1 are padding."""
    pages = jnp.where(pages >= 0, pages, store.device_page.shape[0])
    device_page = store.device_page.at[pages].set(device_pages, mode="drop")
    return dataclasses.replace(store, device_page=device_page)


def _owned(geometry: KVGeometry, positions: Int[Array, "..."], device: Int[Array, ""]) -> jax.Array:
    return (positions >= 0) & (positions % geometry.num_devices == device)
