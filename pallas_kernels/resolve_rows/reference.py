"""Resolution of selected rows in plain jax.numpy: gathers, running counts and a threshold, no sort.

A sequence has a fixed number of row-cache rows for each index group. `row_cache_row` says what each
holds, and `row_cache_entry` is the way back: filled in from `row_cache_row` when it is needed, it
is a gather
    by the row.
An entry of it counts only where `row_cache_row` agrees, so it is never cleared and serves all
groups.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

_LARGEST = jnp.iinfo(jnp.int16).max


class Resolution(NamedTuple):
    """Result of `resolve_rows`.

    Attributes:
        row_cache_row: the new state.
        row_cache_mean: the new state.
        row_cache_entry: the new state.
        row_ids: int32 [sequences, rows, k], a row of the slab, or the host row's id where it has no
            row-cache row.
        host_rows: int32 [misses], host rows to stage.
        device_rows: int32 [misses], rows of a layer to stage them in.
        num_staged: int32, how many of these lists are valid.
        staged: int32 [sequences], how many of them are each sequence's.
        hits: int32 [sequences], selected rows that were in the row cache.
        misses: int32 [sequences], different selected rows that were not.
    """

    row_cache_row: Int[Array, "slots groups entries"]
    row_cache_mean: Float[Array, "slots groups entries"]
    row_cache_entry: Int[Array, "slots context"]
    row_ids: Int[Array, "sequences rows k"]
    host_rows: Int[Array, " misses"]
    device_rows: Int[Array, " misses"]
    num_staged: Int[Array, ""]
    staged: Int[Array, " sequences"]
    hits: Int[Array, " sequences"]
    misses: Int[Array, " sequences"]


def resolve_rows(
    row_cache_row: Int[Array, "slots groups entries"],
    row_cache_mean: Float[Array, "slots groups entries"],
    row_cache_entry: Int[Array, "slots context"],
    row_cache_page: Int[Array, "slots row_cache_pages"],
    slots: Int[Array, " sequences"],
    group: int | Int[Array, ""],
    rows: Int[Array, "sequences rows k"],
    located: Int[Array, "sequences rows k"],
    row_cache_scores: Float[Array, "sequences entries"],
    first_host_row: int,
    rows_per_page: int,
) -> Resolution:
    """`operation.resolve_rows`."""
    num_slots, _, num_entries = row_cache_row.shape
    sequence = jnp.maximum(slots, 0)[:, None]
    leased = (slots >= 0) & (row_cache_page[sequence[:, 0], 0] >= 0)
    shape, (num_sequences, num_rows, k) = located.shape, located.shape
    flat = (num_sequences, num_rows * k)
    located = located.reshape(flat)
    wanted = (located >= first_host_row) & leased[:, None]
    rows = jnp.where(wanted, rows.reshape(flat), 0)
    target = jnp.where(wanted, sequence, num_slots)  # where state is written, or dropped

    held = row_cache_row[sequence[:, 0], group]  # [sequences, entries]
    numbers = jnp.broadcast_to(jnp.arange(num_entries, dtype=row_cache_entry.dtype), held.shape)
    listed = jnp.where((held >= 0) & leased[:, None], sequence, num_slots)
    row_cache_entry = row_cache_entry.at[listed, held].set(numbers, mode="drop")

    def found(held: jax.Array, row_cache_entry: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The row-cache row of each wanted row, and whether there is one."""
        slot = jnp.clip(row_cache_entry[sequence, rows].astype(jnp.int32), 0, num_entries - 1)
        return slot, wanted & (jnp.take_along_axis(held, slot, axis=1) == rows)

    slot, hit = found(held, row_cache_entry)
    used = jnp.zeros((num_sequences, num_entries + 1), bool)
    used = used.at[jnp.arange(num_sequences)[:, None], jnp.where(hit, slot, num_entries)].set(True)
    used = used[:, :num_entries]
    mean = row_cache_mean[sequence[:, 0], group]
    mean = jnp.where(jnp.isnan(mean), row_cache_scores, (mean + row_cache_scores) / 2)

    missed = wanted & ~hit
    if num_rows > 1:
        # The first to name a row claims it, in the map itself.
        order = jnp.broadcast_to(jnp.arange(flat[1], dtype=row_cache_entry.dtype), flat)
        claimed = jnp.where(missed, target, num_slots)
        row_cache_entry = row_cache_entry.at[claimed, rows].set(_LARGEST, mode="drop")
        row_cache_entry = row_cache_entry.at[claimed, rows].min(order, mode="drop")
        first = missed & (row_cache_entry[sequence, rows] == order)
    else:
        first = missed
    misses = jnp.sum(first, axis=1)

    victims, num_victims = _lowest(jnp.where(held >= 0, mean, -jnp.inf), ~used, misses)
    rank = jnp.cumsum(first, axis=1) - 1
    staged = first & (rank < num_victims[:, None])
    victim = jnp.take_along_axis(victims, jnp.clip(rank, 0, num_entries - 1), axis=1)
    replaced = jnp.where(staged, victim, num_entries)
    batch = jnp.arange(num_sequences)[:, None]
    held = held.at[batch, replaced].set(rows, mode="drop")
    mean = mean.at[batch, replaced].set(jnp.nan, mode="drop")
    row_cache_entry = row_cache_entry.at[jnp.where(staged, target, num_slots), rows].set(
        victim.astype(row_cache_entry.dtype), mode="drop"
    )
    changed = jnp.where(leased, slots, num_slots)

    def physical(slot: jax.Array) -> jax.Array:
        return (
            row_cache_page[sequence, slot // rows_per_page] * rows_per_page + slot % rows_per_page
        )

    # Both lists of all sequences, one after another, closed up.
    entry = jnp.where(staged.reshape(-1), jnp.cumsum(staged) - 1, staged.size)
    lists = jnp.zeros((2, num_sequences * min(flat[1], num_entries)), jnp.int32)
    both = jnp.stack([(located - first_host_row).reshape(-1), physical(victim).reshape(-1)])
    host_rows, device_rows = lists.at[:, entry].set(both, mode="drop")
    slot, cached = found(held, row_cache_entry)
    return Resolution(
        row_cache_row.at[changed, group].set(held, mode="drop"),
        row_cache_mean.at[changed, group].set(mean, mode="drop"),
        row_cache_entry,
        jnp.where(cached, physical(slot), located).reshape(shape),
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
    """The `count` allowed slots of the lowest values, as far as there are, in order of their
    numbers; of equal values the first slots. Returns them, and how many."""
    count = jnp.minimum(count, jnp.sum(allowed, axis=1))
    bits = lax.bitcast_convert_type(values, jnp.int32)
    keys = jnp.where(bits < 0, bits ^ jnp.iinfo(jnp.int32).max, bits)  # in the order of the values

    def halve(_: object, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
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
    chosen = lower | (equal & (jnp.cumsum(equal, axis=1) <= room))
    entry = jnp.where(chosen, jnp.cumsum(chosen, axis=1) - 1, keys.shape[1])
    numbers = jnp.broadcast_to(jnp.arange(keys.shape[1], dtype=jnp.int32), keys.shape)
    victims = jnp.zeros_like(numbers)
    batch = jnp.arange(keys.shape[0])[:, None]
    return victims.at[batch, entry].set(numbers, mode="drop"), count
