"""Fetching in plain jax.numpy."""

import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped

from pallas_kernels.common.types import HostSlab, Scalar

Rows = Shaped[Array, "rows width"]
"""The buffer that rows are fetched to."""


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
