"""Copies within and between memories, through a ring of slots in shared memory.

Both ways are asynchronous copies of contiguous or strided blocks, which take no registers. A block
of the grid keeps all but two of its slots filled or in flight, so that over the GPU some megabytes
are, enough to hide the latency of memory behind a PCIe link.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Shaped

from pallas_kernels.common.types import Interpret, Ref, Scalar

NUM_BLOCKS = 132
"""Blocks of the grid: the multiprocessors of an H200."""
ALIGNMENT = 16
"""Bytes of which an asynchronous copy moves a multiple, from a multiple to a multiple."""
TRANSFER_BYTES = 16 << 10
"""Most bytes of a transfer, unless a single row is longer."""
LONGEST_ROW = 12 << 10
"""Most bytes of a row."""
MAX_SLOTS = 8
"""Most slots of a ring."""

_RING_BYTES = 192 << 10
_SLOT_ALIGNMENT = 128
_LONGEST_BOX_SIDE = 256

# Blocks in one piece need no descriptor, nor keep to the sides of a box.
load = functools.partial(plgpu.copy_gmem_to_smem, oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS)
store = plgpu.copy_smem_to_gmem


def divide(dividend: Scalar, divisor: Scalar) -> tuple[Scalar, Scalar]:
    """Quotient and remainder of numbers that are not negative.

    `//` would take signs into account, and instructions with them.
    """
    if isinstance(dividend, int) and isinstance(divisor, int):
        return divmod(dividend, divisor)
    dividend, divisor = jnp.int32(dividend), jnp.int32(divisor)
    return lax.div(dividend, divisor), lax.rem(dividend, divisor)


@dataclasses.dataclass(frozen=True, slots=True)
class Copies:
    """Copies of a kernel.

    Attributes:
        count: number of transfers; those from there on cost nothing.
        load: `load(transfer, slot, barrier)` starts the copy of a transfer to a slot.
        store: `store(transfer, slot)` starts the copy of a slot to where the transfer leads.
    """

    count: Scalar
    load: Callable[[Scalar, Ref, Ref], None]
    store: Callable[[Scalar, Ref], None]


class _Part(NamedTuple):
    first: Scalar
    number: Scalar
    start: Scalar
    size: int


@dataclasses.dataclass(frozen=True)
class Spans:
    """A length in spans: as many of the first size as fit into it, then of the next, and so on.

    Attributes:
        length: what is divided.
        sizes: sizes of the spans, descending, such that nothing is left over.
    """

    length: Scalar
    sizes: tuple[int, ...]

    @classmethod
    def even(cls, length: int, longest: int) -> "Spans":
        """As few spans as there can be of at most `longest`, all but the last of one size."""
        size = -(-length // -(-length // longest))
        rest = length % size
        return cls(length, (size, rest) if rest else (size,))

    @property
    def _parts(self) -> list[_Part]:
        parts, first, start = [], 0, 0
        for size in self.sizes:
            number, _ = divide(self.length - start, size)
            parts.append(_Part(first, number, start, size))
            first, start = first + number, start + number * size
        return parts

    @property
    def count(self) -> Scalar:
        """Number of spans."""
        return sum(part.number for part in self._parts)

    def visit(self, index: Scalar, run: Callable[[Scalar, int], None]) -> None:
        """Calls `run(start, size)` for a span, whose size is static."""
        if len(self.sizes) == 1:
            run(index * self.sizes[0], self.sizes[0])
            return
        for first, number, start, size in self._parts:
            within = (index >= first) & (index < first + number)
            pl.when(within)(functools.partial(run, start + (index - first) * size, size))


def split_row(width: int, dtype: jax.typing.DTypeLike) -> tuple[int, int] | None:
    """A row's width as pieces, and the width of one, which a side of a box can hold.

    None where a row, or a piece of it, is not a multiple of 16 bytes, or a row is too long.
    """
    itemsize = jnp.dtype(dtype).itemsize
    if width * itemsize > LONGEST_ROW:
        return None
    for pieces in range(-(-width // _LONGEST_BOX_SIDE), width + 1):
        piece = width // pieces
        if width % pieces == 0 and piece * itemsize % ALIGNMENT == 0:
            return pieces, piece
    return None


def unsupported_rows(slab: Shaped[Array, "..."] | jax.ShapeDtypeStruct) -> str | None:
    """Why rows [..., width] cannot be copied singly, None if they can."""
    width, itemsize = slab.shape[-1], slab.dtype.itemsize
    if split_row(width, slab.dtype) is None:
        return f"rows of {width * itemsize} bytes are no multiple of 16 up to {LONGEST_ROW}"
    return None


def lines_within(line_bytes: int) -> int:
    """Lines of a transfer, which is a box with a line along its other sides."""
    return max(1, min(_LONGEST_BOX_SIDE, TRANSFER_BYTES // line_bytes))


def ring_copy(
    name: str,
    plan: Callable[..., Copies],
    target: Shaped[Array, "*shape"],
    operands: Sequence[Shaped[Array, "..."]],
    slot: tuple[int, ...],
    most: int,
    num_blocks: int,
    interpret: Interpret,
) -> Shaped[Array, "*shape"]:
    """Executes the copies that `plan` makes of references to `target` and to `operands`.

    Args:
        name: name of the kernel.
        plan: a function of the references.
        target: what is written, in place.
        operands: what else is read.
        slot: shape of the longest transfer, in lines on its first axis.
        most: most transfers.
        num_blocks: most blocks of the grid.
        interpret: for `plgpu.kernel`.

    Returns:
        The target. No transfer may read what another writes.
    """
    num_blocks = min(num_blocks, most)
    line_bytes = math.prod(slot[1:]) * target.dtype.itemsize
    lines_together = _SLOT_ALIGNMENT // math.gcd(_SLOT_ALIGNMENT, line_bytes)
    lines = -(-slot[0] // lines_together) * lines_together
    num_slots = min(MAX_SLOTS, _RING_BYTES // (lines * line_bytes))

    def body(target_ref: Ref, *refs: Ref) -> None:
        *operand_refs, slots, barriers = refs
        _copy(plan(target_ref, *operand_refs), slots, barriers, num_blocks)

    state = jax.new_ref(target)
    plgpu.kernel(
        body,
        out_type=(),
        grid=(num_blocks,),
        grid_names=("block",),
        scratch_types=[
            plgpu.SMEM((num_slots, lines, *slot[1:]), target.dtype),
            plgpu.Barrier(num_barriers=num_slots),
        ],
        kernel_name=name,
        interpret=interpret,
    )(state, *operands)
    return jax.freeze(state)


def _copy(copies: Copies, slots: Ref, barriers: Ref, num_blocks: int) -> None:
    """Executes a block's share of the copies: one in `num_blocks`."""
    num_slots = barriers.shape[0]
    ahead = num_slots - 2
    block = lax.axis_index("block")
    count, _ = divide(copies.count - block + num_blocks - 1, num_blocks)

    def fill(turn: Scalar) -> None:
        slot = lax.rem(turn, num_slots)
        copies.load(block + turn * num_blocks, slots.at[slot], barriers.at[slot])

    def drain(turn: Scalar) -> None:
        slot = lax.rem(turn, num_slots)
        plgpu.barrier_wait(barriers.at[slot])
        copies.store(block + turn * num_blocks, slots.at[slot])
        # The slot before this one has been read: it is the next to be filled.
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)

    def step(turn: Scalar, _: None) -> None:
        pl.when(turn < count)(lambda: fill(turn))
        pl.when(turn >= ahead)(lambda: drain(turn - ahead))

    lax.fori_loop(0, count + ahead, step, None)
    plgpu.wait_smem_to_gmem(0)
