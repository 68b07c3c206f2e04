"""Products of token rows and a matrix of a stack in plain jax.numpy.

Block FP8: DeepSeek-V3 (arXiv:2412.19437), section 3.3.2.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.common.row_format import SCALE_GROUP, quantize_e4m3, spread
from pallas_kernels.common.types import Scalar
from pallas_kernels.matmul.matrix_stack import MatrixStack, RowsFunction, take

LEAST_ROW_SCALE = 1e-10 / 448
"""Lower bound of the scale of rounded rows."""


def bind(
    stacks: Sequence[MatrixStack], indices: Sequence[tuple[Scalar, ...]], dtype: jnp.dtype | None
) -> RowsFunction:
    """`operation.bind_together`; dequantises each matrix once, however often it is multiplied."""
    matrices = [dequantize(stack, *index) for stack, index in zip(stacks, indices, strict=True)]

    def apply(rows: jax.Array) -> tuple[jax.Array, ...]:
        products = []
        for stack, matrix in zip(stacks, matrices, strict=True):
            inputs = round_to_e4m3(rows) if stack.round_inputs else rows
            products.append(multiply(inputs, matrix).astype(dtype or rows.dtype))
        return tuple(products)

    return apply


def dequantize(stack: MatrixStack, *index: Scalar) -> Float[Array, "outputs inputs"]:
    """This device's part of one matrix, in the dtype of the rows."""
    weight = take(stack.weight, *index)
    if stack.scale is None:
        return weight
    scale = take(stack.scale, *index)
    for dim, part in enumerate((stack.output_part, stack.input_part)):
        scale = jnp.repeat(scale, SCALE_GROUP, axis=dim)
        start = 0 if part is None else part * weight.shape[dim]
        scale = lax.dynamic_slice_in_dim(scale, start, weight.shape[dim], dim)
    return (weight.astype(jnp.float32) * scale).astype(stack.dtype)


def multiply(
    rows: Float[Array, "*rows inputs"], matrix: Float[Array, "outputs inputs"]
) -> Float[Array, "*rows outputs"]:
    """Product of rows and a matrix stored output-major, accumulated in float32."""
    return lax.platform_dependent(rows, matrix, cpu=_cpu_product, default=_product)


def _product(rows: jax.Array, matrix: jax.Array) -> jax.Array:
    return lax.dot_general(
        rows,
        matrix,
        (((rows.ndim - 1,), (1,)), ((), ())),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )


def _cpu_product(rows: jax.Array, matrix: jax.Array) -> jax.Array:
    """The product as XLA:CPU does it best: the matrix first, which is then not packed anew.

    It takes half the time or less. The barriers keep XLA from turning it back. In float32, because
    some products of bfloat16 are missing; the terms are the same exact ones.
    """
    inputs = rows.shape[-1]
    columns = lax.optimization_barrier(rows.reshape(-1, inputs).astype(jnp.float32).T)
    product = lax.dot_general(
        matrix.astype(jnp.float32),
        columns,
        (((1,), (0,)), ((), ())),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    return lax.optimization_barrier(product).T.reshape(*rows.shape[:-1], -1)


def round_to_e4m3(rows: Float[Array, "*rows width"]) -> Float[Array, "*rows width"]:
    """Rows after rounding to e4m3 with a power-of-two scale per started group of 128."""
    values, scale = quantize_e4m3(rows, LEAST_ROW_SCALE)
    return (values.astype(jnp.float32) * spread(scale, rows.shape[-1])).astype(rows.dtype)
