"""Selection in plain jax.numpy: higher score first, then lower position.

-0.0 and 0.0 are equal scores, which `lax.top_k` would rank apart.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

_LAST = jnp.iinfo(jnp.int32).max


def select_topk(
    scores: Float[Array, "rows context"],
    positions: Int[Array, " context"],
    first: int,
    last: Int[Array, " rows"],
    k: int,
) -> tuple[Float[Array, "rows k"], Int[Array, "rows k"]]:
    """`operation.select_topk`, ordered."""
    allowed = (positions >= first) & (positions <= last[:, None])
    scores = jnp.where(scores == 0, 0.0, scores)
    scores = jnp.where(allowed, scores, -jnp.inf)
    best, index = lax.top_k(scores, min(k, scores.shape[1]))
    chosen = jnp.where(best > -jnp.inf, positions[index], -1)
    missing = [(0, 0), (0, k - best.shape[1])]
    return (
        jnp.pad(best, missing, constant_values=-jnp.inf),
        jnp.pad(chosen, missing, constant_values=-1),
    )


def merge_topk(
    scores: Float[Array, "shards rows k"], positions: Int[Array, "shards rows k"]
) -> Int[Array, "rows k"]:
    """`operation.merge_topk`."""
    num_shards, num_rows, k = scores.shape
    if num_shards == 1:
        best = positions[0]
    else:
        candidates = positions.transpose(1, 0, 2).reshape(num_rows, -1)
        ranked = scores.transpose(1, 0, 2).reshape(num_rows, -1)
        _, best = lax.sort((-ranked, jnp.where(candidates < 0, _LAST, candidates)), num_keys=2)
        best = best[:, :k]
    ordered = jnp.sort(jnp.where(best < 0, _LAST, best), axis=-1)
    return jnp.where(ordered == _LAST, -1, ordered)
