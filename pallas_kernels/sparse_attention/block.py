"""A block's memory, and its share of the work."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.common.ring_copy import divide
from pallas_kernels.common.types import Ref, Scalar
from pallas_kernels.sparse_attention.plan import HEADS, SLOTS, TILE, Plan


@dataclasses.dataclass(frozen=True)
class Memory:
    """Device memory, and the host's: what the kernel is given, and `packed`, which it writes."""

    query: Ref
    slab: Ref
    host: Ref | None
    layer: Ref
    row_ids: Ref
    count: Ref
    packed: Ref


@dataclasses.dataclass(frozen=True)
class Shared:
    """Shared memory of a block, and its barriers.

    Attributes:
        query: the query.
        mean: what is returned, where the query was.
        keys: operands, by slot.
        weights: weights of a tile, by slot.
        factors: by slot, of what has been added up before the tile; then of all in the end.
        stored: stored rows, by slot.
        landed: by slot, stored rows have come.
        full: by slot, operands are written.
        weighted: by slot, weights and factor are written.
        empty: by slot, operands and weights have been read.
        loaded: the query has come.
        scored: the last factor is written, and what follows the mean.
        averaged: the mean is written.
        returned: the mean has left shared memory.
    """

    query: Ref
    mean: Ref
    keys: Ref
    weights: Ref
    factors: Ref
    stored: Ref
    landed: Ref
    full: Ref
    weighted: Ref
    empty: Ref
    loaded: Ref
    scored: Ref
    averaged: Ref
    returned: Ref


@dataclasses.dataclass(frozen=True)
class Work:
    """A block of heads of a query row, and the tiles that they attend to.

    Attributes:
        turn: how many the block has had before.
        row: the query row.
        group: the block of heads.
        count: selected rows.
        first_tile: how many tiles the block has had before.
    """

    turn: Scalar
    row: Scalar
    group: Scalar
    count: Scalar
    first_tile: Scalar

    @property
    def tiles(self) -> Scalar:
        """Tiles of selected rows, the last one perhaps not whole."""
        return divide(self.count + TILE - 1, TILE)[0]

    def slot(self, tile: Scalar) -> Scalar:
        """Slot of a tile."""
        return lax.rem(self.first_tile + tile, SLOTS)


def each_work(plan: Plan, memory: Memory, run: Callable[[Work], None]) -> jax.Array:
    """Calls `run` for the block's share of the work, and returns its number of tiles."""
    block, num_blocks = lax.axis_index("block"), lax.axis_size("block")

    def step(turn: jax.Array, first_tile: jax.Array) -> jax.Array:
        row, group = divide(block + turn * num_blocks, plan.groups)
        work = Work(turn, row, group, memory.count[row], first_tile)
        run(work)
        return first_tile + work.tiles

    turns, _ = divide(plan.rows * plan.groups - block + num_blocks - 1, num_blocks)
    return lax.fori_loop(0, turns, step, jnp.int32(0))


def each_chunk(plan: Plan, work: Work, run: Callable[[Scalar, Scalar, Scalar], None]) -> None:
    """Calls `run(part, first_head, row)` for heads that lie side by side, from an operand's row."""

    @pl.loop(0, plan.chunks)
    def _(chunk: jax.Array) -> None:
        row = chunk * plan.chunk
        part, head = divide(work.group * HEADS + row, plan.part_heads)
        run(part, head, row)
