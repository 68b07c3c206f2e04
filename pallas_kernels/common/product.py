"""Matrix products of references, and what they make of stored matrices and of rows.

Block FP8: DeepSeek-V3 (arXiv:2412.19437), section 3.3.2.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Shaped

from pallas_kernels.common.quantization import LEAST_SCALE
from pallas_kernels.common.row_format import SCALE_GROUP, quantize_e4m3, spread
from pallas_kernels.common.types import Scalar


def take(stack: Shaped[Array, "..."], *index: Scalar) -> Shaped[Array, "..."]:
    """The entry of a stack at the given leading indices, as one slice."""
    starts = (*index, *[0] * (stack.ndim - len(index)))
    sizes = (*[1] * len(index), *stack.shape[len(index) :])
    return lax.dynamic_slice(stack, starts, sizes).reshape(sizes[len(index) :])


def dequantize(
    weight: Float[Array, "outputs inputs"],
    scale: Float[Array, "output_blocks input_blocks"],
    starts: tuple[Scalar, Scalar],
    dtype: jax.typing.DTypeLike,
) -> Float[Array, "outputs inputs"]:
    """A part of a block-FP8 matrix, of which 128 x 128 values share a scale.

    Args:
        weight: e4m3 values.
        scale: scales of the whole matrix.
        starts: output and input with which the part begins.
        dtype: of the result.
    """
    for dim, start in enumerate(starts):
        scale = jnp.repeat(scale, SCALE_GROUP, axis=dim)
        scale = lax.dynamic_slice_in_dim(scale, start, weight.shape[dim], dim)
    return (weight.astype(jnp.float32) * scale).astype(dtype)


def round_to_e4m3(rows: Float[Array, "*rows width"]) -> Float[Array, "*rows width"]:
    """Rows after rounding to e4m3 with a power-of-two scale per started group of 128."""
    values, scale = quantize_e4m3(rows, LEAST_SCALE)
    return (values.astype(jnp.float32) * spread(scale, rows.shape[-1])).astype(rows.dtype)


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
