"""Staging as asynchronous copies. A row's layers of one index group are one transfer, or few."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Int

from pallas_kernels.common.ring_copy import (
    NUM_BLOCKS,
    Copies,
    Spans,
    divide,
    lines_within,
    load,
    ring_copy,
    split_row,
    store,
)
from pallas_kernels.common.types import HostSlab, Interpret, Ref, Scalar, Slab

LAYERS_TOGETHER = (4, 2, 1)
"""Layers of a transfer of `stage_rows`; GLM-5.3's groups have 4 layers or 1."""


def stage_rows(
    slab: Slab,
    host: HostSlab,
    first_layer: Scalar,
    num_layers: Scalar,
    host_rows: Int[Array, " misses"],
    device_rows: Int[Array, " misses"],
    count: Int[Array, ""],
    *,
    interpret: Interpret,
    num_blocks: int = NUM_BLOCKS,
) -> Slab:
    """The kernel of `operation.stage_rows`."""
    layers, device_pages, rows_per_page, width = slab.shape
    row = split_row(width, slab.dtype)
    assert row is not None
    sizes = tuple(size for size in LAYERS_TOGETHER if size <= layers)

    def plan(
        slab: Ref, host: Ref, first: Ref, layers: Ref, host_rows: Ref, device_rows: Ref, count: Ref
    ) -> Copies:
        first_layer, bursts = first[0], Spans(layers[0], sizes)

        def fetch(transfer: Scalar, slot: Ref, barrier: Ref) -> None:
            miss, index = divide(transfer, bursts.count)
            row = host.at[host_rows[miss]]

            def burst(start: Scalar, size: int) -> None:
                load(row.at[pl.ds(first_layer + start, size)], slot.at[pl.ds(0, size)], barrier)

            bursts.visit(index, burst)

        def put(transfer: Scalar, slot: Ref) -> None:
            miss, index = divide(transfer, bursts.count)
            row = device_rows[miss]

            def burst(start: Scalar, size: int) -> None:
                target = slab.at[pl.ds(first_layer + start, size), row]
                store(slot.at[pl.ds(0, size)], target)

            bursts.visit(index, burst)

        return Copies(count[0] * bursts.count, fetch, put)

    staged = ring_copy(
        "stage_rows",
        plan,
        slab.reshape(layers, device_pages * rows_per_page, *row),
        (
            host.reshape(-1, layers, *row),
            _scalar(first_layer),
            _scalar(num_layers),
            host_rows,
            device_rows,
            _scalar(count),
        ),
        (sizes[0], *row),
        host_rows.shape[0] * layers,
        num_blocks,
        interpret,
    )
    return staged.reshape(slab.shape)


def stage_pages(
    slab: Slab,
    host: HostSlab,
    layer: Scalar,
    host_pages: Int[Array, " pages"],
    targets: Int[Array, " pages"],
    count: Int[Array, ""],
    *,
    interpret: Interpret,
    num_blocks: int = NUM_BLOCKS,
) -> Slab:
    """The kernel of `operation.stage_pages`."""
    layers, device_pages, rows_per_page, width = slab.shape
    row = split_row(width, slab.dtype)
    assert row is not None
    spans = Spans.even(rows_per_page, lines_within(width * slab.dtype.itemsize))

    def plan(slab: Ref, host: Ref, layer: Ref, host_pages: Ref, targets: Ref, count: Ref) -> Copies:
        def fetch(transfer: Scalar, slot: Ref, barrier: Ref) -> None:
            staged, index = divide(transfer, spans.count)
            page = host_pages[staged]

            def rows(start: Scalar, size: int) -> None:
                load(host.at[page, pl.ds(start, size), layer[0]], slot.at[pl.ds(0, size)], barrier)

            spans.visit(index, rows)

        def put(transfer: Scalar, slot: Ref) -> None:
            staged, index = divide(transfer, spans.count)
            target = layer[0] * device_pages + targets[staged]
            page = slab.at[divide(target, layers * device_pages)[1]]

            def rows(start: Scalar, size: int) -> None:
                store(slot.at[pl.ds(0, size)], page.at[pl.ds(start, size)])

            spans.visit(index, rows)

        return Copies(count[0] * spans.count, fetch, put)

    staged = ring_copy(
        "stage_pages",
        plan,
        slab.reshape(layers * device_pages, rows_per_page, *row),
        (host.reshape(*host.shape[:3], *row), _scalar(layer), host_pages, targets, _scalar(count)),
        (spans.sizes[0], *row),
        host_pages.shape[0] * int(spans.count),
        num_blocks,
        interpret,
    )
    return staged.reshape(slab.shape)


def _scalar(value: Scalar) -> jax.Array:
    return jnp.asarray(value, jnp.int32).reshape(1)
