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
    ordered: bool = True,
) -> tuple[Float[Array, "rows k"], Int[Array, "rows k"]]:
    """`operation.select_topk`."""
    allowed = (positions >= first) & (positions <= last[:, None])
    scores = jnp.where(scores == 0, 0.0, scores)
    scores = jnp.where(allowed, scores, -jnp.inf)
    best, index = lax.top_k(scores, min(k, scores.shape[1]))
    chosen = jnp.where(best > -jnp.inf, positions[index], -1)
    if not ordered:
        chosen, best = lax.sort((jnp.where(chosen < 0, _LAST, chosen), best), num_keys=1)
        chosen = jnp.where(chosen == _LAST, -1, chosen)
    missing = [(0, 0), (0, k - best.shape[1])]
    return (
        jnp.pad(best, missing, constant_values=-jnp.inf),
        jnp.pad(chosen, missing, constant_values=-1),
    )


def merge_topk(
    scores: Float[Array, "shards rows k"],
    positions: Int[Array, "shards rows k"],
    shard: Int[Array, ""],
) -> Int[Array, "rows k"]:
    """`operation.merge_topk`."""
    num_shards, num_rows, k = scores.shape
    if num_shards == 1:
        return positions[0]
    candidates = jnp.where(positions < 0, _LAST, positions)
    ranked = lax.sort(
        tuple(x.transpose(1, 0, 2).reshape(num_rows, -1) for x in (-scores, candidates)),
        num_keys=2,
    )
    score, position = (x[:, k - 1 : k] for x in ranked)  # the last of the best
    own, mine = -scores[shard], candidates[shard]
    chosen = (mine < _LAST) & ((own < score) | ((own == score) & (mine <= position)))
    ordered = jnp.sort(jnp.where(chosen, mine, _LAST), axis=-1)
    return jnp.where(ordered == _LAST, -1, ordered)
