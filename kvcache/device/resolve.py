"""Resolution of selected positions to physical rows; what is not on the device is staged.

A step of a few rows a sequence keeps single rows of host pages in the sequence's row-cache rows. A
longer one, which selects from nearly every page, uses staging pages instead. What has room in
neither is read in host memory, in place; so none of this changes an answer.
"""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvcache.device.host_tier import HostTier
from kvcache.device.store import KVStore, translate_positions
from kvcache.geometry import KVGeometry
from kvcache.reads import Reads
from pallas_kernels.common.implementation import run_if
from pallas_kernels.common.pytree import pytree_dataclass
from pallas_kernels.common.types import Scalar, Slab
from pallas_kernels.resolve_rows import RowCache, SelectedRows, resolve_rows
from pallas_kernels.stage_rows import stage_rows

MAX_ROWS_WITH_ROW_CACHE = 8
"""Most rows of a sequence in a step that uses its row-cache rows: a token and its drafts."""

ScoreSummary = Float[Array, "sequences entries"] | None
"""Best index score of each row-cache row of a step's sequences; None in a step that uses none."""


@pytree_dataclass
class StagedPages:
    """Host pages that each layer of an index group stages before it attends.

    A page is staged for one layer at a time, so the pages of the other layers at a staging page's
    index are free: targets count over all layers, from the layer that stages on, round the end.

    Attributes:
        host_page: int32 [staged], pages to read.
        target: int32 [staged], pages to write.
        count: int32, how many of the lists are valid.
    """

    host_page: Int[Array, " staged"]
    target: Int[Array, " staged"]
    count: Int[Array, ""]

    @classmethod
    def none(cls, geometry: KVGeometry) -> "StagedPages":
        """Nothing to stage."""
        size = min(geometry.host_pages, max(geometry.staging_pages * geometry.num_layers, 1))
        nothing = jnp.zeros((size,), jnp.int32)
        return cls(nothing, nothing, jnp.zeros((), jnp.int32))


@pytree_dataclass
class ResolvedRows:
    """Selected rows of an index group, where the store has them.

    Attributes:
        row_ids: int32 [tokens, k], ids as `sparse_attention` takes them: this device's, in the
            order of their positions, then -1.
        count: int32 [tokens], how many are not -1.
        staged: what each layer of the group stages before it attends; None without a host tier.
    """

    row_ids: Int[Array, "tokens k"]
    count: Int[Array, " tokens"]
    staged: StagedPages | None

    @classmethod
    def of_nothing(cls, row_ids: Int[Array, "tokens k"], geometry: KVGeometry) -> "ResolvedRows":
        """No rows: ids that are all -1."""
        none = jnp.zeros(row_ids.shape[:1], jnp.int32)
        return cls(row_ids, none, StagedPages.none(geometry) if geometry.reads_host else None)

    @classmethod
    def compacted(
        cls, row_ids: Int[Array, "sequences rows k"], staged: StagedPages | None
    ) -> "ResolvedRows":
        """The ids of each token's rows, without the -1 among them."""
        row_ids = row_ids.reshape(-1, row_ids.shape[-1])
        found = row_ids >= 0

        def compact(row_ids: Array) -> Array:
            index = jnp.where(found, jnp.cumsum(found, axis=1) - 1, row_ids.shape[1])
            token = jnp.arange(row_ids.shape[0])[:, None]
            return jnp.full_like(row_ids, -1).at[token, index].set(row_ids, mode="drop")

        scattered = jnp.any(found[:, 1:] & ~found[:, :-1])
        row_ids = run_if(scattered, compact, row_ids)
        return cls(row_ids, jnp.sum(found, axis=1, dtype=jnp.int32), staged)


def resolve_selection(
    store: KVStore,
    geometry: KVGeometry,
    index_group: Scalar,
    first_layer: Scalar,
    slots: Int[Array, " sequences"],
    block_tables: Int[Array, "sequences context_pages"],
    positions: Int[Array, "sequences rows k"],
    summary: ScoreSummary,
    device: Int[Array, ""],
) -> tuple[KVStore, ResolvedRows]:
    """Finds the rows that an index group selected, and brings missed rows to the row cache.

    A step without the row cache plans which pages its layers stage instead.

    Args:
        store: the store.
        geometry: its sizes.
        index_group: the index group.
        first_layer: its first layer.
        slots: slot of each sequence, -1 for padding.
        block_tables: pages of each sequence.
        positions: selected positions; -1 is none.
        summary: what `summarize_scores` returned of this device's scores.
        device: this device's index along the mesh axis.

    Returns:
        The store, its row-cache rows up to date for all layers of the group; and the rows.
    """
    flat = positions.reshape(positions.shape[0], -1)
    row_ids, pages = (
        found.reshape(positions.shape)
        for found in translate_positions(store, geometry, block_tables, flat, device)
    )
    host = store.host
    if host is None:
        return store, ResolvedRows.compacted(row_ids, None)
    num_layers = jnp.asarray(geometry.group_layers, jnp.int32)[index_group]
    on_host = row_ids >= geometry.slab_rows
    resident = jnp.sum((row_ids >= 0) & ~on_host, axis=(1, 2))
    if summary is not None:
        layers = IndexGroup(index_group, first_layer, num_layers)
        selected = SelectedRows(slots, positions // geometry.num_devices, row_ids, summary)
        store, host, row_ids, reads = _stage_rows(store, host, geometry, layers, selected)
        staged = StagedPages.none(geometry)
    else:
        row_ids, staged, reads = _plan_staging(store, host, geometry, num_layers, row_ids, pages)
    host = host.count(slots, pages, dataclasses.replace(reads, resident=resident))
    return dataclasses.replace(store, host=host), ResolvedRows.compacted(row_ids, staged)


def summarize_scores(
    store: KVStore,
    index_group: Scalar,
    slots: Int[Array, " sequences"],
    positions: Int[Array, "sequences rows"],
    scores: Float[Array, "sequences rows context"],
) -> ScoreSummary:
    """Summary of a step's index scores, by which row-cache rows are kept or replaced.

    Args:
        store: the store.
        index_group: the index group.
        slots: slot of each sequence, -1 for padding.
        positions: position of each row, -1 for padding.
        scores: index scores of this device's rows of each sequence.
    """
    host = store.host
    if host is None or positions.shape[1] > MAX_ROWS_WITH_ROW_CACHE:
        return None
    row_cache, known = host.row_cache, jnp.maximum(slots, 0)
    held = row_cache.row[known, index_group]
    leased = (slots >= 0) & (row_cache.page[known, 0] >= 0)

    def gather(_: Array) -> Array:
        index = jnp.clip(held, 0, scores.shape[2] - 1)[:, None]
        found = jnp.take_along_axis(scores, index, axis=2, mode="promise_in_bounds")
        counted = (positions >= 0)[:, :, None] & ((held >= 0) & leased[:, None])[:, None]
        return jnp.max(jnp.where(counted, found, -jnp.inf), axis=1)

    return run_if(jnp.any(leased), gather, jnp.full(held.shape, -jnp.inf, scores.dtype))


class IndexGroup(NamedTuple):
    """An index group's layers.

    Attributes:
        number: the group.
        first_layer: its first layer.
        num_layers: how many it has.
    """

    number: Scalar
    first_layer: Scalar
    num_layers: Scalar


class _Staged(NamedTuple):
    """State that staging rows changes."""

    slab: Slab
    row_cache: RowCache
    row_ids: Int[Array, "sequences rows k"]
    reads: Reads[Int[Array, " sequences"]]


def _stage_rows(
    store: KVStore,
    host: HostTier,
    geometry: KVGeometry,
    layers: IndexGroup,
    selected: SelectedRows,
) -> tuple[KVStore, HostTier, Int[Array, "sequences rows k"], Reads[Int[Array, " sequences"]]]:
    """Brings missed rows to the row cache, for all layers of a group.

    Returns the store, its host tier, row ids, and what was read of host rows.
    """
    on_host = selected.row_ids >= geometry.slab_rows
    wanted = jnp.any(on_host)
    leased = host.row_cache.page[jnp.maximum(selected.slots, 0), 0] >= 0

    def stage(state: _Staged) -> _Staged:
        found = resolve_rows(
            state.row_cache, selected, layers.number, geometry.slab_rows, geometry.rows_per_device
        )
        rows = (found.host_rows, found.device_rows, found.num_staged)
        slab = stage_rows(state.slab, host.slab, layers.first_layer, layers.num_layers, *rows)
        in_place = jnp.sum(found.row_ids >= geometry.slab_rows, axis=(1, 2))
        reads = Reads(
            resident=state.reads.resident,
            row_cache=found.hits,
            staged=jnp.sum(on_host, axis=(1, 2)) - found.hits - in_place,
            host=in_place,
            missed=jnp.where(leased, found.misses, in_place),
            layer_rows_staged=found.staged * layers.num_layers,
        )
        return _Staged(slab, found.row_cache, found.row_ids, reads)

    none = jnp.zeros(selected.slots.shape, jnp.int32)
    nothing = Reads(none, none, none, none, none, none)
    state = _Staged(store.slab, host.row_cache, selected.row_ids, nothing)
    state = run_if(wanted, stage, state)
    host = dataclasses.replace(host, row_cache=state.row_cache)
    store = dataclasses.replace(store, slab=state.slab)
    return store, host, state.row_ids, state.reads


def _plan_staging(
    store: KVStore,
    host: HostTier,
    geometry: KVGeometry,
    num_layers: Scalar,
    row_ids: Int[Array, "sequences rows k"],
    pages: Int[Array, "sequences rows k"],
) -> tuple[Int[Array, "sequences rows k"], StagedPages, Reads[Int[Array, " sequences"]]]:
    """Gives a staging page to each host page that a row selected from, as far as there are any.

    Returns row ids, the plan, and what is read of host rows.
    """
    on_host = row_ids >= geometry.slab_rows
    spilled = jnp.sum(on_host, axis=(1, 2))
    num_staging = jnp.sum(host.staging_page >= 0)

    def plan_pages(state: tuple[Array, StagedPages]) -> tuple[Array, StagedPages]:
        row_ids, plan = state
        capacity = jnp.minimum(num_staging * geometry.num_layers, plan.target.shape[0])
        needed = jnp.zeros((geometry.num_pages,), bool)
        needed = needed.at[jnp.where(on_host, pages, geometry.num_pages)].set(True, mode="drop")
        order = jnp.cumsum(needed) - 1
        needed &= order < capacity
        turn, page = jnp.divmod(order, jnp.maximum(num_staging, 1))
        target = turn * geometry.device_pages + host.staging_page[page]
        listed = jnp.where(needed, order, plan.target.shape[0])
        plan = StagedPages(
            plan.host_page.at[listed].set(store.host_page_index, mode="drop"),
            plan.target.at[listed].set(target, mode="drop"),
            jnp.sum(needed),
        )
        row = (row_ids - geometry.slab_rows) % geometry.rows_per_device
        readable = jnp.maximum(pages, 0)
        staged = on_host & needed[readable]
        staged_row = target[readable] * geometry.rows_per_device + row
        return jnp.where(staged, staged_row, row_ids), plan

    row_ids, plan = run_if(jnp.any(on_host), plan_pages, (row_ids, StagedPages.none(geometry)))
    in_place = jnp.sum(row_ids >= geometry.slab_rows, axis=(1, 2))
    first = jnp.arange(spilled.shape[0]) == jnp.argmax(spilled > 0)
    rows = jnp.where(first, plan.count * geometry.rows_per_device * num_layers, 0)
    none = jnp.zeros_like(spilled)
    reads = Reads(
        resident=none,
        row_cache=none,
        staged=spilled - in_place,
        host=in_place,
        missed=spilled,
        layer_rows_staged=rows,
    )
    return row_ids, plan, reads
