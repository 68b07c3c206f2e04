"""Division of a launch over the GPU, chosen from the shapes of its matrices alone."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common.row_format import SCALE_GROUP
from pallas_kernels.matmul.matrix_stack import MatrixStack

ROWS = 64
"""Outputs of a tile: rows of the weights that one instruction of the tensor cores multiplies."""
BLOCK = SCALE_GROUP
"""Inputs that are multiplied together, and the side of a block of weights with one scale."""
WARPGROUPS = 4
"""Warpgroups of a block, each of which has every fourth block of inputs."""
_MULTIPROCESSORS = 132
_SHARED_BYTES = 225 << 10
_MAX_TOKENS = {1: 56, 2: 32}  # together, by bytes of a weight: registers, and room for two slots
MAX_SLOTS = 6
_LINES = 8  # of a tile of shared memory, and of the least operand of the tensor cores


def unsupported(stacks: Sequence[MatrixStack]) -> str | None:
    """Why the kernel cannot multiply by matrices of these stacks together, None if it can."""
    first = stacks[0]
    for stack in stacks:
        if stack.dtype != jnp.bfloat16:
            return f"{jnp.dtype(stack.dtype)} rows, not bfloat16"
        expected = jnp.bfloat16 if stack.scale is None else jnp.float8_e4m3fn
        if stack.weight.dtype != expected:
            return f"{stack.weight.dtype} weights, not {jnp.dtype(expected)}"
        if stack.weight.dtype != first.weight.dtype:
            return f"{stack.weight.dtype} and {first.weight.dtype} weights together"
        if stack.round_inputs != first.round_inputs:
            return "rows rounded for some of the matrices"
        if stack.inputs != first.inputs:
            return f"matrices of {stack.inputs} and of {first.inputs} inputs together"
        if stack.inputs % BLOCK:
            return f"{stack.inputs} inputs, not a multiple of {BLOCK}"
        if stack.outputs % _LINES:
            return f"{stack.outputs} outputs, not a multiple of {_LINES}"
        if stack.scale is not None and stack.output_part is not None and stack.outputs % BLOCK:
            return f"parts of {stack.outputs} outputs, not a multiple of {BLOCK}"
    return None


@dataclasses.dataclass(frozen=True)
class Plan:
    """Sizes of one launch.

    Attributes:
        outputs: of each matrix.
        inputs: of all matrices.
        weight_dtype: of all matrices.
        dtype: of the products.
        tokens: rows, padded to whole tiles.
        tokens_together: rows of a tile.
        split: parts of the inputs, each multiplied by blocks of its own.
        interpreted: runs in the interpreter.
    """

    outputs: tuple[int, ...]
    inputs: int
    weight_dtype: Any
    dtype: Any
    tokens: int
    tokens_together: int
    split: int
    interpreted: bool

    @classmethod
    def choose(
        cls, stacks: Sequence[MatrixStack], tokens: int, dtype: Any, *, interpreted: bool
    ) -> "Plan":
        """The plan for a number of rows; the order of sums does not depend on it."""
        weight_dtype = stacks[0].weight.dtype
        together = choose_tokens_together(tokens, _MAX_TOKENS[weight_dtype.itemsize])
        outputs, inputs = tuple(stack.outputs for stack in stacks), stacks[0].inputs
        return cls(
            outputs=outputs,
            inputs=inputs,
            weight_dtype=weight_dtype,
            dtype=dtype,
            tokens=max(1, -(-tokens // together)) * together,
            tokens_together=together,
            split=choose_split(outputs, inputs),
            interpreted=interpreted,
        )

    @property
    def converts(self) -> bool:
        """Whether weights are e4m3, and so multiplied in float16."""
        return self.weight_dtype == jnp.float8_e4m3fn

    @property
    def row_dtype(self) -> Any:
        """dtype of rows in shared memory; float16 holds the bits of bfloat16 at first."""
        return jnp.float16 if self.converts else jnp.bfloat16

    @property
    def out_dtype(self) -> Any:
        """dtype of what the kernel stores."""
        return jnp.dtype(jnp.float32 if self.split > 1 else self.dtype)

    @property
    def token_tiles(self) -> int:
        """Tiles of rows."""
        return self.tokens // self.tokens_together

    @property
    def part_blocks(self) -> int:
        """Blocks of inputs of a part."""
        return self.inputs // BLOCK // self.split

    @property
    def num_blocks(self) -> int:
        """Blocks of the grid. Those that read the same weights follow each other."""
        return sum(map(num_tiles, self.outputs)) * self.split * self.token_tiles

    @functools.cached_property
    def slots(self) -> int:
        """Blocks of inputs that a warpgroup keeps in flight."""
        slot = BLOCK * (ROWS * self.weight_dtype.itemsize + self.tokens_together * 2)
        sums = (ROWS + WARPGROUPS) * self.tokens_together * 4  # and factors of rows
        most = (_SHARED_BYTES - sums) // (WARPGROUPS * slot)
        return min(most, MAX_SLOTS, -(-self.part_blocks // WARPGROUPS))

    def scratch(self) -> dict[str, Any]:
        """Shared memory and barriers."""
        slots, tokens = WARPGROUPS * self.slots, self.tokens_together

        def operand(shape: tuple[int, ...], dtype: Any) -> Any:
            return plgpu.SMEM(shape, dtype, transforms=transforms(dtype))

        scratch = {
            "weight_slots": operand((slots, ROWS, BLOCK), self.weight_dtype),
            "row_slots": operand((slots, tokens, BLOCK), self.row_dtype),
            "landed": plgpu.Barrier(num_barriers=slots, num_arrivals=2),
            "sums": plgpu.RefUnion(
                plgpu.SMEM((ROWS, tokens), jnp.float32),
                operand((tokens, ROWS), self.out_dtype),
            ),
            "summed": plgpu.Barrier(num_barriers=WARPGROUPS - 1),
        }
        if self.converts:
            scratch["factors"] = plgpu.SMEM((WARPGROUPS, tokens), jnp.float32)
            if self.interpreted:
                scratch["converted"] = operand((WARPGROUPS, ROWS, BLOCK), jnp.float16)
        return scratch


def choose_tokens_together(tokens: int, most: int) -> int:
    """Rows of a tile: such that none are added, unless the tiles were small."""
    lines = max(1, -(-tokens // _LINES))
    together = max(size for size in range(1, most // _LINES + 1) if lines % size == 0)
    if together < lines and 2 * together * _LINES <= most:
        tiles = -(-lines * _LINES // most)
        together = -(-lines // tiles)
    return together * _LINES


def num_tiles(outputs: int) -> int:
    """Tiles of outputs, the last one perhaps not whole."""
    return -(-outputs // ROWS)


def choose_split(outputs: Sequence[int], inputs: int) -> int:
    """Number of parts of the inputs, whose sums are added up after the launch.

    As many as leave one block to a multiprocessor, and a block of inputs to a warpgroup.
    """
    tiles, blocks = sum(map(num_tiles, outputs)), inputs // BLOCK
    return max(
        split
        for split in range(1, max(1, blocks // WARPGROUPS) + 1)
        if blocks % split == 0 and (split == 1 or split * tiles <= _MULTIPROCESSORS)
    )


def transforms(dtype: Any, swizzle: int = 128) -> tuple[Any, ...]:
    """Layout of an operand of the tensor cores in shared memory, swizzled by so many bytes."""
    # pyright takes the transforms for abstract.
    tiling = plgpu.TilingTransform(  # pyright: ignore[reportAbstractUsage]
        (_LINES, swizzle // jnp.dtype(dtype).itemsize)
    )
    return tiling, plgpu.SwizzleTransform(swizzle)  # pyright: ignore[reportAbstractUsage]
