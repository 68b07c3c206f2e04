"""Sampler of the next token of each sequence, and its launch."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int, UInt32

from kvcache.device.sequence_state import SequenceState
from pallas_kernels.common.row_tiles import map_row_tiles
from serving.sampling.adjust import adjust_logits
from serving.sampling.filters import kept_tokens, token_distances
from serving.sampling.state import SamplingState, SlotSampling, assign_sampling

GREEDY_TEMPERATURE = 1e-5
"""Temperatures below it are greedy."""


def sample_rows(logits: Float[Array, "rows vocab"], rows: SamplingState) -> Int[Array, " rows"]:
    """Samples a token for each row, the same bits whatever the other rows are.

    Greedy rows take the largest adjusted logit, the lowest id among equals. The others draw from
    the tokens that the filters keep, with noise that depends on the row's key and number of output
    tokens only.

    Args:
        logits: float32, finite or -inf, at least one finite in a row.
        rows: state of each row.

    Returns:
        int32 [rows].
    """
    leaves, structure = jax.tree.flatten(rows)

    def sample_tile(logits: jax.Array, *leaves: jax.Array) -> jax.Array:
        return _choose(logits, jax.tree.unflatten(structure, leaves))

    return map_row_tiles(sample_tile, logits, *leaves)


def _choose(logits: Float[Array, "rows vocab"], rows: SamplingState) -> Int[Array, " rows"]:
    adjusted = adjust_logits(logits, rows)
    greedy = rows.temperature < GREEDY_TEMPERATURE
    distances = token_distances(adjusted, jnp.where(greedy, 1.0, rows.temperature))
    kept = kept_tokens(distances, rows.min_p, rows.top_k, rows.top_p)
    noise = _gumbel_noise(rows.key, rows.num_output, logits.shape[1])
    drawn = jnp.argmax(jnp.where(kept, noise - distances, -jnp.inf), axis=1)
    return jnp.where(greedy, jnp.argmax(adjusted, axis=1), drawn).astype(jnp.int32)


def _gumbel_noise(
    keys: UInt32[Array, "rows 2"], counters: Int[Array, " rows"], vocab_size: int
) -> Float[Array, "rows vocab"]:
    """Noise whose addition to log-weights makes the largest a draw by weight."""

    def row_noise(key: jax.Array, counter: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.wrap_key_data(key, impl="threefry2x32"), counter)
        # The low mode has 23 bits, too few for the best of 150,000 tokens to be unique.
        return jax.random.gumbel(key, (vocab_size,), jnp.float32, mode="high")

    return jax.vmap(row_noise)(keys, counters)


def sample(
    state: SamplingState,
    sequences: SequenceState,
    slots: Int[Array, " sequences"],
    logits: Float[Array, "sequences vocab"],
    greedy: Int[Array, " sequences"],
) -> tuple[Int[Array, " sequences"], SamplingState, SequenceState]:
    """Samples the next token of sequences and records it.

    Args:
        state: of all slots; history, recent tokens and their number go on.
        sequences: of all slots; `last_token` becomes the sampled one.
        slots: int32, all different; -1 keeps the greedy token and changes nothing.
        logits: float32 after each sequence's last token.
        greedy: int32, the step's own token.

    Returns:
        The tokens, int32 [sequences]; the state; the sequences.
    """
    readable = jnp.maximum(slots, 0)
    rows = jax.tree.map(lambda array: array[readable], state)
    tokens = jnp.where(slots >= 0, sample_rows(logits, rows), greedy)
    target = jnp.where(slots >= 0, slots, len(state.num_output))
    recent = jnp.concatenate([rows.recent[:, 1:], tokens[:, None]], axis=1)
    state = dataclasses.replace(
        state,
        num_output=state.num_output.at[target].add(1, mode="drop"),
        recent=state.recent.at[target].set(recent, mode="drop"),
        history=state.history.at[target, tokens].add(1, mode="drop"),
    )
    last_token = sequences.last_token.at[target].set(tokens, mode="drop")
    return tokens, state, dataclasses.replace(sequences, last_token=last_token)


class Sampler:
    """The compiled sampler of one vocabulary on one mesh.

    `sample(state, sequences, slots, logits, greedy)` is the function of that name, jitted, with
    state and sequences donated.
    """

    def __init__(self, vocab_size: int, max_sequences: int, mesh: Mesh) -> None:
        everywhere = NamedSharding(mesh, PartitionSpec())
        self.vocab_size, self.max_sequences = vocab_size, max_sequences
        self.sample = jax.jit(sample, donate_argnums=(0, 1), out_shardings=everywhere)
        self._assign = jax.jit(assign_sampling, donate_argnums=0, out_shardings=everywhere)

    def assign(
        self,
        state: SamplingState,
        slot: int,
        values: SlotSampling,
        output_ids: Sequence[int] = (),
    ) -> SamplingState:
        """Gives a slot to a request; the state is donated.

        Args:
            state: of all slots.
            slot: the slot.
            values: how the request samples its tokens.
            output_ids: what it has sampled so far, in another slot.

        Raises:
            ValueError: there is no such slot, or a token id is not in the vocabulary.
        """
        if not 0 <= slot < self.max_sequences:
            raise ValueError(f"slot {slot} is not in 0..{self.max_sequences - 1} (max_sequences)")
        return self._assign(state, np.int32(slot), values.as_state(self.vocab_size, output_ids))

    def warm_up(self, state: SamplingState) -> SamplingState:
        """Compiles `assign` by an assignment to no slot; the state is donated."""
        no_sampling = SlotSampling(seed=0).as_state(self.vocab_size)
        return self._assign(state, np.int32(-1), no_sampling)
