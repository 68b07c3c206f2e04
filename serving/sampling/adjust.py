"""Changes to the logits before a token is sampled, in vLLM's order.

Allowed tokens, bad words, stop ids before `min_tokens`, logit bias, penalties. All functions work
on rows of a tile, each row on its own.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from serving.sampling.state import PROMPT_MARK, SamplingState


def adjust_logits(
    logits: Float[Array, "rows vocab"], rows: SamplingState
) -> Float[Array, "rows vocab"]:
    """Masks, biases and penalises logits.

    A mask never leaves a row without a token: one of the three that would is lifted for that step,
    so that bad words yield to allowed tokens, and `min_tokens` to both.

    Args:
        logits: float32, finite or -inf, at least one finite in a row.
        rows: state of each row.

    Returns:
        float32 [rows, vocab]; -inf is a token that must not be sampled.
    """
    vocab_size = logits.shape[1]
    masked = _mask(logits, ~allowed_tokens(rows.allowed, vocab_size))
    masked = _mask(masked, bad_word_ends(rows.bad_words, rows.recent, vocab_size))
    too_early = (rows.num_output < rows.min_tokens)[:, None]
    masked = _mask(masked, too_early & _tokens_named(rows.stop_ids, vocab_size))
    adjusted = penalise(add_bias(masked, rows.bias_ids, rows.bias), rows)
    # Extreme biases and penalties may overflow, which must neither mask a token nor tie with inf.
    largest = jnp.finfo(jnp.float32).max
    return jnp.where(masked == -jnp.inf, -jnp.inf, jnp.clip(adjusted, -largest, largest))


def allowed_tokens(
    allowed: UInt32[Array, "rows words"], vocab_size: int
) -> Bool[Array, "rows vocab"]:
    """Unpacks the bit masks of allowed tokens."""
    bits = allowed[:, :, None] >> jnp.arange(32, dtype=jnp.uint32) & 1
    return bits.reshape(len(allowed), -1)[:, :vocab_size] > 0


def bad_word_ends(
    bad_words: Int[Array, "rows bad_words word_tokens"],
    recent: Int[Array, "rows word_tokens-1"],
    vocab_size: int,
) -> Bool[Array, "rows vocab"]:
    """Tokens that would complete a bad word: the output ends with all of it but its last token."""
    before = bad_words[:, :, :-1]
    begun = ((before == recent[:, None]) | (before < 0)).all(axis=2)
    return _tokens_named(jnp.where(begun, bad_words[:, :, -1], -1), vocab_size)


def add_bias(
    logits: Float[Array, "rows vocab"],
    bias_ids: Int[Array, "rows biased"],
    bias: Float[Array, "rows biased"],
) -> Float[Array, "rows vocab"]:
    """Adds each bias to its token; a negative id is none."""
    rows, ids = _indices(bias_ids, logits.shape[1])
    return logits.at[rows, ids].add(bias, mode="drop")


def penalise(logits: Float[Array, "rows vocab"], rows: SamplingState) -> Float[Array, "rows vocab"]:
    """Applies repetition, frequency and presence penalties."""
    counts = rows.history & ~PROMPT_MARK
    repetition = rows.repetition_penalty[:, None]
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(rows.history != 0, repeated, logits)
    logits -= rows.frequency_penalty[:, None] * counts
    return logits - rows.presence_penalty[:, None] * (counts > 0)


def _mask(
    logits: Float[Array, "rows vocab"], masked: Bool[Array, "rows vocab"]
) -> Float[Array, "rows vocab"]:
    """Masks tokens, except in rows where none would be left."""
    left = ((logits > -jnp.inf) & ~masked).any(axis=1, keepdims=True)
    return jnp.where(masked & left, -jnp.inf, logits)


def _tokens_named(ids: Int[Array, "rows ids"], vocab_size: int) -> Bool[Array, "rows vocab"]:
    rows, ids = _indices(ids, vocab_size)
    nothing = jnp.zeros((len(ids), vocab_size), jnp.bool_)
    return nothing.at[rows, ids].set(True, mode="drop")


def _indices(
    ids: Int[Array, "rows ids"], vocab_size: int
) -> tuple[Int[Array, "rows 1"], Int[Array, "rows ids"]]:
    """Where to scatter to; negative ids, which would count from the end, point beyond the end."""
    return jnp.arange(len(ids))[:, None], jnp.where(ids < 0, vocab_size, ids)
