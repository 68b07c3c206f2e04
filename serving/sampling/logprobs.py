"""Log-probabilities of the sampled and of the most likely tokens."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.common.pytree import pytree_dataclass
from pallas_kernels.common.row_tiles import map_row_tiles


@pytree_dataclass
class TopLogprobs:
    """Log-probabilities under the model's own logits, unadjusted and at temperature 1.

    Attributes:
        logprob: float32 [rows], of the row's given token.
        rank: int32 [rows], the given token's place among all, from 1.
        token_ids: int32 [rows, count], best first, the lower id first among equals.
        logprobs: float32 [rows, count], theirs.
    """

    logprob: Float[Array, " rows"]
    rank: Int[Array, " rows"]
    token_ids: Int[Array, "rows count"]
    logprobs: Float[Array, "rows count"]


@partial(jax.jit, static_argnames="count")
def top_logprobs(
    logits: Float[Array, "rows vocab"], tokens: Int[Array, " rows"], count: int
) -> TopLogprobs:
    """Log-probabilities of given tokens and of the `count` most likely ones.

    Args:
        logits: float32, as the model gives them: finite or -inf, at least one finite in a row.
        tokens: int32, ids in the vocabulary.
        count: 0 to the size of the vocabulary.

    Raises:
        ValueError: `count` is not in that range.
    """
    vocab_size = logits.shape[1]
    if not 0 <= count <= vocab_size:
        raise ValueError(f"count must be in 0..{vocab_size} (the vocabulary), got {count}")
    # Tiles of no columns have no shape to restore: at least one is found.
    found = map_row_tiles(partial(_tile_logprobs, count=max(count, 1)), logits, tokens)
    return dataclasses.replace(
        found, token_ids=found.token_ids[:, :count], logprobs=found.logprobs[:, :count]
    )


def _tile_logprobs(
    logits: Float[Array, "rows vocab"], tokens: Int[Array, " rows"], count: int
) -> TopLogprobs:
    # top_k ranks -0.0 below 0.0.
    logits = jnp.where(logits == 0, 0, logits)
    largest = logits.max(axis=1, keepdims=True)
    # Beside the largest logit, which may be huge, it would be rounded away.
    log_sum = jnp.log(jnp.exp(logits - largest).sum(axis=1, keepdims=True))
    given = jnp.take_along_axis(logits, tokens[:, None], axis=1)
    ids = jnp.arange(logits.shape[1])
    ahead = (logits > given) | ((logits == given) & (ids < tokens[:, None]))
    best, token_ids = lax.top_k(logits, count)
    return TopLogprobs(
        logprob=(given - largest - log_sum)[:, 0],
        rank=1 + ahead.sum(axis=1, dtype=jnp.int32),
        token_ids=token_ids,
        logprobs=best - largest - log_sum,
    )
