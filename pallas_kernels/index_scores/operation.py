"""Lightning-indexer scores of query rows over the paged index keys of their sequences."""

import functools

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from pallas_kernels.common import implementation as implementations
from pallas_kernels.common.implementation import Implementation
from pallas_kernels.common.row_format import RowFormat
from pallas_kernels.common.types import Interpret
from pallas_kernels.index_scores import mosaic_gpu, reference
from pallas_kernels.index_scores.plan import unsupported


def index_scores(
    query: Float[Array, "rows heads key_dim"],
    head_weights: Float[Array, "rows heads"],
    index_keys: Shaped[Array, "index_layers pages rows_per_page width"],
    index_layer: int | Int[Array, ""],
    pages: Int[Array, " context_pages"],
    num_keys: Int[Array, ""],
    row_format: RowFormat,
    *,
    implementation: Implementation | None = None,
) -> Float[Array, "rows context"]:
    """`batched_index_scores` of one sequence."""

    def kernel(
        query: Array,
        head_weights: Array,
        index_keys: Array,
        index_layer: Array,
        pages: Array,
        num_keys: Array,
        *,
        interpret: Interpret,
    ) -> Array:
        return mosaic_gpu.index_scores(
            query[None],
            head_weights[None],
            index_keys,
            index_layer,
            pages[None],
            num_keys[None],
            row_format=row_format,
            interpret=interpret,
        )[0]

    return implementations.run(
        implementation,
        functools.partial(reference.index_scores, row_format=row_format),
        kernel,
        unsupported((1, *query.shape), query.dtype, index_keys.shape[2], row_format),
        query,
        head_weights,
        index_keys,
        jnp.asarray(index_layer, jnp.int32),
        pages,
        num_keys,
    )


def batched_index_scores(
    query: Float[Array, "sequences rows heads key_dim"],
    head_weights: Float[Array, "sequences rows heads"],
    index_keys: Shaped[Array, "index_layers pages rows_per_page width"],
    index_layer: int | Int[Array, ""],
    pages: Int[Array, "sequences context_pages"],
    num_keys: Int[Array, " sequences"],
    row_format: RowFormat,
    *,
    implementation: Implementation | None = None,
) -> Float[Array, "sequences rows context"]:
    """Scores `sum_h w[h] * relu(q[h] . k[s])` of each row against its sequence's keys, in float32.

    A score's bits depend on its query and its key, and not on the other rows and sequences.

    The kernel multiplies exactly and adds in another order than the reference: the two differ by
    less than `2**-16 * sum_h |w[h]| * sum_d |q[h, d] * k[s, d]|`. An exception is an e4m3 query of
    fp8 keys, which Hopper's tensor cores multiply twice as fast and add with 14 bits.

    Args:
        query: rotated index queries.
        head_weights: weight of each head, all constant scales folded in.
        index_keys: stored keys.
        index_layer: which layer's keys.
        pages: each sequence's pages in order.
        num_keys: keys of each sequence from here on need not be scored.
        row_format: format of a stored key.
        implementation: None takes the kernel on a GPU where it supports the shapes.

    Returns:
        One score per key of `pages`. What lies in blocks of `KEY_BLOCK` keys from `num_keys` on is
        -inf; the other scores are not masked.

    Raises:
        ValueError: the kernel is asked for, and does not support the shapes.
    """
    return implementations.run(
        implementation,
        functools.partial(reference.batched_index_scores, row_format=row_format),
        functools.partial(mosaic_gpu.index_scores, row_format=row_format),
        unsupported(query.shape, query.dtype, index_keys.shape[2], row_format),
        query,
        head_weights,
        index_keys,
        jnp.asarray(index_layer, jnp.int32),
        pages,
        num_keys,
    )
