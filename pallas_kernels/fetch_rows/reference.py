"""Fetching in plain jax.numpy."""

import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped

Rows = Shaped[Array, "rows width"]
HostSlab = Shaped[Array, "host_pages rows_per_page layers width"]
Scalar = int | Int[Array, ""]


def fetch_rows(
    rows: Rows,
    host: HostSlab,
    layer: Scalar,
    host_rows: Int[Array, " listed"],
    targets: Int[Array, " listed"],
    count: Int[Array, ""],
) -> Rows:
    """The reference of `operation.fetch_rows`."""
    valid = jnp.arange(host_rows.shape[0]) < count
    source = host.reshape(-1, *host.shape[2:])
    fetched = source[jnp.where(valid, host_rows, 0), layer]
    return rows.at[jnp.where(valid, targets, rows.shape[0])].set(fetched, mode="drop")
