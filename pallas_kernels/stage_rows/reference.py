"""Staging in plain jax.numpy."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from pallas_kernels.common.types import HostSlab, Scalar, Slab

_ROWS_TOGETHER = 64


def stage_rows(
    slab: Slab,
    host: HostSlab,
    first_layer: Scalar,
    num_layers: Scalar,
    host_rows: Int[Array, " misses"],
    device_rows: Int[Array, " misses"],
    count: Int[Array, ""],
) -> Slab:
    """The reference of `operation.stage_rows`."""
    rows = slab.reshape(slab.shape[0], -1, slab.shape[3])
    source = host.reshape(-1, *host.shape[2:])
    padding = (0, -host_rows.shape[0] % _ROWS_TOGETHER)
    host_rows, device_rows = jnp.pad(host_rows, padding), jnp.pad(device_rows, padding)

    def stage(index: jax.Array, rows: jax.Array) -> jax.Array:
        start, layer = index // num_layers * _ROWS_TOGETHER, first_layer + index % num_layers
        valid = start + jnp.arange(_ROWS_TOGETHER) < count
        read = lax.dynamic_slice_in_dim(host_rows, start, _ROWS_TOGETHER)
        write = lax.dynamic_slice_in_dim(device_rows, start, _ROWS_TOGETHER)
        write = jnp.where(valid, write, rows.shape[1])
        staged = source[jnp.where(valid, read, 0), layer]
        return rows.at[layer, write].set(staged, mode="drop")

    bursts = -(-count // _ROWS_TOGETHER) * num_layers
    return lax.fori_loop(0, bursts, stage, rows).reshape(slab.shape)


def stage_pages(
    slab: Slab,
    host: HostSlab,
    layer: Scalar,
    host_pages: Int[Array, " pages"],
    targets: Int[Array, " pages"],
    count: Int[Array, ""],
) -> Slab:
    """The reference of `operation.stage_pages`."""
    num_layers, device_pages = slab.shape[:2]
    pages = slab.reshape(-1, *slab.shape[2:])

    def stage(index: jax.Array, pages: jax.Array) -> jax.Array:
        target = (layer * device_pages + targets[index]) % (num_layers * device_pages)
        page = lax.dynamic_index_in_dim(host, host_pages[index], 0, keepdims=False)
        rows = lax.dynamic_index_in_dim(page, layer, 1, keepdims=False)
        return lax.dynamic_update_index_in_dim(pages, rows, target, 0)

    return lax.fori_loop(0, count, stage, pages).reshape(slab.shape)
