"""Public functions of attention to selected rows, and of what goes before and after it.

Queries are prepared on the device that has their heads, and gathered; each device attends to the
rows that it owns; and the parts are exchanged and merged, again by head.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.common.implementation import Implementation, run
from pallas_kernels.common.row_format import RowFormat
from pallas_kernels.common.types import HostSlab, Interpret, Scalar, Slab
from pallas_kernels.sparse_attention import column_order, mosaic_gpu, packed, reference
from pallas_kernels.sparse_attention.plan import unsupported


def prepare_query(
    latent: Float[Array, "rows heads latent"],
    rope: Float[Array, "rows heads rope"],
    row_format: RowFormat,
) -> Float[Array, "rows heads values"]:
    """Absorbed queries as `sparse_attention` takes them.

    Args:
        latent: part that meets the latents.
        rope: rotated part.
        row_format: format of the rows that they will meet.
    """
    query = jnp.concatenate([latent, rope], axis=-1)
    if column_order.by_bytes(row_format, query.dtype):
        return column_order.query_by_bytes(query)
    return query


def sparse_attention(
    query: Float[Array, "parts rows part_heads values"],
    slab: Slab,
    host: HostSlab | None,
    layer: Scalar,
    row_ids: Int[Array, "rows k"],
    count: Int[Array, " rows"],
    scale: float,
    row_format: RowFormat,
    *,
    implementation: Implementation | None = None,
) -> Float[Array, "parts rows part_heads packed"]:
    """Attends to the rows of one layer that `row_ids` names, in the order given.

    A row's bits depend on its query and on what it selects, in order: not on other rows, nor on
    where the selected rows lie. The kernel rounds weights to bfloat16 and adds in another order
    than the reference: a mean differs by less than 2**-7 of the largest latent that is selected,
    the rounding of the mean included, and a log-sum-exp by less than 2**-15 of the largest
    `scale * sum |q * k|`, plus 2**-20.

    Args:
        query: what `prepare_query` gives, the heads of each device a part.
        slab: stored rows on the device.
        host: stored rows in host memory, if there are any.
        layer: which layer's rows.
        row_ids: rows counted from the layer's first, over its pages and on into the layers after
            it, round the end; from the number of the slab's rows on, rows of `host`.
        count: how many of a row's ids are valid; those after them mean nothing.
        scale: factor of the scores.
        row_format: format of a stored row.
        implementation: None takes the kernel on a GPU where it supports the shapes.

    Returns:
        For each head what `merge_attention` takes, in the query's dtype: the weighted mean of the
        latents, the log-sum-exp of the scores as the bits of a float32, and zeros up to 16 bytes
        after the mean. An empty selection gives a mean of 0 and -inf.

    Raises:
        ValueError: the kernel is asked for, and does not support the shapes.
    """
    by_bytes = column_order.by_bytes(row_format, query.dtype)

    def attend_by_value(query: Array, *arrays: Any) -> Array:
        query = column_order.query_by_value(query) if by_bytes else query
        found = reference.sparse_attention(query, *arrays, scale=scale, row_format=row_format)
        return _reorder(found, column_order.latents_by_bytes) if by_bytes else found

    def attend_by_bytes(query: Array, *arrays: Any, interpret: Interpret) -> Array:
        reorder = row_format.kind == "fp8" and not by_bytes
        query = column_order.query_by_bytes(query) if reorder else query
        found = mosaic_gpu.sparse_attention(
            query, *arrays, scale=scale, row_format=row_format, interpret=interpret
        )
        return _reorder(found, column_order.latents_by_value) if reorder else found

    return run(
        implementation,
        attend_by_value,
        attend_by_bytes,
        unsupported(query, row_format),
        query,
        slab,
        host,
        jnp.asarray(layer, jnp.int32),
        row_ids,
        count,
    )


def merge_attention(
    attended: Float[Array, "shards rows heads packed"], row_format: RowFormat
) -> Float[Array, "rows heads latent"]:
    """Combines attention over disjoint shards of a selection, in the order of the shards.

    Args:
        attended: what `sparse_attention` gives of each shard.
        row_format: format of the rows.

    Returns:
        The weighted mean of the latents, in float32. Shards with log-sum-exp -inf count for
        nothing; if all have it, the mean is 0.
    """
    merged = reference.merge_attention(*packed.unpack(attended))
    if column_order.by_bytes(row_format, attended.dtype):
        return column_order.latents_by_value(merged)
    return merged


def _reorder(attended: Array, reorder: Callable[[Array], Array]) -> Array:
    latent = attended.shape[-1] - packed.tail_width(attended.dtype)
    return jnp.concatenate([reorder(attended[..., :latent]), attended[..., latent:]], axis=-1)
