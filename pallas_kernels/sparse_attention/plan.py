"""Shapes that the kernel takes, and its shared memory."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common.row_format import RowFormat
from pallas_kernels.sparse_attention.column_order import LATENT, ROPE, unsupported_values
from pallas_kernels.sparse_attention.packed import tail_width

HEADS = 64
"""Heads of a block, the rows of a product of the tensor cores."""
TILE = 32
"""Selected rows that are multiplied together."""
SLOTS = 2
"""Tiles on their way to shared memory, and as many that are operands."""
VALUES = LATENT + ROPE
# Weights [HEADS, TILE] have rows of 64 bytes, and all operands of a product the same swizzle.
OPERAND = (
    plgpu.TilingTransform((8, TILE)),  # pyright: ignore[reportAbstractUsage]
    plgpu.SwizzleTransform(2 * TILE),  # pyright: ignore[reportAbstractUsage]
)


def unsupported(query: jax.ShapeDtypeStruct | jax.Array, row_format: RowFormat) -> str | None:
    """Why the kernel cannot take queries [parts, rows, part_heads, values], None if it can."""
    parts, rows, part_heads, _ = query.shape
    if reason := unsupported_values(row_format, query.dtype):
        return reason
    if (
        parts * part_heads % HEADS
        or min(part_heads, HEADS) % 8
        or max(part_heads, HEADS) % min(part_heads, HEADS)
    ):
        return f"{parts} parts of {part_heads} heads, not whole blocks of {HEADS}"
    if not rows:
        return "no rows"
    return None


@dataclasses.dataclass(frozen=True)
class Plan:
    """Sizes of a launch.

    Attributes:
        rows: query rows.
        parts: parts of their heads.
        part_heads: heads of a part.
        fp8_rows: rows are stored as words, to be unpacked.
        slab_rows: rows of the slab.
        layer_rows: rows of a layer of it.
        factor: of a product, so that 2 to its power is its weight.
        interpreted: runs in the interpreter.
    """

    rows: int
    parts: int
    part_heads: int
    fp8_rows: bool
    slab_rows: int
    layer_rows: int
    factor: float
    interpreted: bool

    @property
    def groups(self) -> int:
        """Blocks of heads."""
        return self.parts * self.part_heads // HEADS

    @property
    def chunk(self) -> int:
        """Heads of a block that lie side by side."""
        return min(self.part_heads, HEADS)

    @property
    def chunks(self) -> int:
        """Chunks of a block."""
        return HEADS // self.chunk

    @property
    def pieces(self) -> tuple[int, int]:
        """Pieces of a row in shared memory, and the elements of each.

        Half a bfloat16 row is an odd number of 64 bytes: halves of rows one after another can be
        read without bank conflicts.
        """
        return (1, (LATENT + 16 + 2 * ROPE) // 4) if self.fp8_rows else (2, VALUES // 2)

    @property
    def copies(self) -> tuple[tuple[int, int, int], ...]:
        """Copies of a row: the piece, the first element in it, and how many.

        Mosaic would tile and swizzle memory whose rows and copies are all multiples of 32 bytes,
        and copy by tensor descriptors: hence the last copy.
        """
        _, width = self.pieces
        if self.fp8_rows:
            return ((0, 0, width),)
        return ((0, 0, width), (1, 0, width - 8), (1, width - 8, 8))

    def scratch(self) -> dict[str, Any]:
        """Shared memory and barriers."""
        pieces, width = self.pieces
        pitch = -(-width // TILE) * TILE  # layouts divide it
        stored = jnp.int32 if self.fp8_rows else jnp.bfloat16
        return {
            # The mean is written when the query has been read.
            "query_and_mean": plgpu.RefUnion(
                plgpu.SMEM((HEADS, VALUES), jnp.bfloat16, transforms=OPERAND),
                plgpu.SMEM((HEADS, LATENT + tail_width(jnp.bfloat16)), jnp.bfloat16),
            ),
            "keys": plgpu.SMEM((SLOTS, TILE, VALUES), jnp.bfloat16, transforms=OPERAND),
            "weights": plgpu.SMEM((SLOTS, HEADS, TILE), jnp.bfloat16, transforms=OPERAND),
            "factors": plgpu.SMEM((SLOTS + 1, HEADS), jnp.float32),
            "stored": plgpu.SMEM((SLOTS, pieces, TILE, pitch), stored),
            "landed": plgpu.Barrier(num_barriers=SLOTS, num_arrivals=len(self.copies) * TILE),
            "full": plgpu.Barrier(num_barriers=SLOTS),
            "empty": plgpu.Barrier(num_barriers=SLOTS, num_arrivals=2),
            "weighted": plgpu.Barrier(num_barriers=SLOTS),
            "loaded": plgpu.Barrier(num_arrivals=self.chunks),
            "scored": plgpu.Barrier(),
            "averaged": plgpu.Barrier(num_arrivals=2),
            "returned": plgpu.Barrier(),
        }
