"""Rotary position embedding over interleaved pairs (x[2i], x[2i + 1]): arXiv:2104.09864."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


def rope_angles(
    positions: Int[Array, " rows"], theta: float, rope_dim: int
) -> tuple[Float[Array, "rows half"], Float[Array, "rows half"]]:
    """Cosines and sines of position / theta^(2i / rope_dim), in float32."""
    exponents = np.arange(0, rope_dim, 2) / rope_dim
    frequencies = (1.0 / np.float64(theta) ** exponents).astype(np.float32)
    angles = positions.astype(jnp.float32)[:, None] * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def apply_rope(
    values: Float[Array, "rows *heads rope_dim"],
    cos: Float[Array, "rows half"],
    sin: Float[Array, "rows half"],
) -> Float[Array, "rows *heads rope_dim"]:
    """Rotates pairs in float32, keeping their interleaved order."""
    shape = (cos.shape[0], *[1] * (values.ndim - 2), cos.shape[1])
    cos, sin = cos.reshape(shape), sin.reshape(shape)
    even = values[..., 0::2].astype(jnp.float32)
    odd = values[..., 1::2].astype(jnp.float32)
    rotated = jnp.stack([even * cos - odd * sin, odd * cos + even * sin], axis=-1)
    return rotated.reshape(values.shape).astype(values.dtype)
