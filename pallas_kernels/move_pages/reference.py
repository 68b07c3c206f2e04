"""Page moves in plain jax.numpy, one page after another, in place."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from pallas_kernels.common.types import HostSlab, Slab

Moves = Int[Array, "moves 2"]
"""Pages to move: from, to; then padding of -1."""


def offload_pages(slab: Slab, host: HostSlab, moves: Moves) -> HostSlab:
    """The reference of `operation.offload_pages`."""

    def store(host: jax.Array, device_page: jax.Array, host_page: jax.Array) -> jax.Array:
        page = lax.dynamic_index_in_dim(slab, device_page, 1, keepdims=False)
        return lax.dynamic_update_index_in_dim(host, jnp.swapaxes(page, 0, 1), host_page, 0)

    return _move(store, host, moves)


def onload_pages(slab: Slab, host: HostSlab, moves: Moves) -> Slab:
    """The reference of `operation.onload_pages`."""

    def load(slab: jax.Array, host_page: jax.Array, device_page: jax.Array) -> jax.Array:
        page = lax.dynamic_index_in_dim(host, host_page, 0, keepdims=False)
        return lax.dynamic_update_index_in_dim(slab, jnp.swapaxes(page, 0, 1), device_page, 1)

    return _move(load, slab, moves)


def copy_pages(slab: Slab, moves: Moves) -> Slab:
    """The reference of `operation.copy_pages`."""

    def copy(slab: jax.Array, source: jax.Array, target: jax.Array) -> jax.Array:
        page = lax.dynamic_index_in_dim(slab, source, 1, keepdims=False)
        return lax.dynamic_update_index_in_dim(slab, page, target, 1)

    return _move(copy, slab, moves)


def _move(move: Callable[..., jax.Array], state: jax.Array, moves: jax.Array) -> jax.Array:
    """Applies the moves, which lie before the padding, in order."""
    count = jnp.sum(moves[:, 0] >= 0)
    return lax.fori_loop(0, count, lambda i, state: move(state, moves[i, 0], moves[i, 1]), state)
