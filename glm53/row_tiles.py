"""Arithmetic on token rows in tiles of a fixed size.

XLA rounds a matrix product differently for different numbers of rows. Every product over token rows
therefore runs on tiles of `ROW_TILE` rows, so that a row's bits do not depend on its neighbours:
not on the batch, nor on how a prompt is cut into chunks, nor on padding.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

ROW_TILE = 8
"""Rows of a tile."""


def map_row_tiles[Outputs](fn: Callable[..., Outputs], *rows: jax.Array) -> Outputs:
    """Applies `fn` to tiles of rows, padded with zeros, one after another.

    Args:
        fn: maps arrays [ROW_TILE, ...] to arrays [ROW_TILE, ...], each row on its own.
        rows: arrays [tokens, ...].

    Returns:
        What `fn` gives, for all tokens.
    """
    num_rows = rows[0].shape[0]

    def tile(array: jax.Array) -> jax.Array:
        padding = [(0, -num_rows % ROW_TILE)] + [(0, 0)] * (array.ndim - 1)
        return jnp.pad(array, padding).reshape(-1, ROW_TILE, *array.shape[1:])

    tiles = lax.map(lambda arrays: fn(*arrays), tuple(tile(array) for array in rows))
    return jax.tree.map(lambda out: out.reshape(-1, *out.shape[2:])[:num_rows], tiles)
