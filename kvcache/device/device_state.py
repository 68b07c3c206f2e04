"""The device side of a cache: the state that steps take and give, and what changes it between."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float32, Int32, Shaped

from kvcache.device.interface import CacheDevice
from kvcache.device.page_moves import MoveList
from kvcache.device.sequence_state import SequenceState, assign_slot, set_pages
from kvcache.device.store import KVStore
from kvcache.device.transitions import compiled_transitions
from kvcache.geometry import KVGeometry


class DeviceState(CacheDevice):
    """Pages and sequences on the devices of a mesh.

    It alone replaces its pytrees: what changes them between steps is a method, and steps go through
    `run`.

    Args:
        geometry: sizes of the store.
        mesh: where it lies.
        hidden_size: width of a hidden state.
        dtype: its type.
    """

    def __init__(
        self, geometry: KVGeometry, mesh: Mesh, *, hidden_size: int, dtype: jax.typing.DTypeLike
    ) -> None:
        self._store = KVStore.create(geometry, mesh)
        self._sequences = SequenceState.create(geometry, hidden_size, dtype, mesh)
        self._transitions = compiled_transitions(geometry, mesh)

    @property
    def store(self) -> KVStore:
        """State of pages, until the next change donates it."""
        return self._store

    @property
    def sequences(self) -> SequenceState:
        """State of sequences, until the next change donates it."""
        return self._sequences

    def run[Output](
        self,
        step: Callable[[KVStore, SequenceState], tuple[Output, KVStore, SequenceState]],
    ) -> Output:
        """Runs a step on the state, and keeps the state that it returns.

        Args:
            step: from store and sequences, which it may donate, to its output, the store and the
                sequences.

        Returns:
            The output.
        """
        output, self._store, self._sequences = step(self._store, self._sequences)
        return output

    def synchronize(self) -> None:
        """Waits until the devices have done all that was launched."""
        jax.block_until_ready((self._store, self._sequences))

    def row_cache_rows(self, slot: int) -> Int32[np.ndarray, " rows"]:
        """Rows of its sequence that a slot's row cache holds on the devices, by the device's own
        numbers; those of all index groups and devices together. Waits for the last step."""
        assert self._store.host is not None, "a store without a host tier has no row cache"
        rows = np.asarray(self._store.host.row_cache.row[slot])
        return rows[rows >= 0]

    @property
    def deleted(self) -> bool:
        """Whether a step that failed has taken the state with it."""
        return any(leaf.is_deleted() for leaf in jax.tree.leaves((self._store, self._sequences)))

    def delete(self) -> None:
        """Frees the memory."""
        for leaf in jax.tree.leaves((self._store, self._sequences)):
            leaf.delete()

    def assign_slot(self, slot: int, pages: Int32[np.ndarray, " max_pages"], length: int) -> None:
        """See `CacheDevice`."""
        self._sequences = assign_slot(
            self._sequences, jnp.int32(slot), jnp.asarray(pages), jnp.int32(length)
        )

    def set_pages(self, entries: Int32[np.ndarray, "entries 3"]) -> None:
        """See `CacheDevice`."""
        self._sequences = set_pages(self._sequences, entries)

    def move(self, moves: MoveList) -> None:
        """See `CacheDevice`."""
        self._store = self._transitions.move(self._store, moves)

    def lease(
        self, slots: Int32[np.ndarray, " slots"], pages: Int32[np.ndarray, "slots row_cache_pages"]
    ) -> None:
        """See `CacheDevice`."""
        self._store = self._transitions.lease(self._store, slots, pages)

    def set_staging_pages(self, pages: Int32[np.ndarray, " staging_pages"]) -> None:
        """See `CacheDevice`."""
        self._store = self._transitions.set_staging_pages(self._store, pages)

    def decay(self) -> Callable[[], Float32[np.ndarray, " pages"]]:
        """See `CacheDevice`."""
        self._store, selections = self._transitions.decay(self._store)
        selections.copy_to_host_async()
        return lambda: np.asarray(selections)

    def write(
        self,
        pages: Int32[np.ndarray, " max_pages"],
        rows: Shaped[np.ndarray, "max_pages rows_per_page layers width"],
        keys: Shaped[np.ndarray, "max_pages rows_per_page index_layers index_width"],
    ) -> None:
        """See `CacheDevice`."""
        self._store = self._transitions.write(self._store, pages, rows, keys)

    def read(
        self, pages: Int32[np.ndarray, " pages"]
    ) -> Sequence[Shaped[np.ndarray, "pages rows_per_page some_layers some_width"]]:
        """MLA rows and index keys of pages, as `write` takes them."""
        return [np.asarray(array) for array in self._transitions.read(self._store, pages)]
