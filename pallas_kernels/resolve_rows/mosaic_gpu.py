"""Resolution with its choices in one kernel, and its gathers and scatters in XLA.

Mosaic reaches memory at one address for a whole warpgroup, so looking up rows in the map, and
writing it, stay in XLA: ten or so launches, each of some megabytes at most. What would be a loop of
launches, the threshold of the victims, and the running counts that rank misses and victims, are one
launch: two blocks a sequence, which update the running means and list victims and misses in order.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.common import block_selection
from pallas_kernels.common.block_selection import GRANULE, LARGEST_BLOCK
from pallas_kernels.common.types import Interpret
from pallas_kernels.resolve_rows.reference import Resolution

_LARGEST = jnp.iinfo(jnp.int16).max


def unsupported(num_entries: int) -> str | None:
    """Why the kernel cannot resolve so many row-cache rows a sequence, None if it can."""
    if num_entries % GRANULE or not 0 < num_entries <= LARGEST_BLOCK:
        return f"row_cache_rows={num_entries} is no multiple of {GRANULE} up to {LARGEST_BLOCK}"
    return None


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
    *,
    first_host_row: int,
    rows_per_page: int,
    interpret: Interpret,
) -> Resolution:
    """`operation.resolve_rows`."""
    num_slots, _, num_entries = row_cache_row.shape
    group = jnp.asarray(group, jnp.int32)
    shape, (num_sequences, num_rows, k) = located.shape, located.shape
    flat = (num_sequences, num_rows * k)
    sequence = jnp.maximum(slots, 0)[:, None]
    leased = (slots >= 0) & (row_cache_page[sequence[:, 0], 0] >= 0)
    located = located.reshape(flat)
    wanted = (located >= first_host_row) & leased[:, None]
    rows = jnp.where(wanted, rows.reshape(flat), 0)

    held = row_cache_row[sequence[:, 0], group]
    numbers = jnp.broadcast_to(jnp.arange(num_entries, dtype=row_cache_entry.dtype), held.shape)
    listed = jnp.where((held >= 0) & leased[:, None], sequence, num_slots)
    row_cache_entry = row_cache_entry.at[listed, held].set(numbers, mode="drop")

    def found(row_cache_row: jax.Array, row_cache_entry: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The row-cache row of each wanted row, and whether there is one."""
        slot = jnp.clip(row_cache_entry[sequence, rows].astype(jnp.int32), 0, num_entries - 1)
        return slot, wanted & (row_cache_row[sequence, group, slot] == rows)

    # XLA copies a map that it writes before it reads.
    slot, hit, row_cache_entry = lax.optimization_barrier(
        (*found(row_cache_row, row_cache_entry), row_cache_entry)
    )
    # Made of what is traced, as XLA copies a constant before it writes to it.
    used = jnp.broadcast_to(~leased[:, None], held.shape).astype(jnp.int32)
    batch = jnp.arange(num_sequences)[:, None]
    used = used.at[batch, jnp.where(hit, slot, num_entries)].set(1, mode="drop")
    row_cache_entry, first = _first_to_miss(
        row_cache_entry, jnp.where(wanted & ~hit, sequence, num_slots), rows, num_rows
    )

    victims, entries, misses, staged, row_cache_mean = _plan(
        row_cache_row,
        row_cache_mean,
        slots,
        leased,
        group,
        row_cache_scores,
        used,
        first,
        interpret,
    )
    row = jnp.take_along_axis(rows, entries, axis=1)
    entry = jnp.arange(victims.shape[1])
    changed = jnp.where(entry < staged[:, None], sequence, num_slots)
    row_cache_row = row_cache_row.at[changed, group, victims].set(row, mode="drop")
    row_cache_entry = row_cache_entry.at[changed, row].set(
        victims.astype(row_cache_entry.dtype), mode="drop"
    )

    def physical(sequence: jax.Array, slot: jax.Array) -> jax.Array:
        return (
            row_cache_page[sequence, slot // rows_per_page] * rows_per_page + slot % rows_per_page
        )

    # Both lists of all sequences, one after another: each entry looks up whose it is.
    ends = jnp.sum(jnp.where(batch >= batch.T, staged, 0), axis=1)
    entry = jnp.arange(victims.size)
    whose = jnp.minimum(jnp.sum(ends <= entry[:, None], axis=1), num_sequences - 1)
    nth = jnp.clip(entry - (ends - staged)[whose], 0, victims.shape[1] - 1)
    host_rows = located[whose, entries[whose, nth]] - first_host_row
    device_rows = physical(sequence[whose, 0], victims[whose, nth])
    slot, cached = found(row_cache_row, row_cache_entry)
    return Resolution(
        row_cache_row,
        row_cache_mean,
        row_cache_entry,
        jnp.where(cached, physical(sequence, slot), located).reshape(shape),
        jnp.where(entry < ends[-1], host_rows, 0),
        jnp.where(entry < ends[-1], device_rows, 0),
        ends[-1],
        staged,
        jnp.sum(hit, axis=1),
        misses,
    )


def _first_to_miss(
    row_cache_entry: Int[Array, "slots context"],
    claimed: Int[Array, "sequences selected"],
    rows: Int[Array, "sequences selected"],
    num_rows: int,
) -> tuple[Int[Array, "slots context"], Bool[Array, "sequences selected"]]:
    """Marks the first to name each missed row, which claims it in the map itself.

    Args:
        row_cache_entry: the map.
        claimed: slot of the sequence of what misses, a slot too many of what does not.
        rows: selected rows.
        num_rows: how many query rows they are of.
    """
    missed = claimed < row_cache_entry.shape[0]
    if num_rows == 1:
        return row_cache_entry, missed
    order = jnp.broadcast_to(jnp.arange(rows.shape[1], dtype=row_cache_entry.dtype), rows.shape)
    row_cache_entry = row_cache_entry.at[claimed, rows].set(_LARGEST, mode="drop")
    row_cache_entry = row_cache_entry.at[claimed, rows].min(order, mode="drop")
    return row_cache_entry, missed & (
        row_cache_entry[jnp.minimum(claimed, row_cache_entry.shape[0] - 1), rows] == order
    )


def _plan(
    row_cache_row: Int[Array, "slots groups entries"],
    row_cache_mean: Float[Array, "slots groups entries"],
    slots: Int[Array, " sequences"],
    leased: Bool[Array, " sequences"],
    group: Int[Array, ""],
    row_cache_scores: Float[Array, "sequences entries"],
    used: Int[Array, "sequences entries"],
    first: Bool[Array, "sequences selected"],
    interpret: Interpret,
) -> tuple[
    Int[Array, "sequences staged"],
    Int[Array, "sequences staged"],
    Int[Array, " sequences"],
    Int[Array, " sequences"],
    Float[Array, "slots groups entries"],
]:
    """Entries to replace and the misses that replace them, and the new running means.

    Returns:
        Row-cache rows to replace, and which of the selected rows replaces each, both ascending, as
        many as are staged; then how many misses there are and how many are staged; then
        `row_cache_mean`.
    """
    num_sequences, num_entries = row_cache_scores.shape
    selected = first.shape[1]
    pieces = pl.cdiv(selected, LARGEST_BLOCK)
    piece = -(-selected // (pieces * GRANULE)) * GRANULE
    first = jnp.pad(first.astype(jnp.int32), [(0, 0), (0, pieces * piece - selected)])
    mean = jax.new_ref(row_cache_mean)
    victims, entries, counts = plgpu.kernel(
        functools.partial(_block, pieces=pieces, piece=piece),
        out_type=[
            jax.ShapeDtypeStruct((num_sequences, num_entries), jnp.int32),
            # A piece is written from where the one before it ends, whole.
            jax.ShapeDtypeStruct((num_sequences, num_entries + piece), jnp.int32),
            jax.ShapeDtypeStruct((2, num_sequences), jnp.int32),
        ],
        grid=(num_sequences, 2),
        grid_names=("sequence", "list"),
        scratch_types=[
            plgpu.SMEM((block_selection.buffer_size(max(piece, num_entries)),), jnp.int32)
        ],
        kernel_name="resolve_rows",
        interpret=interpret,
    )(row_cache_row, mean, jnp.where(leased, slots, -1), group[None], row_cache_scores, used, first)
    listed = min(selected, num_entries)
    return victims[:, :listed], entries[:, :listed], *counts, jax.freeze(mean)


def _block(
    row_ref: Any,
    mean_ref: Any,
    slots_ref: Any,
    group_ref: Any,
    scores_ref: Any,
    used_ref: Any,
    first_ref: Any,
    victims_ref: Any,
    entries_ref: Any,
    counts_ref: Any,
    buffer: Any,
    *,
    pieces: int,
    piece: int,
) -> None:
    """The kernel: one list of one sequence, on one warpgroup. References are those of `_plan`; the
    slots are -1 where there is nothing to do, whose lists are then not written."""
    sequence = lax.axis_index("sequence")
    num_entries = scores_ref.shape[1]
    slot = slots_ref[sequence]

    def missed(number: jax.Array | int) -> jax.Array:
        return block_selection.load(first_ref.at[sequence], number * piece, piece) != 0

    def list_victims() -> None:
        misses = sum(block_selection.count(missed(number)) for number in range(pieces))
        group_mean = mean_ref.at[slot, group_ref[0]]
        mean = block_selection.load(group_mean, 0, num_entries)
        scores = block_selection.load(scores_ref.at[sequence], 0, num_entries)
        mean = jnp.where(mean != mean, scores, (mean + scores) * 0.5)
        group_mean[...] = mean
        held = block_selection.load(row_ref.at[slot, group_ref[0]], 0, num_entries)
        idle = block_selection.load(used_ref.at[sequence], 0, num_entries) == 0
        # Complemented, the order of the values is the other way round.
        keys = ~block_selection.ordered_bits(jnp.where(held >= 0, mean, -jnp.inf))
        keys = jnp.where(idle, keys, block_selection.NEVER)
        staged = jnp.minimum(misses, block_selection.count(keys > block_selection.NEVER))
        counts_ref[0, sequence], counts_ref[1, sequence] = misses, staged

        @pl.when(staged > 0)
        def _() -> None:
            order = block_selection.indices(num_entries)
            chosen = block_selection.choose(keys, staged, order, num_entries)
            mean = block_selection.load(group_mean, 0, num_entries)
            group_mean[...] = jnp.where(chosen, jnp.nan, mean)
            block_selection.compact(chosen, buffer)
            victims_ref[sequence] = block_selection.load(buffer, 0, num_entries)

    def list_misses() -> None:
        def run(number: jax.Array, before: jax.Array) -> jax.Array:
            chosen = missed(number)
            after = before + block_selection.count(chosen)

            # There are no victims for more than the row-cache rows.
            @pl.when((before < num_entries) & (after > before))
            def _() -> None:
                block_selection.compact(chosen, buffer)
                entries = number * piece + block_selection.load(buffer, 0, piece)
                entries_ref[sequence, pl.ds(before, piece)] = entries

            return after

        lax.fori_loop(0, pieces, run, jnp.int32(0))

    is_victims = lax.axis_index("list") == 0
    pl.when((slot >= 0) & is_victims)(list_victims)
    pl.when((slot >= 0) & ~is_victims)(list_misses)

    @pl.when((slot < 0) & is_victims)
    def _() -> None:
        counts_ref[0, sequence], counts_ref[1, sequence] = jnp.int32(0), jnp.int32(0)
