"""Rows in groups of 128 values, each with a power-of-two scale, as block-FP8 products take them.

DeepSeek-V3 (arXiv:2412.19437), section 3.3.2: activations are rounded to e4m3 in groups of 128
values of a row.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float8e4m3fn, Float32, Int

from pallas_kernels.common.pytree import pytree_dataclass
from pallas_kernels.common.row_format import E4M3_MAX, SCALE_GROUP, quantize_e4m3, scale_exponent

LEAST_SCALE = 1e-10 / 448
"""Lower bound of an activation's scale, before it is rounded up to a power of two."""

LANES = 32
VALUES = SCALE_GROUP // LANES
"""Values of a group that a lane holds."""

_WARPS = 4
_NAN = 0x7FC00000  # its bits in float32

GROUPS = plgpu.Layout.TILED(
    plgpu.Tiling(((_WARPS, LANES, VALUES),)), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1
)
"""Layout of groups [groups, LANES, VALUES] in a kernel: a warp has a group, a lane a word of it."""


@pytree_dataclass
class QuantizedRows:
    """Token rows in e4m3.

    Attributes:
        values: [tokens, width].
        scale: float32 [width / 128, tokens], powers of two.
    """

    values: Float8e4m3fn[Array, "tokens width"]
    scale: Float32[Array, "groups tokens"]


def quantize_rows(rows: Float[Array, "tokens width"]) -> QuantizedRows:
    """Rounds rows to e4m3."""
    values, scale = quantize_e4m3(rows, LEAST_SCALE)
    return QuantizedRows(values, scale.T)


def unsupported_width(width: int) -> str | None:
    """Why a kernel cannot take rows of a width as groups, None if it can."""
    if width % (_WARPS * SCALE_GROUP):
        return f"a width of {width} is no multiple of {_WARPS * SCALE_GROUP}"
    return None


def as_groups(array: Any) -> Any:
    """[..., width] to [..., groups, LANES, VALUES]."""
    return array.reshape(*array.shape[:-1], -1, LANES, VALUES)


def quantize_groups(
    values: Float32[Array, "*groups lanes values"], least: float
) -> tuple[Float8e4m3fn[Array, "*groups lanes values"], Int[Array, "*groups"]]:
    """Groups in e4m3 and the bits of their scales, inside a kernel, as `quantize_e4m3` has them.

    The largest value is found among bits, which are ordered like the values, with NaN above all.
    """
    bits = lax.bitcast_convert_type(values, jnp.int32) & jnp.iinfo(jnp.int32).max
    largest = jnp.minimum(jnp.max(jnp.max(bits, axis=-1), axis=-1), _NAN)
    exponent = scale_exponent(largest, least)
    reciprocal = lax.broadcast_in_dim(
        (254 - exponent) << 23, values.shape, tuple(range(values.ndim - 2))
    )
    scaled = values * lax.bitcast_convert_type(reciprocal, jnp.float32)
    # The conversion would make infinities the largest number.
    scaled = jnp.where(jnp.abs(scaled) <= E4M3_MAX, scaled, jnp.nan)
    return scaled.astype(jnp.float8_e4m3fn), exponent << 23
