"""Appending in plain jax.numpy."""

import jax
import jax.numpy as jnp

from pallas_kernels.common.row_format import RowFormat


def append_rows(
    slab: jax.Array,
    layer: int | jax.Array,
    latent: jax.Array,
    rope: jax.Array,
    places: jax.Array,
    rows: jax.Array,
    row_format: RowFormat,
) -> jax.Array:
    """The reference of `operation.append_rows`."""
    place = jnp.where(places >= 0, places, slab.shape[1])
    packed = row_format.pack(latent, rope)
    return slab.at[layer, place, rows].set(packed, mode="drop")
