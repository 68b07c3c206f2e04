"""Store for sequences of one length, filled at random instead of by a prefill."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from glm53.model.config import GLMConfig
from glm53.model.kv_geometry import kv_geometry
from glm53.model.steps import Steps
from kvcache import KVGeometry, KVStore, PagePool, SequenceState
from kvcache.device.sequence_state import assign_slot


def float32_geometry(config: GLMConfig, num_sequences: int, num_tokens: int) -> KVGeometry:
    """Returns the sizes of a float32 store on one device with just the pages of `num_sequences`."""
    one_page = kv_geometry(
        config,
        row_kind="float32",
        device_pages=1,
        max_model_len=num_tokens,
        max_sequences=num_sequences,
    )
    pages = num_sequences * one_page.max_pages_per_sequence
    return dataclasses.replace(one_page, device_pages=pages)


def open_sequences(steps: Steps) -> tuple[KVStore, SequenceState]:
    """Returns an empty store, and an empty sequence with a full block table in every slot.

    Raises:
        OutOfPagesError: the geometry has too few pages.
    """
    geometry = steps.geometry
    store = KVStore.create(geometry, steps.mesh)
    sequences = SequenceState.create(
        geometry, steps.config.hidden_size, steps.config.compute_dtype, steps.mesh
    )
    pool = PagePool(geometry.num_pages, lambda page: None)
    page_indices = jnp.arange(geometry.device_pages, dtype=jnp.int32)
    page_indices = jax.device_put(page_indices, store.device_page_index.sharding)
    store = dataclasses.replace(store, device_page_index=page_indices)
    for slot in range(geometry.max_sequences):
        table = jnp.asarray(pool.allocate(geometry.max_pages_per_sequence), jnp.int32)
        sequences = assign_slot(sequences, jnp.int32(slot), table, jnp.int32(0))
    return store, sequences


@functools.partial(jax.jit, donate_argnums=0)
def fill_randomly(store: KVStore) -> KVStore:
    """Fills a float32 store with normal numbers, the size of normalised latents and keys.

    Writes one layer at a time, in place, so that no more than one layer is held besides the store.
    """

    def fill(rows: jax.Array, seed: int) -> jax.Array:
        def fill_layer(layer: jax.Array, rows: jax.Array) -> jax.Array:
            key = jax.random.fold_in(jax.random.key(seed), layer)
            return rows.at[layer].set(jax.random.normal(key, rows.shape[1:], rows.dtype))

        return jax.lax.fori_loop(0, rows.shape[0], fill_layer, rows)

    return dataclasses.replace(
        store, slab=fill(store.slab, 0), index_keys=fill(store.index_keys, 1)
    )


def set_sequences(
    sequences: SequenceState, length: int, last_tokens: Int[Array, " slots"]
) -> SequenceState:
    """Sets every sequence to `length` computed tokens and the token that follows them."""
    lengths = jnp.full_like(sequences.length, length)
    return dataclasses.replace(sequences, length=lengths, last_token=last_tokens)
