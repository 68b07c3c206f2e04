"""Filters of the tokens that may be drawn: min_p, then top_k, then top_p.

Nothing is sorted. Each filter keeps the tokens up to some distance from the most likely one, and
the distance is found by bisection: the bits of floats that are not negative, read as integers, are
in the order of the floats.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

_BITS = 31


def token_distances(
    logits: Float[Array, "rows vocab"], temperature: Float[Array, " rows"]
) -> Float[Array, "rows vocab"]:
    """Distance of each logit below its row's largest, in units of temperature; inf is masked."""
    return (logits.max(axis=1, keepdims=True) - logits) / temperature[:, None]


def kept_tokens(
    distances: Float[Array, "rows vocab"],
    min_p: Float[Array, " rows"],
    top_k: Int[Array, " rows"],
    top_p: Float[Array, " rows"],
) -> Bool[Array, "rows vocab"]:
    """Tokens that all three filters keep; at least one in each row.

    Args:
        distances: float32 from `token_distances`: a token's weight is exp(-distance).
        min_p: keeps weights of at least this; the largest weight is 1.
        top_k: keeps that many most likely tokens and those equal to the last of them; 0 is all.
        top_p: keeps the fewest most likely of the remaining tokens that have this share of their
            weight, and those equal to the last of them; 1 is all.
    """
    weights = jnp.exp(-distances)
    order = lax.bitcast_convert_type(distances, jnp.int32)
    kept = (distances < jnp.inf) & (weights >= min_p[:, None])

    def has_top_k(last: Int[Array, " rows"]) -> Bool[Array, " rows"]:
        return (order <= last[:, None]).sum(axis=1) >= top_k

    kept &= (top_k <= 0)[:, None] | (order <= _first(has_top_k, len(top_k))[:, None])
    weights = jnp.where(kept, weights, 0)
    wanted = top_p * weights.sum(axis=1)

    def has_top_p(last: Int[Array, " rows"]) -> Bool[Array, " rows"]:
        return jnp.where(order <= last[:, None], weights, 0).sum(axis=1) >= wanted

    # top_p 1 keeps also what is too unlikely to change the sum.
    return kept & ((top_p >= 1)[:, None] | (order <= _first(has_top_p, len(top_p))[:, None]))


def _first(
    holds: Callable[[Int[Array, " rows"]], Bool[Array, " rows"]], num_rows: int
) -> Int[Array, " rows"]:
    """The least integer from which on `holds`, which goes from false to true once, for each row."""

    def decide_bit(step: Int[Array, ""], found: Int[Array, " rows"]) -> Int[Array, " rows"]:
        bit = jnp.int32(1) << (_BITS - 1 - step)
        return jnp.where(holds(found | (bit - 1)), found, found | bit)

    return lax.fori_loop(0, _BITS, decide_bit, jnp.zeros((num_rows,), jnp.int32))
