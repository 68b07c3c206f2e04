"""Resolution of selected rows in plain jax.numpy: gathers, running counts and a threshold, no sort.

`RowCache.row` says what each entry holds, and `RowCache.entry` is the way back: filled in from
`row` when it is needed, it finds a row's entry by one gather.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.common.types import Scalar
from pallas_kernels.resolve_rows.row_cache import RowCache, SelectedRows

_LARGEST = jnp.iinfo(jnp.int16).max


class Resolution(NamedTuple):
    """Result of `resolve_rows`.

    Attributes:
        row_cache: the new state.
        row_ids: int32 [sequences, rows, k], a row of the slab, or the host row's id where no entry
            holds it.
        host_rows: int32 [misses], host rows to stage.
        device_rows: int32 [misses], rows of a layer to stage them in.
        num_staged: int32, how many of these lists are valid.
        staged: int32 [sequences], how many of them are each sequence's.
        hits: int32 [sequences], selected rows that were in the row cache.
        misses: int32 [sequences], different selected rows that were not.
    """

    row_cache: RowCache
    row_ids: Int[Array, "sequences rows k"]
    host_rows: Int[Array, " misses"]
    device_rows: Int[Array, " misses"]
    num_staged: Int[Array, ""]
    staged: Int[Array, " sequences"]
    hits: Int[Array, " sequences"]
    misses: Int[Array, " sequences"]


def resolve_rows(
    row_cache: RowCache,
    selected: SelectedRows,
    index_group: Scalar,
    first_host_row: int,
    rows_per_page: int,
) -> Resolution:
    """`operation.resolve_rows`."""
    num_slots, _, num_entries = row_cache.row.shape
    entry_of_row = row_cache.entry
    sequence = jnp.maximum(selected.slots, 0)[:, None]
    leased = (selected.slots >= 0) & (row_cache.page[sequence[:, 0], 0] >= 0)
    num_sequences, num_rows, k = selected.row_ids.shape
    flat = (num_sequences, num_rows * k)
    row_ids = selected.row_ids.reshape(flat)
    wanted = (row_ids >= first_host_row) & leased[:, None]
    rows = jnp.where(wanted, selected.rows.reshape(flat), 0)
    target = jnp.where(wanted, sequence, num_slots)  # where state is written, or dropped

    held = row_cache.row[sequence[:, 0], index_group]  # [sequences, entries]
    numbers = jnp.broadcast_to(jnp.arange(num_entries, dtype=entry_of_row.dtype), held.shape)
    listed = jnp.where((held >= 0) & leased[:, None], sequence, num_slots)
    entry_of_row = entry_of_row.at[listed, held].set(numbers, mode="drop")

    def found(held: Array, entry_of_row: Array) -> tuple[Array, Array]:
        """The entry of each wanted row, and whether it holds the row."""
        entry = jnp.clip(entry_of_row[sequence, rows].astype(jnp.int32), 0, num_entries - 1)
        return entry, wanted & (jnp.take_along_axis(held, entry, axis=1) == rows)

    entry, hit = found(held, entry_of_row)
    used = jnp.zeros((num_sequences, num_entries + 1), bool)
    used = used.at[jnp.arange(num_sequences)[:, None], jnp.where(hit, entry, num_entries)].set(True)
    used = used[:, :num_entries]
    mean = row_cache.mean[sequence[:, 0], index_group]
    mean = jnp.where(jnp.isnan(mean), selected.scores, (mean + selected.scores) / 2)

    missed = wanted & ~hit
    if num_rows > 1:
        # The first to name a row claims it, in the map itself.
        order = jnp.broadcast_to(jnp.arange(flat[1], dtype=entry_of_row.dtype), flat)
        claimed = jnp.where(missed, target, num_slots)
        entry_of_row = entry_of_row.at[claimed, rows].set(_LARGEST, mode="drop")
        entry_of_row = entry_of_row.at[claimed, rows].min(order, mode="drop")
        first = missed & (entry_of_row[sequence, rows] == order)
    else:
        first = missed
    misses = jnp.sum(first, axis=1)

    replaceable, num_replaced = _lowest(jnp.where(held >= 0, mean, -jnp.inf), ~used, misses)
    rank = jnp.cumsum(first, axis=1) - 1
    staged = first & (rank < num_replaced[:, None])
    replaced_entry = jnp.take_along_axis(replaceable, jnp.clip(rank, 0, num_entries - 1), axis=1)
    replaced = jnp.where(staged, replaced_entry, num_entries)
    batch = jnp.arange(num_sequences)[:, None]
    held = held.at[batch, replaced].set(rows, mode="drop")
    mean = mean.at[batch, replaced].set(jnp.nan, mode="drop")
    entry_of_row = entry_of_row.at[jnp.where(staged, target, num_slots), rows].set(
        replaced_entry.astype(entry_of_row.dtype), mode="drop"
    )
    # Nothing counts in a sequence that selects no host row.
    changed = jnp.where(jnp.any(wanted, axis=1), selected.slots, num_slots)

    def physical(entry: Array) -> Array:
        page = row_cache.page[sequence, entry // rows_per_page]
        return page * rows_per_page + entry % rows_per_page

    # Both lists of all sequences, one after another, closed up.
    index = jnp.where(staged.reshape(-1), jnp.cumsum(staged) - 1, staged.size)
    lists = jnp.zeros((2, num_sequences * min(flat[1], num_entries)), jnp.int32)
    both = jnp.stack([(row_ids - first_host_row).reshape(-1), physical(replaced_entry).reshape(-1)])
    host_rows, device_rows = lists.at[:, index].set(both, mode="drop")
    entry, cached = found(held, entry_of_row)
    return Resolution(
        RowCache(
            row_cache.page,
            row_cache.row.at[changed, index_group].set(held, mode="drop"),
            row_cache.mean.at[changed, index_group].set(mean, mode="drop"),
            entry_of_row,
        ),
        jnp.where(cached, physical(entry), row_ids).reshape(selected.row_ids.shape),
        host_rows,
        device_rows,
        jnp.sum(staged),
        jnp.sum(staged, axis=1),
        jnp.sum(hit, axis=1),
        misses,
    )


def _lowest(
    values: Float[Array, "sequences entries"],
    allowed: Bool[Array, "sequences entries"],
    count: Int[Array, " sequences"],
) -> tuple[Int[Array, "sequences entries"], Int[Array, " sequences"]]:
    """The `count` allowed entries of the lowest values, as far as there are, in ascending order; of
    equal values the first entries. Returns them, and how many."""
    count = jnp.minimum(count, jnp.sum(allowed, axis=1))
    bits = lax.bitcast_convert_type(values, jnp.int32)
    keys = jnp.where(bits < 0, bits ^ jnp.iinfo(jnp.int32).max, bits)  # in the order of the values

    def halve(_: object, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = (low & high) + ((low ^ high) >> 1)
        enough = jnp.sum(allowed & (keys <= middle[:, None]), axis=1) >= count
        return jnp.where(enough, low, middle + 1), jnp.where(enough, middle, high)

    # The least key up to which there are enough.
    limits = jnp.iinfo(jnp.int32)
    bounds = jnp.full_like(count, limits.min), jnp.full_like(count, limits.max)
    threshold, _ = lax.fori_loop(0, 32, halve, bounds)
    lower = allowed & (keys < threshold[:, None])
    equal = allowed & (keys == threshold[:, None])
    room = (count - jnp.sum(lower, axis=1))[:, None]
    is_lowest = lower | (equal & (jnp.cumsum(equal, axis=1) <= room))
    index = jnp.where(is_lowest, jnp.cumsum(is_lowest, axis=1) - 1, keys.shape[1])
    numbers = jnp.broadcast_to(jnp.arange(keys.shape[1], dtype=jnp.int32), keys.shape)
    numbers_of_lowest = jnp.zeros_like(numbers)
    batch = jnp.arange(keys.shape[0])[:, None]
    return numbers_of_lowest.at[batch, index].set(numbers, mode="drop"), count
