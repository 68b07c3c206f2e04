"""Resolution with its choices in one kernel, and its gathers and scatters in XLA.

Mosaic reaches memory at one address for a whole warpgroup, so looking up rows in the map, and
writing it, stay in XLA: ten or so launches, each of some megabytes at most. What would be a loop of
launches, the threshold of the entries to replace, and the running counts that rank them and the
misses, are one launch: two blocks a sequence, which update the running means and list entries to
replace and misses in order.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.common import block_selection
from pallas_kernels.common.block_selection import GRANULE, LARGEST_BLOCK
from pallas_kernels.common.types import Interpret, Ref, Scalar
from pallas_kernels.resolve_rows.reference import Resolution
from pallas_kernels.resolve_rows.row_cache import RowCache, SelectedRows

_LARGEST = jnp.iinfo(jnp.int16).max


def unsupported(num_entries: int) -> str | None:
    """Why the kernel cannot resolve so many row-cache rows a sequence, None if it can."""
    if num_entries % GRANULE or not 0 < num_entries <= LARGEST_BLOCK:
        return f"row_cache_rows={num_entries} is no multiple of {GRANULE} up to {LARGEST_BLOCK}"
    return None


def resolve_rows(
    row_cache: RowCache,
    selected: SelectedRows,
    index_group: Scalar,
    *,
    first_host_row: int,
    rows_per_page: int,
    interpret: Interpret,
) -> Resolution:
    """`operation.resolve_rows`."""
    num_slots, _, num_entries = row_cache.row.shape
    row_of_entry, entry_of_row = row_cache.row, row_cache.entry
    group = jnp.asarray(index_group, jnp.int32)
    num_sequences, num_rows, k = selected.row_ids.shape
    flat = (num_sequences, num_rows * k)
    sequence = jnp.maximum(selected.slots, 0)[:, None]
    leased = (selected.slots >= 0) & (row_cache.page[sequence[:, 0], 0] >= 0)
    row_ids = selected.row_ids.reshape(flat)
    wanted = (row_ids >= first_host_row) & leased[:, None]
    rows = jnp.where(wanted, selected.rows.reshape(flat), 0)

    held = row_of_entry[sequence[:, 0], group]
    numbers = jnp.broadcast_to(jnp.arange(num_entries, dtype=entry_of_row.dtype), held.shape)
    listed = jnp.where((held >= 0) & leased[:, None], sequence, num_slots)
    entry_of_row = entry_of_row.at[listed, held].set(numbers, mode="drop")

    def found(row_of_entry: Array, entry_of_row: Array) -> tuple[Array, Array]:
        """The entry of each wanted row, and whether it holds the row."""
        entry = jnp.clip(entry_of_row[sequence, rows].astype(jnp.int32), 0, num_entries - 1)
        return entry, wanted & (row_of_entry[sequence, group, entry] == rows)

    # XLA copies a map that it writes before it reads.
    entry, hit, entry_of_row = lax.optimization_barrier(
        (*found(row_of_entry, entry_of_row), entry_of_row)
    )
    # Made of what is traced, as XLA copies a constant before it writes to it.
    used = jnp.broadcast_to(~leased[:, None], held.shape).astype(jnp.int32)
    batch = jnp.arange(num_sequences)[:, None]
    used = used.at[batch, jnp.where(hit, entry, num_entries)].set(1, mode="drop")
    entry_of_row, first = _first_to_miss(
        entry_of_row, jnp.where(wanted & ~hit, sequence, num_slots), rows, num_rows
    )

    replaced, replacements, misses, staged, mean = _plan(
        row_cache, selected, leased, group, used, first, interpret
    )
    row = jnp.take_along_axis(rows, replacements, axis=1)
    changed = jnp.where(jnp.arange(replaced.shape[1]) < staged[:, None], sequence, num_slots)
    row_of_entry = row_of_entry.at[changed, group, replaced].set(row, mode="drop")
    entry_of_row = entry_of_row.at[changed, row].set(
        replaced.astype(entry_of_row.dtype), mode="drop"
    )

    def physical(sequence: Array, entry: Array) -> Array:
        page = row_cache.page[sequence, entry // rows_per_page]
        return page * rows_per_page + entry % rows_per_page

    # Both lists of all sequences, one after another: each index looks up whose it is.
    ends = jnp.sum(jnp.where(batch >= batch.T, staged, 0), axis=1)
    index = jnp.arange(replaced.size)
    whose = jnp.minimum(jnp.sum(ends <= index[:, None], axis=1), num_sequences - 1)
    nth = jnp.clip(index - (ends - staged)[whose], 0, replaced.shape[1] - 1)
    host_rows = row_ids[whose, replacements[whose, nth]] - first_host_row
    device_rows = physical(sequence[whose, 0], replaced[whose, nth])
    entry, cached = found(row_of_entry, entry_of_row)
    return Resolution(
        RowCache(row_cache.page, row_of_entry, mean, entry_of_row),
        jnp.where(cached, physical(sequence, entry), row_ids).reshape(selected.row_ids.shape),
        jnp.where(index < ends[-1], host_rows, 0),
        jnp.where(index < ends[-1], device_rows, 0),
        ends[-1],
        staged,
        jnp.sum(hit, axis=1),
        misses,
    )


def _first_to_miss(
    entry_of_row: Int[Array, "slots context"],
    claimed: Int[Array, "sequences selected"],
    rows: Int[Array, "sequences selected"],
    num_rows: int,
) -> tuple[Int[Array, "slots context"], Bool[Array, "sequences selected"]]:
    """Marks the first to name each missed row, which claims it in the map itself.

    Args:
        entry_of_row: the map.
        claimed: slot of the sequence of what misses, a slot too many of what does not.
        rows: selected rows.
        num_rows: how many query rows they are of.
    """
    missed = claimed < entry_of_row.shape[0]
    if num_rows == 1:
        return entry_of_row, missed
    order = jnp.broadcast_to(jnp.arange(rows.shape[1], dtype=entry_of_row.dtype), rows.shape)
    entry_of_row = entry_of_row.at[claimed, rows].set(_LARGEST, mode="drop")
    entry_of_row = entry_of_row.at[claimed, rows].min(order, mode="drop")
    return entry_of_row, missed & (
        entry_of_row[jnp.minimum(claimed, entry_of_row.shape[0] - 1), rows] == order
    )


def _plan(
    row_cache: RowCache,
    selected: SelectedRows,
    leased: Bool[Array, " sequences"],
    group: Int[Array, ""],
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
        Entries to replace, and which of the selected rows replaces each, both ascending, as many
        as are staged; then how many misses there are and how many are staged; then the means.
    """
    num_sequences, num_entries = selected.scores.shape
    num_selected = first.shape[1]
    pieces = pl.cdiv(num_selected, LARGEST_BLOCK)
    piece = -(-num_selected // (pieces * GRANULE)) * GRANULE
    first = jnp.pad(first.astype(jnp.int32), [(0, 0), (0, pieces * piece - num_selected)])
    mean = jax.new_ref(row_cache.mean)
    slots = jnp.where(leased, selected.slots, -1)
    replaced, replacements, counts = plgpu.kernel(
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
    )(row_cache.row, mean, slots, group[None], selected.scores, used, first)
    listed = min(num_selected, num_entries)
    return replaced[:, :listed], replacements[:, :listed], *counts, jax.freeze(mean)


def _block(
    row_ref: Ref,
    mean_ref: Ref,
    slots_ref: Ref,
    group_ref: Ref,
    scores_ref: Ref,
    used_ref: Ref,
    first_ref: Ref,
    replaced_ref: Ref,
    replacements_ref: Ref,
    counts_ref: Ref,
    buffer: Ref,
    *,
    pieces: int,
    piece: int,
) -> None:
    """The kernel: one list of one sequence, on one warpgroup. References are those of `_plan`; the
    slots are -1 where there is nothing to do, whose lists are then not written."""
    sequence = lax.axis_index("sequence")
    num_entries = scores_ref.shape[1]
    slot = slots_ref[sequence]

    def missed(number: Array | int) -> Array:
        return block_selection.load(first_ref.at[sequence], number * piece, piece) != 0

    def list_replaced() -> None:
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
            replaced = block_selection.choose(keys, staged, order, num_entries)
            mean = block_selection.load(group_mean, 0, num_entries)
            group_mean[...] = jnp.where(replaced, jnp.nan, mean)
            block_selection.compact(replaced, buffer)
            replaced_ref[sequence] = block_selection.load(buffer, 0, num_entries)

    def list_misses() -> None:
        def run(number: Array, before: Array) -> Array:
            listed = missed(number)
            after = before + block_selection.count(listed)

            # No more are replaced than the entries.
            @pl.when((before < num_entries) & (after > before))
            def _() -> None:
                block_selection.compact(listed, buffer)
                rows = number * piece + block_selection.load(buffer, 0, piece)
                replacements_ref[sequence, pl.ds(before, piece)] = rows

            return after

        lax.fori_loop(0, pieces, run, jnp.int32(0))

    is_replaced = lax.axis_index("list") == 0
    pl.when((slot >= 0) & is_replaced)(list_replaced)
    pl.when((slot >= 0) & ~is_replaced)(list_misses)

    @pl.when((slot < 0) & is_replaced)
    def _() -> None:
        counts_ref[0, sequence], counts_ref[1, sequence] = jnp.int32(0), jnp.int32(0)
