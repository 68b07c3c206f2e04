"""Page moves as asynchronous copies.

Host memory is read and written in contiguous pieces, some layers of a row each: small scattered
pieces would waste its link, while the device's memory does not mind them.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.common.ring_copy import (
    ALIGNMENT,
    NUM_BLOCKS,
    TRANSFER_BYTES,
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
from pallas_kernels.move_pages.reference import Moves


def unsupported_copy(slab: Slab) -> str | None:
    """Why the kernel cannot copy pages within a slab, None if it can."""
    page_bytes = slab.shape[2] * slab.shape[3] * slab.dtype.itemsize
    if page_bytes % ALIGNMENT:
        return f"a layer's pages of {page_bytes} bytes are no multiple of {ALIGNMENT}"
    return None


def offload_pages(
    slab: Slab,
    host: HostSlab,
    moves: Moves,
    *,
    interpret: Interpret,
    num_blocks: int = NUM_BLOCKS,
) -> HostSlab:
    """The kernel of `operation.offload_pages`."""
    row, spans = _layout(slab)

    def plan(host: Ref, slab: Ref, moves: Ref) -> Copies:
        def fetch(transfer: Scalar, slot: Ref, barrier: Ref) -> None:
            move, page_row, span = _locate(transfer, host.shape[1], spans)
            page = moves[move, 0]

            def layers(start: Scalar, size: int) -> None:
                source = slab.at[pl.ds(start, size), page, page_row]
                load(source, slot.at[pl.ds(0, size)], barrier)

            spans.visit(span, layers)

        def put(transfer: Scalar, slot: Ref) -> None:
            move, page_row, span = _locate(transfer, host.shape[1], spans)
            target = host.at[moves[move, 1], page_row]

            def layers(start: Scalar, size: int) -> None:
                store(slot.at[pl.ds(0, size)], target.at[pl.ds(start, size)])

            spans.visit(span, layers)

        return Copies(_count(moves) * host.shape[1] * spans.count, fetch, put)

    stored = ring_copy(
        "offload_pages",
        plan,
        host.reshape(*host.shape[:3], *row),
        (slab.reshape(*slab.shape[:3], *row), moves),
        (spans.sizes[0], *row),
        moves.shape[0] * host.shape[1] * int(spans.count),
        num_blocks,
        interpret,
    )
    return stored.reshape(host.shape)


def onload_pages(
    slab: Slab,
    host: HostSlab,
    moves: Moves,
    *,
    interpret: Interpret,
    num_blocks: int = NUM_BLOCKS,
) -> Slab:
    """The kernel of `operation.onload_pages`."""
    row, spans = _layout(slab)

    def plan(slab: Ref, host: Ref, moves: Ref) -> Copies:
        def fetch(transfer: Scalar, slot: Ref, barrier: Ref) -> None:
            move, page_row, span = _locate(transfer, host.shape[1], spans)
            source = host.at[moves[move, 0], page_row]

            def layers(start: Scalar, size: int) -> None:
                load(source.at[pl.ds(start, size)], slot.at[pl.ds(0, size)], barrier)

            spans.visit(span, layers)

        def put(transfer: Scalar, slot: Ref) -> None:
            move, page_row, span = _locate(transfer, host.shape[1], spans)
            page = moves[move, 1]

            def layers(start: Scalar, size: int) -> None:
                store(slot.at[pl.ds(0, size)], slab.at[pl.ds(start, size), page, page_row])

            spans.visit(span, layers)

        return Copies(_count(moves) * host.shape[1] * spans.count, fetch, put)

    loaded = ring_copy(
        "onload_pages",
        plan,
        slab.reshape(*slab.shape[:3], *row),
        (host.reshape(*host.shape[:3], *row), moves),
        (spans.sizes[0], *row),
        moves.shape[0] * host.shape[1] * int(spans.count),
        num_blocks,
        interpret,
    )
    return loaded.reshape(slab.shape)


def copy_pages(
    slab: Slab, moves: Moves, *, interpret: Interpret, num_blocks: int = NUM_BLOCKS
) -> Slab:
    """The kernel of `operation.copy_pages`."""
    layers, pages, rows_per_page, width = slab.shape
    line = ALIGNMENT // slab.dtype.itemsize  # a page need not consist of longer ones
    lines = rows_per_page * width // line
    spans = Spans.even(lines, TRANSFER_BYTES // ALIGNMENT)

    def plan(slab: Ref, moves: Ref) -> Copies:
        def part(transfer: Scalar, end: int, run: Any) -> None:
            moved, span = divide(transfer, spans.count)
            move, layer = divide(moved, layers)
            page = slab.at[layer, moves[move, end]]
            spans.visit(
                span,
                lambda start, size: run(page.at[pl.ds(start * line, size * line)], size * line),
            )

        def fetch(transfer: Scalar, slot: Ref, barrier: Ref) -> None:
            part(transfer, 0, lambda page, size: load(page, slot.at[pl.ds(0, size)], barrier))

        def put(transfer: Scalar, slot: Ref) -> None:
            part(transfer, 1, lambda page, size: store(slot.at[pl.ds(0, size)], page))

        return Copies(_count(moves) * layers * spans.count, fetch, put)

    copied = ring_copy(
        "copy_pages",
        plan,
        slab.reshape(layers, pages, lines * line),
        (moves,),
        (spans.sizes[0] * line,),
        moves.shape[0] * layers * int(spans.count),
        num_blocks,
        interpret,
    )
    return copied.reshape(slab.shape)


def _layout(slab: jax.Array) -> tuple[tuple[int, int], Spans]:
    """A row's pieces, and the layers of a row that are moved together."""
    layers, _, _, width = slab.shape
    row = split_row(width, slab.dtype)
    assert row is not None
    return row, Spans.even(layers, lines_within(width * slab.dtype.itemsize))


def _locate(transfer: Scalar, rows: int, spans: Spans) -> tuple[Scalar, Scalar, Scalar]:
    """Move, row of the page and span of its layers of a transfer."""
    moved, span = divide(transfer, spans.count)
    return *divide(moved, rows), span


def _count(moves: Ref) -> Scalar:
    """Moves before the padding, by bisection."""
    size = moves.shape[0]

    def halve(_: Scalar, bounds: tuple[Scalar, Scalar]) -> tuple[Scalar, Scalar]:
        low, high = bounds
        middle, _ = divide(low + high, 2)
        valid = (low < high) & (moves[jnp.minimum(middle, size - 1), 0] >= 0)
        return (
            jnp.where(valid, middle + 1, low),
            jnp.where(valid, high, jnp.minimum(middle, high)),
        )

    bounds = jnp.int32(0), jnp.int32(size)
    return lax.fori_loop(0, size.bit_length(), halve, bounds)[0]
