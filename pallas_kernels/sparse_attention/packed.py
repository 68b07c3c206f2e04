"""Attention to a part of a selection in one array: the mean, then its log-sum-exp."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

TAIL_BYTES = 16
"""Bytes after the mean: the log-sum-exp in float32, then zeros."""


def tail_width(dtype: jax.typing.DTypeLike) -> int:
    """Elements of `dtype` after the mean."""
    return TAIL_BYTES // jnp.dtype(dtype).itemsize


def pack(
    mean: Float[Array, "*shape latent"], lse: Float[Array, "*shape"], dtype: jax.typing.DTypeLike
) -> Float[Array, "*shape packed"]:
    """The mean, rounded to `dtype`, and the log-sum-exp, which is not."""
    bits = lax.bitcast_convert_type(lse, dtype)
    bits = bits.reshape(*lse.shape, lse.dtype.itemsize // jnp.dtype(dtype).itemsize)
    padding = jnp.zeros((*lse.shape, tail_width(dtype) - bits.shape[-1]), dtype)
    return jnp.concatenate([mean.astype(dtype), bits, padding], axis=-1)


def unpack(
    packed: Float[Array, "*shape packed"],
) -> tuple[Float[Array, "*shape latent"], Float[Array, "*shape"]]:
    """The mean and the log-sum-exp, both float32."""
    latent = packed.shape[-1] - tail_width(packed.dtype)
    bits = packed[..., latent : latent + 4 // packed.dtype.itemsize]
    if bits.shape[-1] == 1:
        bits = bits[..., 0]
    lse = lax.bitcast_convert_type(bits, jnp.float32)
    return packed[..., :latent].astype(jnp.float32), lse
