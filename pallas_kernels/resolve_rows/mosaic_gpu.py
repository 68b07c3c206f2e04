"""Resolution with its choices in one kernel, and its gathers and scatters in XLA.

Looking up rows in the map, and writing it, are XLA's: some megabytes at most each. The rest is one
launch, two blocks a sequence: the threshold of the entries to replace, the running counts that rank
them and the misses, and the running means.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float, Int, Shaped

from pallas_kernels.common import block_selection
from pallas_kernels.common.block_selection import GRANULE, LARGEST_BLOCK
from pallas_kernels.common.scatter import scatter
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
    _, num_groups, num_entries = row_cache.row.shape
    context = row_cache.entry.shape[1]
    # By one index each, which XLA computes where it is needed.
    row_of_entry, entry_of_row = row_cache.row.reshape(-1), row_cache.entry.reshape(-1)
    group = jnp.asarray(index_group, jnp.int32)
    num_sequences, num_rows, k = selected.row_ids.shape
    flat = (num_sequences, num_rows * k)
    slot = jnp.maximum(selected.slots, 0)
    first_row, first_entry = slot * context, (slot * num_groups + group) * num_entries
    leased = (selected.slots >= 0) & (row_cache.page[slot, 0] >= 0)
    row_ids = selected.row_ids.reshape(flat)
    wanted = (row_ids >= first_host_row) & leased[:, None]
    rows = jnp.where(wanted, selected.rows.reshape(flat), 0)
    in_map = first_row[:, None] + rows

    held = row_cache.row[slot, group]
    listed = jnp.where((held >= 0) & leased[:, None], first_row[:, None] + held, entry_of_row.size)
    numbers = jnp.broadcast_to(jnp.arange(num_entries, dtype=entry_of_row.dtype), held.shape)
    entry_of_row = _put(entry_of_row, listed, numbers)

    def found(row_of_entry: Array, entry_of_row: Array) -> tuple[Array, Array]:
        """The entry of each wanted row, and whether it holds the row."""
        entry = jnp.clip(_get(entry_of_row, in_map).astype(jnp.int32), 0, num_entries - 1)
        return entry, wanted & (_get(row_of_entry, first_entry[:, None] + entry) == rows)

    # XLA copies a map that it writes before it reads.
    entry, hit, entry_of_row = lax.optimization_barrier(
        (*found(row_of_entry, entry_of_row), entry_of_row)
    )
    entry_of_row, first = _first_to_miss(
        entry_of_row, jnp.where(wanted & ~hit, in_map, entry_of_row.size), num_rows
    )

    replaced, replacements, misses, staged, mean = _plan(
        row_cache, selected, group, jnp.where(hit, entry, num_entries), first, interpret
    )
    batch = jnp.arange(num_sequences)[:, None]
    row = _get(rows.reshape(-1), batch * flat[1] + replacements)
    changed = jnp.arange(replaced.shape[1]) < staged[:, None]
    row_of_entry = _put(
        row_of_entry,
        jnp.where(changed, first_entry[:, None] + replaced, row_of_entry.size),
        row,
    )
    entry_of_row = _put(
        entry_of_row,
        jnp.where(changed, first_row[:, None] + row, entry_of_row.size),
        replaced.astype(entry_of_row.dtype),
    )

    def physical(slot: Array, entry: Array) -> Array:
        pages = row_cache.page.shape[1]
        page = _get(row_cache.page.reshape(-1), slot * pages + entry // rows_per_page)
        return page * rows_per_page + entry % rows_per_page

    # Both lists of all sequences, one after another: each index looks up its owner.
    index = jnp.arange(replaced.size)
    whose, nth, num_staged = _owners(staged, index)
    nth = jnp.clip(nth, 0, replaced.shape[1] - 1)
    nth = whose * replaced.shape[1] + nth
    replacement = whose * flat[1] + _get(replacements.reshape(-1), nth)
    host_rows = _get(row_ids.reshape(-1), replacement) - first_host_row
    device_rows = physical(_get(slot, whose), _get(replaced.reshape(-1), nth))
    entry, cached = found(row_of_entry, entry_of_row)
    return Resolution(
        RowCache(
            row_cache.page,
            row_of_entry.reshape(row_cache.row.shape),
            mean,
            entry_of_row.reshape(row_cache.entry.shape),
        ),
        jnp.where(cached, physical(slot[:, None], entry), row_ids).reshape(selected.row_ids.shape),
        jnp.where(index < num_staged, host_rows, 0),
        jnp.where(index < num_staged, device_rows, 0),
        num_staged,
        staged,
        jnp.sum(hit, axis=1),
        misses,
    )


def _owners(
    counts: Int[Array, " sequences"], index: Int[Array, " staged"]
) -> tuple[Int[Array, " staged"], Int[Array, " staged"], Int[Array, ""]]:
    """The owner of each entry in lists one after another, and its number among the owner's.

    Written out, as sums over sequences would be launches of their own.

    Returns:
        The owner of each entry, its number among the owner's, and how many entries there are.
    """
    whose, begin, end = jnp.zeros_like(index), jnp.zeros_like(index), counts[0]
    for number in range(1, counts.shape[0]):
        reached = index >= end
        whose, begin = jnp.where(reached, number, whose), jnp.where(reached, end, begin)
        end = end + counts[number]
    return whose, index - begin, end


def _first_to_miss(
    entry_of_row: Int[Array, " map"], claimed: Int[Array, "sequences selected"], num_rows: int
) -> tuple[Int[Array, " map"], Bool[Array, "sequences selected"]]:
    """Marks the first to name each missed row, which claims it in the map itself.

    Args:
        entry_of_row: the map.
        claimed: where in the map each missed row is; beyond its end for what does not miss.
        num_rows: how many query rows they are of.
    """
    missed = claimed < entry_of_row.size
    if num_rows == 1:
        return entry_of_row, missed
    order = jnp.broadcast_to(jnp.arange(claimed.shape[1], dtype=entry_of_row.dtype), claimed.shape)
    entry_of_row = _put(entry_of_row, claimed, jnp.full_like(order, _LARGEST))
    entry_of_row = entry_of_row.at[claimed].min(order, mode="drop", wrap_negative_indices=False)
    return entry_of_row, missed & (_get(entry_of_row, jnp.where(missed, claimed, 0)) == order)


def _get(array: Shaped[Array, " size"], index: Int[Array, "*shape"]) -> Shaped[Array, "*shape"]:
    """Elements of an array; what an index beyond it reads is of no use, but lies within it: XLA
    clamps indices."""
    return array.at[index].get(mode="promise_in_bounds", wrap_negative_indices=False)


def _put(
    array: Shaped[Array, " size"], index: Int[Array, "*shape"], values: Shaped[Array, "*shape"]
) -> Shaped[Array, " size"]:
    """The array with other elements; what an index beyond its end says is dropped."""
    return array.at[index].set(values, mode="drop", wrap_negative_indices=False)


def _plan(
    row_cache: RowCache,
    selected: SelectedRows,
    group: Int[Array, ""],
    hits: Int[Array, "sequences selected"],
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

    Args:
        row_cache: the row cache.
        selected: the selections.
        group: the index group.
        hits: entry that holds each selected row, one too many where none does.
        first: the misses, each row once.
        interpret: parameters of the interpreter.

    Returns:
        Entries to replace, and which of the selected rows replaces each, both ascending, as many
        as are staged; then how many misses there are and how many are staged; then the means.
    """
    num_sequences, num_entries = selected.scores.shape
    num_selected = first.shape[1]
    pieces = pl.cdiv(num_selected, LARGEST_BLOCK)
    piece = -(-num_selected // (pieces * GRANULE)) * GRANULE
    missing = [(0, 0), (0, pieces * piece - num_selected)]
    hits = jnp.pad(hits, missing, constant_values=num_entries)
    first = jnp.pad(first.astype(jnp.int32), missing)
    mean = jax.new_ref(row_cache.mean)
    replaced, replacements, misses, staged = plgpu.kernel(
        functools.partial(_block, pieces=pieces, piece=piece, interpreted=interpret is not None),
        out_type=[
            jax.ShapeDtypeStruct((num_sequences, num_entries), jnp.int32),
            # A piece is written from where the one before it ends, whole.
            jax.ShapeDtypeStruct((num_sequences, num_entries + piece), jnp.int32),
            jax.ShapeDtypeStruct((num_sequences,), jnp.int32),
            jax.ShapeDtypeStruct((num_sequences,), jnp.int32),
        ],
        grid=(num_sequences, 2),
        grid_names=("sequence", "list"),
        scratch_types=[
            plgpu.SMEM((block_selection.buffer_size(max(piece, num_entries)),), jnp.int32)
        ],
        kernel_name="resolve_rows",
        interpret=interpret,
    )(
        row_cache.row,
        mean,
        row_cache.page,
        selected.slots,
        group[None],
        selected.scores,
        hits,
        first,
    )
    listed = min(num_selected, num_entries)
    lists = replaced[:, :listed], replacements[:, :listed]
    return *lists, misses, staged, jax.freeze(mean)


def _block(
    row_ref: Ref,
    mean_ref: Ref,
    page_ref: Ref,
    slots_ref: Ref,
    group_ref: Ref,
    scores_ref: Ref,
    hits_ref: Ref,
    first_ref: Ref,
    replaced_ref: Ref,
    replacements_ref: Ref,
    misses_ref: Ref,
    staged_ref: Ref,
    buffer: Ref,
    *,
    pieces: int,
    piece: int,
    interpreted: bool,
) -> None:
    """The kernel: one list of one sequence, on one warpgroup. References are those of `_plan`;
    the lists of a sequence without a lease are not written."""
    sequence = lax.axis_index("sequence")
    num_entries = scores_ref.shape[1]
    slot = jnp.maximum(slots_ref[sequence], 0)
    leased = (slots_ref[sequence] >= 0) & (page_ref[slot, 0] >= 0)

    def missed(number: Array | int) -> Array:
        return block_selection.load(first_ref.at[sequence], number * piece, piece) != 0

    def list_used() -> Array:
        """Whether the row of each entry is selected."""
        buffer[pl.ds(0, num_entries)] = block_selection.filled(num_entries, 0)
        for number in range(pieces):
            hits = block_selection.load(hits_ref.at[sequence], number * piece, piece)
            scatter(buffer, hits, block_selection.filled(piece, 1), interpreted=interpreted)
        return block_selection.load(buffer, 0, num_entries) != 0

    def list_replaced() -> None:
        used = list_used()
        misses = sum(block_selection.count(missed(number)) for number in range(pieces))
        group_mean = mean_ref.at[slot, group_ref[0]]

        # Nothing counts in a sequence that selects no host row.
        @pl.when((misses > 0) | (block_selection.count(used) > 0))
        def _() -> None:
            mean = block_selection.load(group_mean, 0, num_entries)
            scores = block_selection.load(scores_ref.at[sequence], 0, num_entries)
            group_mean[...] = jnp.where(mean != mean, scores, (mean + scores) * 0.5)

        mean = block_selection.load(group_mean, 0, num_entries)
        held = block_selection.load(row_ref.at[slot, group_ref[0]], 0, num_entries)
        # Complemented, the order of the values is the other way round.
        keys = ~block_selection.ordered_bits(jnp.where(held >= 0, mean, -jnp.inf))
        keys = jnp.where(used, block_selection.NEVER, keys)
        staged = jnp.minimum(misses, block_selection.count(keys > block_selection.NEVER))
        misses_ref[sequence], staged_ref[sequence] = misses, staged

        @pl.when(staged > 0)
        def _() -> None:
            order = block_selection.indices(num_entries)
            replaced = block_selection.choose(keys, staged, order, num_entries)
            mean = block_selection.load(group_mean, 0, num_entries)
            group_mean[...] = jnp.where(replaced, jnp.nan, mean)
            block_selection.compact(replaced, buffer, interpreted=interpreted)
            replaced_ref[sequence] = block_selection.load(buffer, 0, num_entries)

    def list_misses() -> None:
        def run(number: Array, before: Array) -> Array:
            listed = missed(number)
            after = before + block_selection.count(listed)

            # No more are replaced than the entries.
            @pl.when((before < num_entries) & (after > before))
            def _() -> None:
                block_selection.compact(listed, buffer, interpreted=interpreted)
                rows = number * piece + block_selection.load(buffer, 0, piece)
                replacements_ref[sequence, pl.ds(before, piece)] = rows

            return after

        lax.fori_loop(0, pieces, run, jnp.int32(0))

    is_replaced = lax.axis_index("list") == 0
    pl.when(leased & is_replaced)(list_replaced)
    pl.when(leased & ~is_replaced)(list_misses)

    @pl.when(~leased & is_replaced)
    def _() -> None:
        misses_ref[sequence], staged_ref[sequence] = jnp.int32(0), jnp.int32(0)
