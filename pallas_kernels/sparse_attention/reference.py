"""Absorbed MLA attention over selected rows in plain jax.numpy, one query row at a time.

MLA: DeepSeek-V2 (arXiv:2405.04434), section 2.1. Merging by log-sum-exp: the online softmax of
Milakov and Gimelshein (arXiv:1805.02867).
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.common.implementation import run_if
from pallas_kernels.common.row_format import RowFormat
from pallas_kernels.common.types import HostSlab, Scalar, Slab
from pallas_kernels.fetch_rows import fetch_rows
from pallas_kernels.sparse_attention.packed import pack


def sparse_attention(
    query: Float[Array, "parts rows part_heads values"],
    slab: Slab,
    host: HostSlab | None,
    layer: Scalar,
    row_ids: Int[Array, "rows k"],
    count: Int[Array, " rows"],
    *,
    scale: float,
    row_format: RowFormat,
) -> Float[Array, "parts rows part_heads packed"]:
    """The reference of `operation.sparse_attention`, values in their plain order."""
    parts, num_rows, part_heads, num_values = query.shape
    rows_per_layer = slab.shape[1] * slab.shape[2]
    rows = slab.reshape(-1, slab.shape[3])
    row_ids = jnp.where(jnp.arange(row_ids.shape[1]) < count[:, None], row_ids, -1)

    def read(ids: jax.Array) -> jax.Array:
        if host is None:
            return rows[_wrap(layer * rows_per_layer + jnp.maximum(ids, 0), rows.shape[0])]
        on_host = ids >= rows.shape[0]
        index = layer * rows_per_layer + jnp.where(on_host, 0, jnp.maximum(ids, 0))
        stored = rows[_wrap(index, rows.shape[0])]
        return _fetch(stored, host, layer, jnp.where(on_host, ids - rows.shape[0], -1))

    def attend(row: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        row_query, ids = row  # [heads, values], [k]
        valid = (ids >= 0)[:, None]
        values = jnp.where(valid, row_format.unpack(read(ids)), 0.0)  # [k, values]
        scores = jnp.matmul(values, row_query.T, precision=lax.Precision.HIGHEST) * scale
        scores = jnp.where(valid, scores, -jnp.inf)  # [k, heads]
        highest = jnp.max(scores, axis=0)
        weights = jnp.exp(scores - jnp.where(highest > -jnp.inf, highest, 0.0))
        total = jnp.sum(weights, axis=0)
        # Transposed, and with the rotated part, XLA:CPU has a fast product; the barrier keeps it.
        transposed = lax.optimization_barrier(weights.T)
        output = jnp.matmul(transposed, values, precision=lax.Precision.HIGHEST)
        output = output[:, : row_format.latent_dim]  # [heads, latent]
        nonzero = jnp.where(total > 0, total, 1.0)
        return output / nonzero[:, None], jnp.where(total > 0, highest + jnp.log(nonzero), -jnp.inf)

    by_row = query.swapaxes(0, 1).reshape(num_rows, parts * part_heads, num_values)
    mean, lse = lax.map(attend, (by_row.astype(jnp.float32), row_ids))
    packed = pack(mean, lse, query.dtype)
    return packed.reshape(num_rows, parts, part_heads, packed.shape[-1]).swapaxes(0, 1)


def _wrap(index: jax.Array, size: int) -> jax.Array:
    """Indices below twice the size, round the end."""
    return jnp.where(index < size, index, index - size)


def _fetch(stored: jax.Array, host: jax.Array, layer: Scalar, host_rows: jax.Array) -> jax.Array:
    """Rows [k, width], those of them from host memory whose host row [k] is not -1."""
    on_host = host_rows >= 0

    def fetch(stored: jax.Array) -> jax.Array:
        targets = jnp.arange(host_rows.shape[0], dtype=jnp.int32)
        entry = jnp.where(on_host, jnp.cumsum(on_host) - 1, targets.shape[0])
        listed, wanted = (
            jnp.zeros_like(targets).at[entry].set(each, mode="drop")
            for each in (targets, host_rows)
        )
        return fetch_rows(stored, host, layer, wanted, listed, jnp.sum(on_host))

    return run_if(jnp.any(on_host), fetch, stored)


def merge_attention(
    outputs: Float[Array, "shards rows heads latent"], lse: Float[Array, "shards rows heads"]
) -> Float[Array, "rows heads latent"]:
    """The reference of `operation.merge_attention`, of what was packed."""
    outputs = jnp.where((lse == -jnp.inf)[..., None], 0.0, outputs)
    highest = jnp.max(lse, axis=0)
    weights = jnp.exp(lse - jnp.where(highest > -jnp.inf, highest, 0.0))
    merged = weights[0, ..., None] * outputs[0]
    total = weights[0]
    for shard in range(1, lse.shape[0]):
        merged += weights[shard, ..., None] * outputs[shard]
        total += weights[shard]
    return merged / jnp.where(total > 0, total, 1.0)[..., None]
