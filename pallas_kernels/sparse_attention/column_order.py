"""Order of the values of queries and means, as the implementation that runs by default has them.

A stored fp8 word holds four latents. The kernel takes byte 0 of the 32 words under a scale, then
byte 1, and so on; of the rotated part it takes the lower halves of all words, then the upper ones.
Queries are put in this order before devices exchange them, and merged means are put back from it:
XLA fuses both with what is done there anyway.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.common.implementation import default_implementation
from pallas_kernels.common.row_format import SCALE_GROUP, RowFormat

LATENT, ROPE = 512, 64
"""Values of the rows that the kernel takes."""
_LATENTS_PER_WORD, _ROPE_PER_WORD = 4, 2
_WORDS = SCALE_GROUP // _LATENTS_PER_WORD  # under a scale


def unsupported_values(row_format: RowFormat, dtype: jax.typing.DTypeLike) -> str | None:
    """Why the kernel cannot multiply rows with queries of `dtype`, None if it can."""
    if row_format.kind == "float32" or jnp.dtype(dtype) != jnp.bfloat16:
        kinds = f"{row_format.kind} rows and {jnp.dtype(dtype).name} queries"
        return f"{kinds}: tensor cores take fp8 or bfloat16 rows and bfloat16 queries"
    if (row_format.latent_dim, row_format.rope_dim) != (LATENT, ROPE):
        return f"rows of {row_format.latent_dim} + {row_format.rope_dim} values, not 512 + 64"
    return None


def by_bytes(row_format: RowFormat, dtype: jax.typing.DTypeLike) -> bool:
    """Whether queries of `dtype` and their means are in the kernel's order of fp8 rows."""
    unsupported = unsupported_values(row_format, dtype)
    return row_format.kind == "fp8" and default_implementation(unsupported) != "reference"


def query_by_bytes(query: Float[Array, "*shape values"]) -> Float[Array, "*shape values"]:
    """Queries, latent part then rotated part, in the kernel's order."""
    rope = query[..., LATENT:]
    halves = [rope[..., half::_ROPE_PER_WORD] for half in range(_ROPE_PER_WORD)]
    return jnp.concatenate([latents_by_bytes(query[..., :LATENT]), *halves], axis=-1)


def query_by_value(query: Float[Array, "*shape values"]) -> Float[Array, "*shape values"]:
    """The inverse of `query_by_bytes`."""
    halves = jnp.split(query[..., LATENT:], _ROPE_PER_WORD, axis=-1)
    rope = jnp.stack(halves, axis=-1).reshape(*query.shape[:-1], ROPE)
    return jnp.concatenate([latents_by_value(query[..., :LATENT]), rope], axis=-1)


# Slices joined, where a transposition would do: that would be a kernel of its own.


def latents_by_bytes(latents: Float[Array, "*shape latent"]) -> Float[Array, "*shape latent"]:
    """Latents in the kernel's order."""
    words = latents.reshape(*latents.shape[:-1], -1, _WORDS, _LATENTS_PER_WORD)
    planes = [words[..., byte] for byte in range(_LATENTS_PER_WORD)]
    return jnp.stack(planes, axis=-2).reshape(latents.shape)


def latents_by_value(latents: Float[Array, "*shape latent"]) -> Float[Array, "*shape latent"]:
    """The inverse of `latents_by_bytes`."""
    planes = latents.reshape(*latents.shape[:-1], -1, _LATENTS_PER_WORD, _WORDS)
    words = [planes[..., byte, :] for byte in range(_LATENTS_PER_WORD)]
    return jnp.stack(words, axis=-1).reshape(latents.shape)
