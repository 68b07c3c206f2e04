"""Attention to resolved rows, wherever the store has them."""

import dataclasses

from jaxtyping import Array, Float, Int

from kvcache.device.resolve import ResolvedRows
from kvcache.device.store import KVStore
from kvcache.geometry import KVGeometry
from pallas_kernels.sparse_attention import sparse_attention
from pallas_kernels.stage_rows import stage_pages


def attend_rows(
    store: KVStore,
    geometry: KVGeometry,
    layer: int | Int[Array, ""],
    query: Float[Array, "devices tokens heads values"],
    rows: ResolvedRows,
    scale: float,
) -> tuple[KVStore, Float[Array, "devices tokens heads width"]]:
    """Attends to this device's rows of one layer; inside `shard_map`.

    Args:
        store: the store.
        geometry: its sizes.
        layer: the layer.
        query: absorbed queries as `prepare_query` gives them, of each device's heads.
        rows: the rows of each token, as the layer's index group has resolved them.
        scale: factor of the scores.

    Returns:
        The store, whose staging pages hold what the layer needed; and what `sparse_attention`
        returns.
    """
    host_slab = None
    if store.host is not None:
        host_slab, staged = store.host.slab, rows.staged
        assert staged is not None, "rows resolved by a store without a host tier"
        slab = stage_pages(
            store.slab, host_slab, layer, staged.host_page, staged.target, staged.count
        )
        store = dataclasses.replace(store, slab=slab)
    attended = sparse_attention(
        query,
        store.slab,
        host_slab,
        layer,
        rows.row_ids,
        rows.count,
        scale,
        geometry.row_format,
    )
    return store, attended
