"""A cache driven step by step, as serving drives it, with garbage wherever nothing lies."""

import dataclasses
import functools
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from glm53.model.config import GLMConfig
from glm53.model.kv_geometry import kv_geometry
from glm53.model.sharding import make_mesh
from glm53.model.steps import PrefillBatch, StepOutput, compiled_steps
from kvcache import DeviceState, KVCache, KVGeometry, KVStore
from kvcache.reads import NUM_READS, Reads, no_reads
from pallas_kernels.common.row_format import RowKind
from tests.helpers.session import Session, with_all_logits


@dataclasses.dataclass(frozen=True)
class StoredRows:
    """Copies of everything that the store holds, as bytes along the last axis.

    Attributes:
        device: [layers, device_pages, rows_per_page, bytes].
        host: [host_pages, rows_per_page, layers, bytes].
        keys: [index_layers, pages, rows_per_page, bytes].
        device_page_index: [pages].
        host_page_index: [pages].
    """

    device: np.ndarray
    host: np.ndarray
    keys: np.ndarray
    device_page_index: np.ndarray
    host_page_index: np.ndarray

    @classmethod
    def of(cls, store: KVStore) -> "StoredRows":
        host = np.zeros(0, np.uint8) if store.host is None else as_bytes(store.host.slab)
        return cls(
            as_bytes(store.slab),
            host,
            as_bytes(store.index_keys),
            np.array(store.device_page_index),
            np.array(store.host_page_index),
        )


def as_bytes(array: jax.Array | np.ndarray) -> np.ndarray:
    """A copy whose last axis is bytes."""
    return np.array(array).view(np.uint8)


@functools.cache
def page_rows(geometry: KVGeometry, count: int) -> np.ndarray:
    """Where the first positions lie on their pages."""
    return np.array([geometry.page_row(position) for position in range(count)])


@dataclasses.dataclass(frozen=True)
class Expected:
    """What each position of a stream gives, from one prefill with all pages on the device.

    Attributes:
        logits: bytes [streams, positions, ...].
        selected: [streams, layers, positions, index_topk].
        rows: bytes [streams, positions, layers, ...].
        keys: bytes [streams, positions, index_layers, ...].
    """

    logits: np.ndarray
    selected: np.ndarray
    rows: np.ndarray
    keys: np.ndarray

    @classmethod
    def compute(
        cls,
        config: GLMConfig,
        params: nnx.State,
        streams: Sequence[np.ndarray],
        row_kind: RowKind,
        num_devices: int,
    ) -> "Expected":
        length = len(streams[0])
        session = Session(
            config,
            params,
            num_devices=num_devices,
            row_kind=row_kind,
            rows_per_device=4,
            max_model_len=length,
            max_sequences=len(streams),
        )
        logits, selected = [], []
        for stream, tokens in enumerate(streams):
            session.open(stream, length)
            output = session.append({stream: tokens}, trace=True)
            assert output.trace is not None
            logits.append(as_bytes(output.logits)[0])
            selected.append(np.array(output.trace.selected))
        geometry, store = session.geometry, session.store
        tables = np.array(session.sequences.block_table)
        pages = tables[:, np.arange(length) // geometry.rows_per_page]
        pages_on_device, rows = (
            np.array(store.device_page_index)[pages],
            page_rows(geometry, length),
        )
        return cls(
            np.stack(logits),
            np.stack(selected),
            np.moveaxis(as_bytes(store.slab)[:, pages_on_device, rows], 0, 2),
            np.moveaxis(as_bytes(store.index_keys)[:, pages, rows], 0, 2),
        )


class CachedSession:
    """A KVCache and the steps over it.

    Before each step, whatever the step may not read is overwritten: device pages, host pages and
    index keys of no page, and leases that are new.

    Attributes:
        cache: the cache.
    """

    def __init__(
        self,
        config: GLMConfig,
        params: nnx.State,
        *,
        num_devices: int = 1,
        max_step_rows: int,
        with_hidden: bool = False,
        **sizes,
    ) -> None:
        self.geometry = kv_geometry(config, num_devices=num_devices, **sizes)
        self.config, self.params = config, params
        self.steps = compiled_steps(config, self.geometry, make_mesh(num_devices))
        self.cache = KVCache(
            self.geometry,
            DeviceState(
                self.geometry,
                self.steps.mesh,
                hidden_size=config.hidden_size,
                dtype=config.compute_dtype,
            ),
            max_step_rows=max_step_rows,
            with_hidden=with_hidden,
        )
        self._leased_row_cache: dict[int, tuple[int, ...]] = {}

    def append(
        self,
        tokens: dict[int, np.ndarray],
        *,
        rows: int,
        slots: Iterable[int] | None = None,
        staging: bool,
        complete: bool = False,
    ) -> tuple[StepOutput, Reads[int]]:
        """One step, traced, that appends tokens to the sequences in some slots.

        Args:
            tokens: token ids by slot.
            rows: rows of each group of the step.
            slots: slot of each group, -1 for padding; those of `tokens` by default.
            staging: whether to prepare for a prefill.
            complete: whether the tokens end the sequences' prompts.

        Returns:
            Its output, and how many rows it read by where they were found.
        """
        slots = list(tokens if slots is None else slots)
        counts, token_ids = np.zeros(len(slots), np.int32), np.zeros((len(slots), rows), np.int32)
        for group, slot in enumerate(slots):
            if slot >= 0:
                counts[group] = len(tokens[slot])
                token_ids[group, : counts[group]] = tokens[slot]
        self.cache.prepare({slot: len(ids) for slot, ids in tokens.items()}, staging=staging)
        self._overwrite_unused()
        before = self._reads()
        batch = PrefillBatch(*map(jnp.asarray, (np.array(slots, np.int32), counts, token_ids)))
        output = self.cache.device.run(
            lambda store, sequences: self.steps.prefill(
                self.params,
                store,
                sequences,
                batch,
                context_pages=self.geometry.max_pages_per_sequence,
                trace=True,
            )
        )
        output = with_all_logits(self.steps, self.params, output)
        for slot, ids in tokens.items():
            self.cache.advance(slot, ids.tolist(), prompt_complete=complete)
        return output, Reads.unpack(self._reads() - before)

    def _reads(self) -> np.ndarray:
        host = self.cache.device.store.host
        if host is None:
            return no_reads()
        return np.array(host.reads, np.int64).reshape(-1, NUM_READS).sum(axis=0)

    def _overwrite_unused(self) -> None:
        """Puts garbage wherever nothing lies that the next step may read."""
        geometry, residency, pool = self.geometry, self.cache.residency, self.cache.pool
        pages = range(geometry.num_pages)
        hot = {slot: residency.leased_row_cache(slot) for slot in range(geometry.max_sequences)}
        read = {residency.states.device_page_index(page) for page in pages}
        for slot, leased in hot.items():
            if leased == self._leased_row_cache.get(slot):
                read |= set(leased)
        self._leased_row_cache = hot
        host = {residency.states.host_page_index(page) for page in pages}
        held = {page for page in pages if pool.references(page) or pool.is_cached(page)}
        store = self.cache.device.store
        tier = store.host
        if tier is not None:
            unused = set(range(geometry.host_pages)) - host
            tier = dataclasses.replace(tier, slab=_overwrite(tier.slab, 0, unused))
        store = dataclasses.replace(
            store,
            slab=_overwrite(store.slab, 1, set(range(geometry.device_pages)) - read),
            index_keys=_overwrite(store.index_keys, 1, set(pages) - held),
            host=tier,
        )
        self.cache.device.run(lambda _, sequences: (None, store, sequences))


def _overwrite(array: jax.Array, axis: int, indices: set[int]) -> jax.Array:
    """The array with NaN, or large words, at some indices of an axis."""
    garbage = 0x7F7F7F7F if array.dtype == np.int32 else np.nan
    values = np.array(array)
    values[(slice(None),) * axis + (sorted(indices),)] = garbage
    return jax.device_put(values, array.sharding, may_alias=False)
