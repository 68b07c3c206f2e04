"""Index scores in plain jax.numpy.

Keys are visited in blocks of a fixed number of rows and query rows one at a time, so a score's bits
depend on its query, its key and the key's index in its block, and on nothing else.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Shaped

from pallas_kernels.common.row_format import RowFormat

KEY_BLOCK = 512
"""Rows of a key block; a page must divide it."""


def index_scores(
    query: Float[Array, "rows heads key_dim"],
    head_weights: Float[Array, "rows heads"],
    index_keys: Shaped[Array, "index_layers pages rows_per_page width"],
    index_layer: int | Int[Array, ""],
    pages: Int[Array, " context_pages"],
    num_keys: Int[Array, ""],
    row_format: RowFormat,
) -> Float[Array, "rows context"]:
    """`operation.index_scores`."""
    rows_per_page = index_keys.shape[2]
    pages_per_block = KEY_BLOCK // rows_per_page
    blocks = jnp.pad(pages, (0, -pages.shape[0] % pages_per_block)).reshape(-1, pages_per_block)
    query, head_weights = query.astype(jnp.float32), head_weights.astype(jnp.float32)

    def score_block(block: jax.Array, scores: jax.Array) -> jax.Array:
        keys = row_format.unpack(index_keys[index_layer, blocks[block]])
        keys = keys.reshape(KEY_BLOCK, -1)

        def score_row(row: tuple[jax.Array, jax.Array]) -> jax.Array:
            row_query, row_weights = row  # [heads, key_dim], [heads]
            similarity = jnp.matmul(keys, row_query.T, precision=lax.Precision.HIGHEST)
            weighted = jnp.matmul(
                jax.nn.relu(similarity), row_weights, precision=lax.Precision.HIGHEST
            )
            return weighted  # [KEY_BLOCK]

        block_scores = lax.map(score_row, (query, head_weights))
        return lax.dynamic_update_slice(scores, block_scores, (0, block * KEY_BLOCK))

    scores = jnp.full((query.shape[0], blocks.size * rows_per_page), -jnp.inf, jnp.float32)
    num_blocks = -(-num_keys // KEY_BLOCK)
    scores = lax.fori_loop(0, num_blocks, score_block, scores)
    return scores[:, : pages.shape[0] * rows_per_page]


def batched_index_scores(
    query: Float[Array, "sequences rows heads key_dim"],
    head_weights: Float[Array, "sequences rows heads"],
    index_keys: Shaped[Array, "index_layers pages rows_per_page width"],
    index_layer: int | Int[Array, ""],
    pages: Int[Array, "sequences context_pages"],
    num_keys: Int[Array, " sequences"],
    row_format: RowFormat,
) -> Float[Array, "sequences rows context"]:
    """`operation.batched_index_scores`, one sequence at a time."""

    def score(sequence: tuple[jax.Array, ...]) -> jax.Array:
        query, head_weights, pages, num_keys = sequence
        return index_scores(
            query, head_weights, index_keys, index_layer, pages, num_keys, row_format
        )

    return lax.map(score, (query, head_weights, pages, num_keys))
