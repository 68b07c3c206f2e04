"""State of each running sequence that steps read, kept on the device.

A step can be launched before the last one's tokens are known, because it reads them here.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from kvcache.cache_compiled import cache_compiled
from kvcache.geometry import KVGeometry
from pallas_kernels.common.pytree import pytree_dataclass


@pytree_dataclass
class SequenceState:
    """State by sequence slot, replicated on every device and donated beside the store.

    Attributes:
        block_table: int32 [slots, max_pages], page ids in order, -1 beyond the last.
        length: int32 [slots], tokens computed so far.
        last_token: int32 [slots], the token that follows them, once a step has sampled it.
        last_hidden: [slots, hidden], the normalised trunk hidden state of the last computed token,
            from which the MTP layer continues.
        hidden_known: bool [slots], whether it is: cached rows come without it.
    """

    block_table: Int[Array, "slots max_pages"]
    length: Int[Array, " slots"]
    last_token: Int[Array, " slots"]
    last_hidden: Float[Array, "slots hidden"]
    hidden_known: Bool[Array, " slots"]

    @classmethod
    def create(
        cls, geometry: KVGeometry, hidden_size: int, dtype: jax.typing.DTypeLike, mesh: Mesh
    ) -> "SequenceState":
        """State with every slot empty."""
        return _creation(geometry, hidden_size, jnp.dtype(dtype), mesh)()


@cache_compiled
def _creation(
    geometry: KVGeometry, hidden_size: int, dtype: jnp.dtype, mesh: Mesh
) -> Callable[[], SequenceState]:
    slots = geometry.max_sequences

    def create() -> SequenceState:
        return SequenceState(
            jnp.full((slots, geometry.max_pages_per_sequence), -1, jnp.int32),
            jnp.zeros((slots,), jnp.int32),
            jnp.zeros((slots,), jnp.int32),
            jnp.zeros((slots, hidden_size), dtype),
            jnp.zeros((slots,), bool),
        )

    return jax.jit(create, out_shardings=NamedSharding(mesh, PartitionSpec()))


@functools.partial(jax.jit, donate_argnums=0)
def assign_slot(
    sequences: SequenceState,
    slot: Int[Array, ""],
    block_table: Int[Array, " max_pages"],
    length: Int[Array, ""],
) -> SequenceState:
    """Gives a slot to a new sequence whose first `length` tokens are already computed; -1 is no
    slot."""
    slot = jnp.where(slot >= 0, slot, sequences.length.shape[0])
    return dataclasses.replace(
        sequences,
        block_table=sequences.block_table.at[slot].set(block_table, mode="drop"),
        length=sequences.length.at[slot].set(length, mode="drop"),
        hidden_known=sequences.hidden_known.at[slot].set(False, mode="drop"),
    )


@functools.partial(jax.jit, donate_argnums=0)
def set_pages(sequences: SequenceState, entries: Int[Array, "entries 3"]) -> SequenceState:
    """Puts pages into block tables: entries (slot, index, page), those with slot -1 padding."""
    slots, indices, pages = entries.T
    slots = jnp.where(slots >= 0, slots, sequences.block_table.shape[0])
    block_table = sequences.block_table.at[slots, indices].set(pages, mode="drop")
    return dataclasses.replace(sequences, block_table=block_table)
