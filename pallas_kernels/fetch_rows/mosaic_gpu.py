"""Fetching as asynchronous copies, a row each."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.common.ring_copy import (
    NUM_BLOCKS,
    Copies,
    Index,
    Ref,
    load,
    ring_copy,
    split_row,
    store,
)


def fetch_rows(
    rows: jax.Array,
    host: jax.Array,
    layer: Index,
    host_rows: jax.Array,
    targets: jax.Array,
    count: jax.Array,
    *,
    interpret: Any,
    num_blocks: int = NUM_BLOCKS,
) -> jax.Array:
    """The kernel of `operation.fetch_rows`."""
    row = split_row(host.shape[3], host.dtype)
    assert row is not None

    def plan(rows: Ref, host: Ref, layer: Ref, host_rows: Ref, targets: Ref, count: Ref) -> Copies:
        def fetch(transfer: Index, slot: Ref, barrier: Ref) -> None:
            load(host.at[host_rows[transfer], layer[0]], slot.at[0], barrier)

        def put(transfer: Index, slot: Ref) -> None:
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
