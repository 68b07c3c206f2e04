"""Byte formats of a cached row: an MLA row (latent and rotated part) or an index key.

| kind     | layout                                                          | GLM-5.3 row | key  |
|----------|-----------------------------------------------------------------|-------------|------|
| float32  | latent, rope                                                    | 2304 B      | 512  |
| bfloat16 | latent, rope                                                    | 1152 B      | 256  |
| fp8      | latent e4m3, a float32 scale per started 128 values, rope bf16  | 656 B       | 132  |

An fp8 row is held as int32 words, the unit in which it is copied. Scales are powers of two, rounded
up, so scaling loses no bit.
"""

import dataclasses
import math
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Shaped

RowKind = Literal["float32", "bfloat16", "fp8"]
ROW_KINDS = ("float32", "bfloat16", "fp8")
SCALE_GROUP = 128
E4M3_MAX = 448.0


def power_of_two_scale(
    values: Float[Array, "*rows width"], least: float
) -> Float[Array, "*rows groups"]:
    """The smallest power of two of at least max(amax / 448, least), per started group of 128."""
    padding = [(0, 0)] * (values.ndim - 1) + [(0, -values.shape[-1] % SCALE_GROUP)]
    groups = jnp.pad(values, padding).reshape(*values.shape[:-1], -1, SCALE_GROUP)
    amax = jnp.max(jnp.abs(groups.astype(jnp.float32)), axis=-1)
    exponent = scale_exponent(lax.bitcast_convert_type(amax, jnp.int32), least)
    return lax.bitcast_convert_type(exponent << 23, jnp.float32)


def scale_exponent(amax_bits: Int[Array, "*groups"], least: float) -> Int[Array, "*groups"]:
    """Exponent field of the smallest power of two of at least max(amax / 448, least).

    Computed on the bits of the float, as 448 is 1.75 * 2**8: a logarithm, or the inexact division
    of a GPU, may round across a power of two.
    """
    exponent = (amax_bits >> 23) - 8 + ((amax_bits & 0x7FFFFF) > 0x600000).astype(jnp.int32)
    fraction, least_exponent = math.frexp(least)  # fraction from 0.5 to 1
    return jnp.maximum(exponent, least_exponent - (fraction == 0.5) + 127)


def quantize_e4m3(
    values: Float[Array, "*rows width"], least: float
) -> tuple[Float[Array, "*rows width"], Float[Array, "*rows groups"]]:
    """Rounds to e4m3 with a scale per started group of 128 along the last axis.

    Infinities and NaN become NaN. No finite value does; those above 248 * 2**120 round to 2**128,
    which unpacks to infinity.
    """
    scale = power_of_two_scale(values, least)
    # Negates the exponent: the reciprocal of a power of two is exact.
    reciprocal = (254 << 23) - lax.bitcast_convert_type(scale, jnp.int32)
    reciprocal = lax.bitcast_convert_type(reciprocal, jnp.float32)
    scaled = values.astype(jnp.float32) * spread(reciprocal, values.shape[-1])
    return scaled.astype(jnp.float8_e4m3fn), scale


def spread(scale: Float[Array, "*rows groups"], width: int) -> Float[Array, "*rows width"]:
    """Repeats each group's scale over its values."""
    return jnp.repeat(scale, SCALE_GROUP, axis=-1)[..., :width]


@dataclasses.dataclass(frozen=True)
class RowFormat:
    """Stored form of a row of `latent_dim` and `rope_dim` numbers.

    Attributes:
        kind: "float32", "bfloat16" or "fp8".
        latent_dim: numbers that fp8 quantises; all of an index key.
        rope_dim: numbers that fp8 keeps in bfloat16; 0 for an index key.
        least_scale: lower bound of an fp8 scale before rounding up.

    Raises:
        ValueError: the sizes do not fill whole 32-bit words in fp8.
    """

    kind: RowKind
    latent_dim: int
    rope_dim: int
    least_scale: float

    def __post_init__(self) -> None:
        if self.kind not in ROW_KINDS:
            raise ValueError(f"row format must be one of {ROW_KINDS}, got {self.kind!r}")
        if self.kind == "fp8" and (self.latent_dim % 4 or self.rope_dim % 2):
            raise ValueError(
                f"fp8 rows need a latent width divisible by 4 and an even rope width, got "
                f"{self.latent_dim} and {self.rope_dim}: use another kv_cache_dtype"
            )

    @property
    def dtype(self) -> jnp.dtype:
        """dtype of a stored row's elements."""
        return jnp.dtype({"float32": "float32", "bfloat16": "bfloat16", "fp8": "int32"}[self.kind])

    @property
    def num_scales(self) -> int:
        """Scales in an fp8 row."""
        return -(-self.latent_dim // SCALE_GROUP)

    @property
    def width(self) -> int:
        """Elements of `dtype` in a stored row."""
        if self.kind == "fp8":
            return (self.latent_dim + 4 * self.num_scales + 2 * self.rope_dim) // 4
        return self.latent_dim + self.rope_dim

    @property
    def row_bytes(self) -> int:
        """Bytes of a stored row."""
        return self.width * self.dtype.itemsize

    def pack(
        self, latent: Float[Array, "*rows latent"], rope: Float[Array, "*rows rope"]
    ) -> Shaped[Array, "*rows width"]:
        """Stored form of rows."""
        if self.kind != "fp8":
            return jnp.concatenate([latent, rope], axis=-1).astype(self.dtype)
        values, scale = quantize_e4m3(latent, self.least_scale)
        parts = [_words(values), _words(scale)]
        if self.rope_dim:
            parts.append(_words(rope.astype(jnp.bfloat16)))
        return jnp.concatenate(parts, axis=-1)

    def unpack(self, rows: Shaped[Array, "*rows width"]) -> Float[Array, "*rows values"]:
        """Latent and rope of stored rows, side by side, in float32."""
        if self.kind != "fp8":
            return rows.astype(jnp.float32)
        ends = (self.latent_dim // 4, self.latent_dim // 4 + self.num_scales)
        latent = _values(rows[..., : ends[0]], jnp.float8_e4m3fn)
        scale = _values(rows[..., ends[0] : ends[1]], jnp.float32)
        latent = latent * spread(scale, self.latent_dim)
        if not self.rope_dim:
            return latent
        return jnp.concatenate([latent, _values(rows[..., ends[1] :], jnp.bfloat16)], axis=-1)


def _words(values: jax.Array) -> jax.Array:
    """Reinterprets the last axis as int32 words."""
    per_word = 4 // values.dtype.itemsize
    if per_word == 1:
        return lax.bitcast_convert_type(values, jnp.int32)
    grouped = values.reshape(*values.shape[:-1], -1, per_word)
    return lax.bitcast_convert_type(grouped, jnp.int32)


def _values(words: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Reinterprets int32 words as numbers of `dtype`, in float32."""
    values = lax.bitcast_convert_type(words, dtype)
    if values.ndim > words.ndim:
        values = values.reshape(*words.shape[:-1], -1)
    return values.astype(jnp.float32)
