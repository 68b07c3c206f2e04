"""Arithmetic on token rows in tiles of a fixed size.

XLA rounds a matrix product differently for different numbers of rows. Every product over token rows
therefore runs on tiles of `ROW_TILE` rows, so that a row's bits do not depend on its neighbours:
not on the batch, nor on how a prompt is cut into chunks, nor on padding.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Shaped

ROW_TILE = 8
"""Rows of a tile."""


def map_row_tiles[Outputs](
    fn: Callable[..., Outputs], *rows: Shaped[Array, "..."], axis: int = 0
) -> Outputs:
    """Applies `fn` to tiles of rows, padded with zeros, one after another.

    Args:
        fn: maps arrays [..., ROW_TILE, ...] to arrays [ROW_TILE, ...], each row on its own.
        rows: arrays [..., tokens, ...].
        axis: axis of their tokens.

    Returns:
        What `fn` gives, [tokens, ...].
    """
    num_rows = rows[0].shape[axis]
    num_tiles = -(-num_rows // ROW_TILE)

    def pad(array: Array) -> Array:
        padding = [(0, 0)] * array.ndim
        padding[axis] = (0, num_tiles * ROW_TILE - num_rows)
        return jnp.pad(array, padding)

    padded = [pad(array) for array in rows]

    def compute(number: Array | int) -> Outputs:
        start = number * ROW_TILE
        tiles = [lax.dynamic_slice_in_dim(x, start, ROW_TILE, axis) for x in padded]
        return _keep_apart(fn(*_keep_apart(tiles)))

    def run(number: Array, outputs: Outputs) -> Outputs:
        def put(output: Array, tile: Array) -> Array:
            return lax.dynamic_update_slice_in_dim(output, tile, number * ROW_TILE, 0)

        return jax.tree.map(put, outputs, compute(number))

    # Every row is written: unlike the outputs of `lax.map`, these need not be zeros before.
    outputs = jax.tree.map(
        lambda tile: lax.empty((num_tiles * ROW_TILE, *tile.shape[1:]), tile.dtype),
        jax.eval_shape(lambda: compute(0)),
    )
    outputs = lax.fori_loop(0, num_tiles, run, outputs)
    return jax.tree.map(lambda output: output[:num_rows], outputs)


def _keep_apart[Tree](arrays: Tree) -> Tree:
    """On a CPU, keeps XLA from fusing what gives arrays with what takes them.

    A loop over one tile is no loop to XLA. Fused with what surrounds it, a tile's arithmetic may be
    rounded otherwise than in a loop.
    """
    leaves, structure = jax.tree.flatten(arrays)
    kept = lax.platform_dependent(
        *leaves, cpu=lambda *x: lax.optimization_barrier(x), default=lambda *x: x
    )
    return jax.tree.unflatten(structure, kept)
