"""Appending in plain jax.numpy."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.common.row_format import RowFormat
from pallas_kernels.common.types import Scalar, Slab


def append_rows(
    slab: Slab,
    layer: Scalar,
    latent: Float[Array, "tokens latent"],
    rope: Float[Array, "tokens rope"],
    pages: Int[Array, " tokens"],
    rows: Int[Array, " tokens"],
    row_format: RowFormat,
) -> Slab:
    """The reference of `operation.append_rows`."""
    page = jnp.where(pages >= 0, pages, slab.shape[1])
    packed = row_format.pack(latent, rope)
    return slab.at[layer, page, rows].set(packed, mode="drop")
