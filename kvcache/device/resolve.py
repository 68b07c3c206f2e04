"""Resolution of selected positions to physical rows; what is not on the device is staged.

A step of a few rows a sequence keeps single rows of host pages in the sequence's row-cache rows. A
longer one, which selects from nearly every page, uses staging pages instead. What has room in
neither is read in host memory, in place; so none of this changes an answer.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from kvcache.device.host_tier import HostTier
from kvcache.device.store import KVStore, translate_positions
from kvcache.geometry import KVGeometry
from pallas_kernels.common.implementation import run_if
from pallas_kernels.common.pytree import pytree_dataclass
from pallas_kernels.resolve_rows import SelectedRows, resolve_rows
from pallas_kernels.stage_rows import stage_rows

MAX_ROWS_TO_RESOLVE = 8
"""Most rows of a sequence in a step that uses its row-cache rows: a token and its drafts."""

ScoreSummary = Float[Array, "sequences entries"] | None
"""Best index score of each row-cache row of a step's sequences; None in a step that uses none."""

Scalar = int | Int[Array, ""]


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
        row_ids: int32 [tokens, k], ids as `sparse_attention` takes them; -1 for none and for other
            devices' positions.
        staged: what each layer of the group stages before it attends; None without a host tier.
    """

    row_ids: Int[Array, "tokens k"]
    staged: StagedPages | None

    @classmethod
    def of_nothing(cls, row_ids: Int[Array, "tokens k"], geometry: KVGeometry) -> "ResolvedRows":
        """No rows: ids that are all -1."""
        return cls(row_ids, StagedPages.none(geometry) if geometry.reads_host else None)


def resolve_selection(
    store: KVStore,
    geometry: KVGeometry,
    group: Scalar,
    first_layer: Scalar,
    slots: Int[Array, " sequences"],
    block_tables: Int[Array, "sequences context_pages"],
    positions: Int[Array, "sequences rows k"],
    summary: ScoreSummary,
    device: Int[Array, ""],
) -> tuple[KVStore, ResolvedRows]:
    """Finds the rows that an index group selected, and stages what is not on the device.

    Args:
        store: the store.
        geometry: its sizes.
        group: the index group.
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
    located, pages = (
        found.reshape(positions.shape)
        for found in translate_positions(store, geometry, block_tables, flat, device)
    )
    host = store.host
    if host is None:
        return store, ResolvedRows(_by_token(located), None)
    layers = jnp.asarray(geometry.group_layers, jnp.int32)[group]
    on_host = located >= geometry.slab_rows
    if summary is not None:
        store, host, row_ids, reads = _resolve(
            store,
            host,
            geometry,
            (group, first_layer, layers),
            slots,
            positions,
            located,
            summary,
        )
        staged = StagedPages.none(geometry)
    else:
        row_ids, staged, reads = _plan_staging(store, host, geometry, layers, located, pages)
    resident = jnp.sum((located >= 0) & ~on_host, axis=(1, 2))
    host = host.count(slots, pages, jnp.stack([resident, *reads], axis=1))
    return dataclasses.replace(store, host=host), ResolvedRows(_by_token(row_ids), staged)


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
    if host is None or positions.shape[1] > MAX_ROWS_TO_RESOLVE:
        return None

    def summarize(sequence: tuple[Array, Array, Array]) -> Array:
        return _row_cache_scores(host, index_group, *sequence)

    return lax.map(summarize, (slots, positions, scores))


def _row_cache_scores(
    host: HostTier,
    index_group: Scalar,
    slot: Int[Array, ""],
    positions: Int[Array, " rows"],
    scores: Float[Array, "rows context"],
) -> Float[Array, " entries"]:
    """The best index score of each row-cache row of a sequence among its rows of a step."""
    known = jnp.maximum(slot, 0)
    held = host.row_cache.row[known, index_group]
    leased = (slot >= 0) & (host.row_cache.page[known, 0] >= 0)

    def gather(_: Array) -> Array:
        found = scores[:, jnp.clip(held, 0, scores.shape[1] - 1)]
        counted = (positions >= 0)[:, None] & (held >= 0) & leased
        return jnp.max(jnp.where(counted, found, -jnp.inf), axis=0)

    return run_if(leased, gather, jnp.full(held.shape, -jnp.inf, scores.dtype))


def _by_token(row_ids: Int[Array, "sequences rows k"]) -> Int[Array, "tokens k"]:
    return row_ids.reshape(-1, row_ids.shape[-1])


def _resolve(
    store: KVStore,
    host: HostTier,
    geometry: KVGeometry,
    layers: tuple[Scalar, Scalar, Scalar],
    slots: Int[Array, " sequences"],
    positions: Int[Array, "sequences rows k"],
    located: Int[Array, "sequences rows k"],
    row_cache_scores: Float[Array, "sequences entries"],
) -> tuple[KVStore, HostTier, jax.Array, tuple[jax.Array, ...]]:
    """Brings missed rows to the sequences' row-cache rows, for a group, its first layer and its
    number of layers. Returns the store, its host tier, row ids, and what `reads` counts of host
    rows."""
    group, first_layer, num_layers = layers
    on_host = located >= geometry.slab_rows
    wanted = jnp.any(on_host)
    leased = host.row_cache.page[jnp.maximum(slots, 0), 0] >= 0

    def run(state: tuple[Any, ...]) -> tuple[Any, ...]:
        slab, row_cache, row_ids, *_ = state
        selected = SelectedRows(
            jnp.where(wanted, slots, -1),  # so that scores count in the same steps everywhere
            positions // geometry.num_devices,
            row_ids,
            row_cache_scores,
        )
        found = resolve_rows(
            row_cache, selected, group, geometry.slab_rows, geometry.rows_per_device
        )
        rows = (found.host_rows, found.device_rows, found.num_staged)
        slab = stage_rows(slab, host.slab, first_layer, num_layers, *rows)
        in_place = jnp.sum(found.row_ids >= geometry.slab_rows, axis=(1, 2))
        fresh = jnp.sum(on_host, axis=(1, 2)) - found.hits - in_place
        misses = jnp.where(leased, found.misses, in_place)
        return (
            slab,
            found.row_cache,
            found.row_ids,
            found.hits,
            fresh,
            in_place,
            misses,
            found.staged * num_layers,
        )

    none = jnp.zeros(slots.shape, jnp.int32)
    slab, row_cache, row_ids, hits, fresh, in_place, misses, staged = run_if(
        wanted, run, (store.slab, host.row_cache, located, *[none] * 5)
    )
    host = dataclasses.replace(host, row_cache=row_cache)
    store = dataclasses.replace(store, slab=slab)
    return store, host, row_ids, (hits, fresh, in_place, misses, staged)


def _plan_staging(
    store: KVStore,
    host: HostTier,
    geometry: KVGeometry,
    num_layers: Scalar,
    located: Int[Array, "sequences rows k"],
    pages: Int[Array, "sequences rows k"],
) -> tuple[jax.Array, StagedPages, tuple[jax.Array, ...]]:
    """Gives a staging page to each host page that a row selected from, as far as there are any.

    Returns row ids, the plan, and what `reads` counts of host rows.
    """
    on_host = located >= geometry.slab_rows
    spilled = jnp.sum(on_host, axis=(1, 2))
    num_staging = jnp.sum(host.staging_page >= 0)

    def run(state: tuple[jax.Array, StagedPages]) -> tuple[jax.Array, StagedPages]:
        _, plan = state
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
        row = (located - geometry.slab_rows) % geometry.rows_per_device
        readable = jnp.maximum(pages, 0)
        staged = on_host & needed[readable]
        staged_row = target[readable] * geometry.rows_per_device + row
        return jnp.where(staged, staged_row, located), plan

    row_ids, plan = run_if(jnp.any(on_host), run, (located, StagedPages.none(geometry)))
    in_place = jnp.sum(row_ids >= geometry.slab_rows, axis=(1, 2))
    first = jnp.arange(spilled.shape[0]) == jnp.argmax(spilled > 0)
    rows = jnp.where(first, plan.count * geometry.rows_per_device * num_layers, 0)
    return row_ids, plan, (jnp.zeros_like(spilled), spilled - in_place, in_place, spilled, rows)
