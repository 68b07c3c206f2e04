"""Queries as operands of the tensor cores, in the order in which the kernel unpacks keys."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

KEY_DIM = 128
WORDS = KEY_DIM // 4
"""Words that hold the values of an fp8 key."""


def query_operand(
    query: Float[Array, "sequences rows heads key_dim"],
    head_weights: Float[Array, "sequences rows heads"],
    fp8_keys: bool,
) -> tuple[Float[Array, "sequences parts columns key_dim"], Float[Array, "sequences columns"]]:
    """Queries as parts [sequences, parts, rows * heads, key_dim] that sum to them, and weights.

    For fp8 keys, whose values float16 holds, the parts are float16: one of a bfloat16 query; two of
    a float32 query, which leave out 2**-22 of a value. Each head is scaled by a power of two to
    begin just below 2**15, so that what is too small for float16 is 2**-39 of the head's largest
    value, and its weight by the inverse. An e4m3 query stays as it is.
    For bfloat16 keys the parts are bfloat16: one, or three that hold a float32 exactly.
    """
    weights = head_weights.astype(jnp.float32)
    wide, narrow = query.astype(jnp.float32), query.dtype == jnp.bfloat16
    if query.dtype == jnp.float8_e4m3fn:
        parts = [query]
    elif fp8_keys:
        amax = lax.bitcast_convert_type(jnp.max(jnp.abs(wide), axis=-1), jnp.int32)
        exponent = jnp.minimum(127 + 14 + 127 - (amax >> 23), 253)
        factor = lax.bitcast_convert_type(exponent << 23, jnp.float32)
        weights = weights * lax.bitcast_convert_type((254 - exponent) << 23, jnp.float32)
        parts = _split(wide * factor[..., None], jnp.float16, 1 if narrow else 2)
    else:
        parts = _split(wide, jnp.bfloat16, 1 if narrow else 3)
    operand = jnp.stack(parts, axis=1)
    if fp8_keys:
        by_word = operand.reshape(*operand.shape[:-1], WORDS, 4)
        operand = by_word.swapaxes(-1, -2)
    sequences, num_parts, rows, heads = operand.shape[:4]
    operand = operand.reshape(sequences, num_parts, rows * heads, KEY_DIM)
    return operand, weights.reshape(sequences, rows * heads)


def _split(values: jax.Array, dtype: Any, parts: int) -> list[jax.Array]:
    """Parts of `dtype` whose sum is nearly or just the float32 values."""
    info = jnp.finfo(dtype)
    split = []
    for _ in range(parts - 1):
        # XLA may take a conversion there and back for none, but not this.
        rounded = lax.reduce_precision(values, info.nexp, info.nmant)
        split.append(rounded.astype(dtype))
        values = values - rounded
    return [*split, values.astype(dtype)]
