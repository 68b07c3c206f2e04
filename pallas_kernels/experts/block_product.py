"""Products of 128 x 128 blocks inside a kernel; weights are the left operand, token rows the right.

An e4m3 block of weights becomes float16 in registers, one instruction for two values, and is the
register operand of wgmma; a bfloat16 block is read from shared memory as it is. Token rows are N.
Per row and group of 128 they are brought to float16 by a power of two, or rounded to e4m3, which
float16 holds; so a product of a block is scaled by one number for the weights and one a row.

Block FP8: DeepSeek-V3 (arXiv:2412.19437), section 3.3.2.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.common.quantization import LEAST_SCALE
from pallas_kernels.common.row_format import E4M3_MAX
from pallas_kernels.common.types import Ref

BLOCK = 128
"""Inputs of a block, and outputs."""
ROWS = 64
"""Rows of weights that a product takes."""

WGMMA = plgpu.Layout.WGMMA
_SWIZZLE = 128
_LARGEST_EXPONENT = 14  # a row's largest value begins just below 2**15, float16 ends at 65,504


def tiled(dtype: jax.typing.DTypeLike) -> tuple[Any, ...]:
    """Layout of a tensor core operand in shared memory."""
    # pyright takes the transforms for abstract.
    tiling = plgpu.TilingTransform(  # pyright: ignore[reportAbstractUsage]
        (8, _SWIZZLE // jnp.dtype(dtype).itemsize)
    )
    return tiling, plgpu.SwizzleTransform(_SWIZZLE)  # pyright: ignore[reportAbstractUsage]


def operand_dtype(weight_dtype: jax.typing.DTypeLike) -> Any:
    """dtype of both operands."""
    return jnp.float16 if jnp.dtype(weight_dtype).itemsize == 1 else jnp.bfloat16


def row_layout() -> Any:
    """Values [rows, 128]: 16 lanes of a warp have a row, eight values each."""
    tiling = plgpu.Tiling(((8, BLOCK), (2, BLOCK), (8,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)


def scale_rows(
    values: Float[Array, "rows block"], round_inputs: bool
) -> tuple[Float[Array, "rows block"], Float[Array, " rows"]]:
    """Float16 values of a group, and the power of two of each row by which they are to be
    multiplied."""
    wide = values.astype(jnp.float32)
    bits = lax.bitcast_convert_type(jnp.max(jnp.abs(wide), axis=1), jnp.int32)
    if round_inputs:
        # As `row_format.power_of_two_scale`.
        exponent = (bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000).astype(jnp.int32)
        fraction, least = math.frexp(LEAST_SCALE)
        exponent = jnp.maximum(exponent, least - (fraction == 0.5) + 127)
    else:
        exponent = jnp.minimum(jnp.maximum((bits >> 23) - _LARGEST_EXPONENT, 1), 253)
    power = lax.bitcast_convert_type(exponent << 23, jnp.float32)
    inverse = lax.bitcast_convert_type((254 - exponent) << 23, jnp.float32)
    scaled = wide * lax.broadcast_in_dim(inverse, wide.shape, (0,))
    if round_inputs:
        # The conversion would make infinities the largest number.
        scaled = jnp.where(jnp.abs(scaled) <= E4M3_MAX, scaled, jnp.nan)
        scaled = scaled.astype(jnp.float8_e4m3fn)
    return scaled.astype(jnp.float16), power


def multiply(weights: Ref, rows: Ref, halves: Ref | None) -> Float[Array, "outputs rows"]:
    """Product of a block of weights [outputs, inputs] and rows [rows, inputs], in float32.

    Args:
        weights: in shared memory, e4m3 or bfloat16.
        rows: in shared memory.
        halves: shared memory through which e4m3 weights go to the tensor cores in the interpreter,
            which has no register operands; None compiles them.
    """

    def run(products: Ref) -> jax.Array:
        left: Any = weights
        if jnp.dtype(weights.dtype).itemsize == 1:
            left = weights[...].astype(jnp.float16)
            if halves is not None:
                halves[...] = left
                plgpu.commit_smem()
                left = halves
        plgpu.wgmma(products, left, rows.transpose((1, 0)))
        return products[...]

    shape = (weights.shape[0], rows.shape[0])
    return pl.run_scoped(run, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))


def zeros(rows: int) -> Float[Array, "outputs rows"]:
    """A sum of nothing."""
    return plgpu.layout_cast(jnp.zeros((ROWS, rows), jnp.float32), WGMMA)


def load_by_row(factors: Ref) -> Float[Array, "outputs rows"]:
    """Factors [rows] of shared memory, over the outputs of a product."""
    loaded = plgpu.load(factors, layout=WGMMA.reduce(0), optimized=False)
    return lax.broadcast_in_dim(loaded, (ROWS, *factors.shape), (1,))
