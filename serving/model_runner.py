"""The device side of generation: the store, the sequences in it, and the steps over them."""

import functools
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from glm53.config import GLMConfig
from glm53.steps import PrefillBatch, Steps
from kvcache.geometry import KVGeometry
from kvcache.page_pool import PagePool
from kvcache.sequence_state import SequenceState, assign_slot
from kvcache.store import KVStore, map_pages
from serving.buckets import Buckets, fit


@functools.partial(jax.jit, donate_argnums=(0, 1))
def _open_slot(
    store: KVStore,
    sequences: SequenceState,
    slot: jax.Array,
    block_table: jax.Array,
    device_pages: jax.Array,
) -> tuple[KVStore, SequenceState]:
    length = jnp.zeros((), jnp.int32)
    return (
        map_pages(store, block_table, device_pages),
        assign_slot(sequences, slot, block_table, length),
    )


class ModelRunner:
    """Runs steps for sequences in numbered slots; all their pages are reserved at the start.

    Attributes:
        geometry: sizes of the store.
        pool: pages in use.
    """

    def __init__(
        self,
        config: GLMConfig,
        graph: nnx.GraphDef,
        params: nnx.State,
        geometry: KVGeometry,
        mesh: Mesh,
        buckets: Buckets,
    ) -> None:
        self.config, self.geometry = config, geometry
        self._params, self._mesh, self._buckets = params, mesh, buckets
        self._steps = Steps(config, geometry, mesh, graph, params)
        self._start_empty()

    def reset(self) -> None:
        """Forgets all sequences and builds an empty store, as after a step that failed."""
        # Given up first: memory may not hold a second store.
        for array in jax.tree.leaves((self._store, self._sequences)):
            array.delete()
        self._start_empty()

    @property
    def usable(self) -> bool:
        """Whether there is a store: a reset may have failed for want of memory."""
        return not any(array.is_deleted() for array in jax.tree.leaves(self._store))

    def _start_empty(self) -> None:
        self.pool = PagePool(self.geometry)
        self._pages: dict[int, list[int]] = {}
        self._lengths: dict[int, int] = {}
        self._store = KVStore.create(self.geometry, self._mesh)
        self._sequences = SequenceState.create(
            self.geometry, self.config.hidden_size, self.config.compute_dtype, self._mesh
        )

    def open(self, slot: int, num_tokens: int) -> None:
        """Starts an empty sequence with room for `num_tokens` tokens.

        Raises:
            OutOfPagesError: the pool has too few free pages.
        """
        pages = self.pool.allocate(self.geometry.pages_for(num_tokens))
        table = np.full(self.geometry.max_pages_per_sequence, -1, np.int32)
        places = table.copy()
        table[: len(pages)] = pages
        places[: len(pages)] = [self.pool.device_page(page) for page in pages]
        self._store, self._sequences = _open_slot(
            self._store,
            self._sequences,
            jnp.int32(slot),
            jnp.asarray(table),
            jnp.asarray(places),
        )
        self._pages[slot], self._lengths[slot] = pages, 0

    def close(self, slot: int) -> None:
        """Ends a sequence and frees its pages."""
        self.pool.release(self._pages.pop(slot))
        del self._lengths[slot]

    def prefill(
        self, slot: int, token_ids: Sequence[int], all_logits: bool = False
    ) -> Iterator[tuple[int, np.ndarray | None]]:
        """Appends tokens to a sequence, a chunk a step.

        Yields:
            After each chunk the greedy next token and, if asked for, float32 logits
            [tokens of the chunk, vocab].
        """
        done = 0
        while done < len(token_ids):
            rows = self._buckets.chunk(len(token_ids) - done)
            chunk = token_ids[done : done + rows]
            padded = np.zeros((1, rows), np.int32)
            padded[0, : len(chunk)] = chunk
            self._lengths[slot] += len(chunk)
            batch = PrefillBatch(
                jnp.array([slot], jnp.int32),
                jnp.array([len(chunk)], jnp.int32),
                jnp.asarray(padded),
            )
            output, self._store, self._sequences = self._steps.prefill(
                self._params,
                self._store,
                self._sequences,
                batch,
                context_pages=self._context_pages([slot]),
                all_logits=all_logits,
            )
            logits = np.asarray(output.logits)[0, : len(chunk)] if all_logits else None
            yield int(output.next_token[0]), logits
            done += len(chunk)

    def decode(self, slots: Sequence[int]) -> list[int]:
        """Appends each sequence's last chosen token and returns the next ones."""
        padded = np.full(fit(self._buckets.sequences, len(slots)), -1, np.int32)
        padded[: len(slots)] = slots
        for slot in slots:
            self._lengths[slot] += 1
        output, self._store, self._sequences = self._steps.decode(
            self._params,
            self._store,
            self._sequences,
            jnp.asarray(padded),
            context_pages=self._context_pages(slots),
        )
        return np.asarray(output.next_token)[: len(slots)].tolist()

    def _context_pages(self, slots: Sequence[int]) -> int:
        longest = max(self._lengths[slot] for slot in slots)
        return fit(self._buckets.context_pages, self.geometry.pages_for(longest))
