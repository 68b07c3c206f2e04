"""Shapes that the kernel scores, and the division of a launch over the GPU."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common.row_format import RowFormat
from pallas_kernels.index_scores.query_operand import KEY_DIM, WORDS

BLOCK = 128
"""Keys that a warpgroup scores together."""
RING = 2
"""Blocks of keys that a warpgroup keeps in flight."""
MAX_SEQUENCES = 256
"""Most sequences of a call."""
_MAX_WARPGROUPS = 3
_MAX_INTERPRETED = 2  # as many threads as wait there may block those they wait for
_MAX_COLUMNS = 256  # query rows times heads times parts in shared memory
_SHARED_BYTES = 224 * 1024
_ALIGNED_KEYS = 32  # four fp8 keys are a copied row, and a copy begins at a multiple of 8
_SWIZZLE = 128


def unsupported(
    query_shape: tuple[int, ...],
    query_dtype: jax.typing.DTypeLike,
    rows_per_page: int,
    row_format: RowFormat,
) -> str | None:
    """Why the kernel cannot score queries [sequences, rows, heads, key_dim], None if it can."""
    sequences, rows, heads, key_dim = query_shape
    if row_format.kind == "float32":
        return "float32 keys have no exact tensor core form"
    if key_dim != KEY_DIM:
        return f"keys of {key_dim} values, not {KEY_DIM}"
    if heads % 8 or heads > 64:
        return f"{heads} heads, not a multiple of 8 up to 64"
    if rows_per_page % _ALIGNED_KEYS or max(rows_per_page, BLOCK) % min(rows_per_page, BLOCK):
        return f"{rows_per_page} rows per page, not {_ALIGNED_KEYS}, 64 or a multiple of {BLOCK}"
    if not 0 < sequences <= MAX_SEQUENCES or not rows:
        return f"{sequences} sequences of {rows} rows, not 1 to {MAX_SEQUENCES} of 1 or more"
    if query_dtype == jnp.float8_e4m3fn and row_format.kind != "fp8":
        return f"e4m3 queries of {row_format.kind} keys"
    return None


@dataclasses.dataclass(frozen=True)
class Plan:
    """Sizes of one launch.

    Attributes:
        rows: query rows.
        heads: heads of a row.
        parts: operands whose sum is the query.
        dtype: of the operands.
        fp8_keys: keys are stored as words, to be unpacked.
        rows_per_page: keys of a page.
        context_pages: pages of a sequence.
        interpreted: runs in the interpreter.
    """

    rows: int
    heads: int
    parts: int
    dtype: Any
    fp8_keys: bool
    rows_per_page: int
    context_pages: int
    interpreted: bool

    @property
    def keys_per_line(self) -> int:
        """Keys side by side in a row of the stored keys as they are copied."""
        # The interpreter cannot read lines of four keys as keys, and can copy single ones.
        return 4 if self.fp8_keys and not self.interpreted else 1

    @functools.cached_property
    def rows_together(self) -> int:
        """Query rows in shared memory."""
        most = max(1, _MAX_COLUMNS // (self.heads * self.parts))
        return max(rows for rows in range(1, most + 1) if self.rows % rows == 0)

    @property
    def columns(self) -> int:
        """Columns of the query operand in shared memory."""
        return self.rows_together * self.heads

    @property
    def row_tiles(self) -> int:
        """Tiles of query rows, each scored by blocks of its own."""
        return self.rows // self.rows_together

    @property
    def context(self) -> int:
        """Keys of a sequence's pages."""
        return self.context_pages * self.rows_per_page

    @property
    def context_blocks(self) -> int:
        """Blocks of keys of a sequence, the last one perhaps not whole."""
        return -(-self.context // BLOCK)

    @property
    def copied_keys(self) -> int:
        """Keys of a copy: they lie in one page."""
        return min(self.rows_per_page, BLOCK)

    @property
    def transforms(self) -> tuple[Any, ...]:
        """Layout of a tensor core operand in shared memory."""
        # pyright takes the transforms for abstract.
        tiling = plgpu.TilingTransform(  # pyright: ignore[reportAbstractUsage]
            (8, _SWIZZLE // jnp.dtype(self.dtype).itemsize)
        )
        return tiling, plgpu.SwizzleTransform(_SWIZZLE)  # pyright: ignore[reportAbstractUsage]

    @property
    def warpgroups(self) -> int:
        """Warpgroups of a block, as many as shared memory has room for."""
        itemsize = jnp.dtype(self.dtype).itemsize
        operand = BLOCK * KEY_DIM * itemsize
        stored = BLOCK * (KEY_DIM + 4) if self.fp8_keys else 0
        own = RING * stored + operand if self.fp8_keys else RING * operand
        query = self.parts * self.columns * KEY_DIM * itemsize
        most = _MAX_INTERPRETED if self.interpreted else _MAX_WARPGROUPS
        return min(most, (_SHARED_BYTES - query) // (own + 1024))

    def scratch(self) -> dict[str, Any]:
        """Shared memory and barriers; what a warpgroup has of its own leads with its number."""
        groups, slots = self.warpgroups, self.warpgroups * RING
        operand = plgpu.SMEM(
            (groups if self.fp8_keys else slots, BLOCK, KEY_DIM),
            self.dtype,
            transforms=self.transforms,
        )
        scratch = {
            "operand": operand,
            "query": plgpu.SMEM(
                (self.parts, self.columns, KEY_DIM), self.dtype, transforms=self.transforms
            ),
            "weights": plgpu.SMEM((self.columns,), jnp.float32),
            "landed": plgpu.Barrier(num_barriers=slots, num_arrivals=BLOCK // self.copied_keys),
            "loaded": plgpu.Barrier(num_arrivals=self.parts + 1),
            "released": plgpu.Barrier(num_arrivals=groups),
            "counted": plgpu.Barrier(),
        }
        if self.fp8_keys:
            lines, width = BLOCK // self.keys_per_line, (WORDS + 1) * self.keys_per_line
            scratch["words"] = plgpu.SMEM((slots, lines, width), jnp.int32)
            scratch["scale"] = plgpu.SMEM((groups, BLOCK, 1), jnp.float32)
        return scratch
