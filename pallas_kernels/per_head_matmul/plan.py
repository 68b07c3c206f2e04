"""Matrices that the kernel multiplies by, and the division of a launch over the GPU."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common.row_format import SCALE_GROUP
from pallas_kernels.matmul.matrix_stack import MatrixStack
from pallas_kernels.matmul.plan import ROWS, choose_tokens_together, transforms
from pallas_kernels.per_head_matmul.reference import HeadRows

_MAX_TOKENS = 64  # together, whose sums and product have room in registers


def unsupported(stack: MatrixStack, taken: HeadRows) -> str | None:
    """Why the kernel cannot multiply by rows of these matrices, None if it can."""
    if stack.dtype != jnp.bfloat16:
        return f"{jnp.dtype(stack.dtype)} rows, not bfloat16"
    expected = jnp.bfloat16 if stack.scale is None else jnp.float8_e4m3fn
    if stack.weight.dtype != expected:
        return f"{stack.weight.dtype} weights, not {jnp.dtype(expected)}"
    if stack.inputs % SCALE_GROUP:
        return f"{stack.inputs} inputs, not a multiple of {SCALE_GROUP}"
    for size, what in (
        (taken.per_head, "rows per head"),
        (taken.first, "rows before those taken"),
        (taken.count, "rows taken"),
    ):
        if size % ROWS:
            return f"{size} {what}, not a multiple of {ROWS}"
    if stack.scale is not None and stack.output_part is not None and stack.outputs % SCALE_GROUP:
        return f"parts of {stack.outputs} outputs, not a multiple of {SCALE_GROUP}"
    return None


@dataclasses.dataclass(frozen=True)
class Plan:
    """Sizes of one launch.

    Attributes:
        taken: rows of a head.
        transpose: they are the inputs of the product.
        heads: heads.
        inputs: of the stored matrix.
        weight_dtype: of the stored matrix.
        tokens: rows, padded to whole tiles.
        tokens_together: rows of a tile.
    """

    taken: HeadRows
    transpose: bool
    heads: int
    inputs: int
    weight_dtype: Any
    tokens: int
    tokens_together: int

    @classmethod
    def choose(cls, stack: MatrixStack, taken: HeadRows, transpose: bool, tokens: int) -> "Plan":
        """The plan for a number of rows; the order of sums does not depend on it."""
        together = choose_tokens_together(tokens, _MAX_TOKENS)
        return cls(
            taken=taken,
            transpose=transpose,
            heads=stack.outputs // taken.per_head,
            inputs=stack.inputs,
            weight_dtype=stack.weight.dtype,
            tokens=max(1, -(-tokens // together)) * together,
            tokens_together=together,
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
    def width(self) -> int:
        """Inputs of a head's product."""
        return self.taken.count if self.transpose else self.inputs

    @property
    def products(self) -> int:
        """Outputs of a head's product."""
        return self.inputs if self.transpose else self.taken.count

    @property
    def block(self) -> int:
        """Inputs that are multiplied together; their weights have one scale."""
        # Rows of a head begin within a block of scales.
        return ROWS if self.transpose else SCALE_GROUP

    @property
    def num_steps(self) -> int:
        """Blocks of inputs."""
        return self.width // self.block

    @property
    def tiles(self) -> int:
        """Tiles of a head's outputs."""
        return self.products // ROWS

    def scratch(self) -> dict[str, Any]:
        """Shared memory and barriers."""
        steps, tokens = self.num_steps, self.tokens_together
        weights = (ROWS, self.block)  # in the transposed product a square

        def operand(shape: tuple[int, ...], dtype: Any) -> Any:
            swizzle = min(128, shape[-1] * jnp.dtype(dtype).itemsize)
            return plgpu.SMEM(shape, dtype, transforms=transforms(dtype, swizzle))

        scratch = {
            "weights": operand((steps, *weights), self.weight_dtype),
            "rows": operand((steps, tokens, self.block), self.row_dtype),
            "landed": plgpu.Barrier(num_barriers=steps, num_arrivals=2),
            "out": operand((tokens, ROWS), jnp.bfloat16),
        }
        if self.converts:
            scratch["converted"] = operand(weights, jnp.float16)
            scratch["factors"] = plgpu.SMEM((tokens,), jnp.float32)
        return scratch
