"""Conversion of rows from bfloat16 to float16, in which e4m3 weights are exact.

A row of a block of inputs is scaled by a power of two, so that it lies in float16's range.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.common.quantization import LEAST_SCALE
from pallas_kernels.common.row_format import SCALE_GROUP, scale_exponent, spread
from pallas_kernels.common.types import Ref

_BIAS = 127  # of a float32's exponent field
_LARGEST = 14  # exponent of a row's largest value in float16, which ends below 2**16


def convert_rows(rows: Ref, round_to_e4m3: bool) -> Float[Array, " rows"]:
    """Converts the rows of a block of inputs in their place; runs inside a kernel, on a warpgroup.

    Args:
        rows: float16 [rows, width] that holds the bits of bfloat16 values, in shared memory.
        round_to_e4m3: rounds them on the way, as `common.product.round_to_e4m3` does.

    Returns:
        By what each row is to be multiplied to give its former values; NaN of a row that has one,
        or an infinity.
    """
    bits = plgpu.load(rows, layout=_layout(rows.shape[-1]))
    values = lax.bitcast_convert_type(bits, jnp.bfloat16).astype(jnp.float32)
    largest = lax.bitcast_convert_type(jnp.max(jnp.abs(values), axis=1), jnp.int32)
    least = functools.partial(scale_exponent, least=LEAST_SCALE)
    exponent = (least if round_to_e4m3 else float16_exponent)(largest)
    reciprocal = lax.bitcast_convert_type((2 * _BIAS - exponent) << 23, jnp.float32)
    scaled = values * lax.broadcast_in_dim(reciprocal, values.shape, (0,))
    if round_to_e4m3:
        scaled = scaled.astype(jnp.float8_e4m3fn)
    rows[...] = scaled.astype(jnp.float16)
    return finite_factor(exponent, largest)


def float16_rows(
    rows: Float[Array, "tokens inputs"],
) -> tuple[Float[Array, "tokens inputs"], Float[Array, "tokens groups"]]:
    """Rows converted before a kernel, and their factors per group of 128 inputs."""
    values = rows.astype(jnp.float32)
    groups = jnp.abs(values).reshape(rows.shape[0], -1, SCALE_GROUP)
    largest = lax.bitcast_convert_type(jnp.max(groups, axis=-1), jnp.int32)
    exponent = float16_exponent(largest)
    reciprocal = lax.bitcast_convert_type((2 * _BIAS - exponent) << 23, jnp.float32)
    scaled = values * spread(reciprocal, rows.shape[1])
    return scaled.astype(jnp.float16), finite_factor(exponent, largest)


def float16_exponent(largest: Int[Array, "*rows"]) -> Int[Array, "*rows"]:
    """Exponent field of the factor of a row, of the bits of its largest value."""
    return jnp.maximum((largest >> 23) - _LARGEST, 1)


def finite_factor(
    exponent: Int[Array, "*rows"], largest: Int[Array, "*rows"]
) -> Float[Array, "*rows"]:
    """The factor of an exponent field; NaN of a row whose largest value is not finite."""
    factor = lax.bitcast_convert_type(exponent << 23, jnp.float32)
    return jnp.where(largest < jnp.int32(0xFF << 23), factor, jnp.nan)


def load_factors(factors: Ref) -> jax.Array:
    """Factors of rows that are the columns of a product, in its layout."""
    return plgpu.load(factors, layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)


def _layout(width: int) -> Any:
    """Layout of rows [8 * n, width], each held by half a warp."""
    return plgpu.Layout.TILED(
        plgpu.Tiling(((8, width), (2, width), (width // 16,))),
        warp_dims=(-5,),
        lane_dims=(-3, -2),
        vector_dim=-1,
    )
