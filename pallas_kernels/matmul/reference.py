"""Products of token rows and a matrix of a stack in plain jax.numpy.

Block FP8: DeepSeek-V3 (arXiv:2412.19437), section 3.3.2.
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.common.product import dequantize, multiply, round_to_e4m3, take
from pallas_kernels.common.row_tiles import ROW_TILE, map_row_tiles
from pallas_kernels.common.types import Scalar
from pallas_kernels.matmul.matrix_stack import MatrixStack, RowsFunction


def bind(
    stacks: Sequence[MatrixStack], indices: Sequence[tuple[Scalar, ...]], dtype: jnp.dtype | None
) -> RowsFunction:
    """`operation.bind_together`; dequantises each matrix once, however often it is multiplied."""
    matrices = [dequantized(stack, *index) for stack, index in zip(stacks, indices, strict=True)]

    def apply(rows: jax.Array) -> tuple[jax.Array, ...]:
        products = []
        for stack, matrix in zip(stacks, matrices, strict=True):
            inputs = round_to_e4m3(rows) if stack.round_inputs else rows
            products.append(_multiply_tiles(inputs, matrix).astype(dtype or rows.dtype))
        return tuple(products)

    return apply


def dequantized(stack: MatrixStack, *index: Scalar) -> Float[Array, "outputs inputs"]:
    """This device's part of one matrix, in the dtype of the rows."""
    weight = take(stack.weight, *index)
    if stack.scale is None:
        return weight
    outputs, inputs = (
        0 if part is None else part * size
        for part, size in zip((stack.output_part, stack.input_part), weight.shape, strict=True)
    )
    return dequantize(weight, take(stack.scale, *index), (outputs, inputs), stack.dtype)


def _multiply_tiles(
    rows: Float[Array, "*rows inputs"], matrix: Float[Array, "outputs inputs"]
) -> Float[Array, "*rows outputs"]:
    """Products in tiles of rows, unless the rows are one."""
    if math.prod(rows.shape[:-1]) <= ROW_TILE:
        return multiply(rows, matrix)
    flat = rows.reshape(-1, rows.shape[-1])
    product = map_row_tiles(lambda tile: multiply(tile, matrix), flat)
    return product.reshape(*rows.shape[:-1], -1)
