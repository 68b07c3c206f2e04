"""Fetching as asynchronous copies, a row each."""

import jax.numpy as jnp
from jaxtyping import Array, Int

from pallas_kernels.common.ring_copy import (
    NUM_BLOCKS,
    Copies,
    load,
    ring_copy,
    split_row,
    store,
)
from pallas_kernels.common.types import HostSlab, Interpret, Ref, Scalar
from pallas_kernels.fetch_rows.reference import Rows


def fetch_rows(
    rows: Rows,
    host: HostSlab,
    layer: Scalar,
    host_rows: Int[Array, " listed"],
    targets: Int[Array, " listed"],
    count: Int[Array, ""],
    *,
    interpret: Interpret,
    num_blocks: int = NUM_BLOCKS,
) -> Rows:
    """The kernel of `operation.fetch_rows`."""
    row = split_row(host.shape[3], host.dtype)
    assert row is not None

    def plan(rows: Ref, host: Ref, layer: Ref, host_rows: Ref, targets: Ref, count: Ref) -> Copies:
        def fetch(transfer: Scalar, slot: Ref, barrier: Ref) -> None:
            load(host.at[host_rows[transfer], layer[0]], slot.at[0], barrier)

        def put(transfer: Scalar, slot: Ref) -> None:
            store(slot.at[0], rows.at[targets[transfer]])

        return Copies(count[0], fetch, put)

    fetched = ring_copy(
        "fetch_rows",
        plan,
        rows.reshape(-1, *row),
        (
            host.reshape(-1, host.shape[2], *row),
            jnp.asarray(layer, jnp.int32).reshape(1),
            host_rows,
            targets,
            count.astype(jnp.int32).reshape(1),
        ),
        (1, *row),
        host_rows.shape[0],
        num_blocks,
        interpret,
    )
    return fetched.reshape(rows.shape)
