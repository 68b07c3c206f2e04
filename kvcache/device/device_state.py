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

    Steps take `store` and `sequences` donated and give new ones back, which the caller puts in
    their place.

    Args:
        geometry: sizes of the store.
        mesh: where it lies.
        hidden_size: width of a hidden state.
        dtype: its type.

    Attributes:
        store: state of pages.
        sequences: state of sequences.
    """

    def __init__(
        self, geometry: KVGeometry, mesh: Mesh, *, hidden_size: int, dtype: jax.typing.DTypeLike
    ) -> None:
        self.store = KVStore.create(geometry, mesh)
        self.sequences = SequenceState.create(geometry, hidden_size, dtype, mesh)
        self._transitions = compiled_transitions(geometry, mesh)

    @property
    def deleted(self) -> bool:
        """Whether a step that failed has taken the state with it."""
        return any(leaf.is_deleted() for leaf in jax.tree.leaves((self.store, self.sequences)))

    def delete(self) -> None:
        """Frees the memory."""
        for leaf in jax.tree.leaves((self.store, self.sequences)):
            leaf.delete()

    def assign_slot(self, slot: int, pages: Int32[np.ndarray, " max_pages"], length: int) -> None:
        """See `CacheDevice`."""
        self.sequences = assign_slot(
            self.sequences, jnp.int32(slot), jnp.asarray(pages), jnp.int32(length)
        )

    def set_pages(self, entries: Int32[np.ndarray, "entries 3"]) -> None:
        """See `CacheDevice`."""
        self.sequences = set_pages(self.sequences, entries)

    def move(self, moves: MoveList) -> None:
        """See `CacheDevice`."""
        self.store = self._transitions.move(self.store, moves)

    def lease(
        self, slots: Int32[np.ndarray, " slots"], places: Int32[np.ndarray, "slots row_cache_pages"]
    ) -> None:
        """See `CacheDevice`."""
        self.store = self._transitions.lease(self.store, slots, places)

    def set_staging_pages(self, places: Int32[np.ndarray, " staging_pages"]) -> None:
        """See `CacheDevice`."""
        self.store = self._transitions.set_staging_pages(self.store, places)

    def decay(self) -> Callable[[], Float32[np.ndarray, " pages"]]:
        """See `CacheDevice`."""
        self.store, selections = self._transitions.decay(self.store)
        selections.copy_to_host_async()
        return lambda: np.asarray(selections)

    def write(
        self,
        pages: Int32[np.ndarray, " max_pages"],
        rows: Shaped[np.ndarray, "max_pages rows_per_page layers width"],
        keys: Shaped[np.ndarray, "max_pages rows_per_page index_layers index_width"],
    ) -> None:
        """See `CacheDevice`."""
        self.store = self._transitions.write(self.store, pages, rows, keys)

    def read(
        self, pages: Int32[np.ndarray, " pages"]
    ) -> Sequence[Shaped[np.ndarray, "pages rows_per_page some_layers some_width"]]:
        """MLA rows and index keys of pages, as `write` takes them."""
        return [np.asarray(array) for array in self._transitions.read(self.store, pages)]
