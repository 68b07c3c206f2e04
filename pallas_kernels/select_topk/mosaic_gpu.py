"""Selection as a tournament of blocks, each exact, until one block a row is left.

A block holds up to 8,192 scores of a row in registers, finds the threshold of its own best k by
counting, and lists them in the order they are in. The next round selects from its lists. So scores
are read from memory once, no block waits for another, and a row of 128K scores takes three rounds.

After the first round a row's candidates are in lists [lists, rows, width], one from each block.

`merge_topk` needs no order but that of a shard's own list: it finds the threshold of all shards'
lists, by counts alone, and keeps what of the shard's list is above it.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.common import block_selection
from pallas_kernels.common.scatter import scatter
from pallas_kernels.common.types import Interpret, Ref, Scalar

LARGEST_MERGE = 16384
"""Most candidates that are merged: 128 registers a thread."""

_LAST = jnp.iinfo(jnp.int32).max


def unsupported(num_candidates: int, k: int) -> str | None:
    """Why the kernel cannot select k of so many candidates a row, None if it can."""
    largest = block_selection.LARGEST_BLOCK
    if num_candidates == 0:
        return "there is nothing to select from"
    if num_candidates > largest and k > largest // 2:
        # A round must at least halve what is left.
        return f"k={k} is above {largest // 2}, the most of more than {largest} candidates a row"
    return None


def select_topk(
    scores: Float[Array, "rows context"],
    positions: Int[Array, " context"],
    last: Int[Array, " rows"],
    *,
    first: int,
    k: int,
    ordered: bool,
    interpret: Interpret,
) -> tuple[Float[Array, "rows k"], Int[Array, "rows k"]]:
    """`operation.select_topk`; if not `ordered`, positions ascend."""
    kept = min(k, scores.shape[1])
    lists = _best_of_blocks(
        scores[None], positions, kept, bounds=(first, last), interpret=interpret
    )
    while lists[0].shape[0] > 1:
        lists = _best_of_blocks(*lists, kept, interpret=interpret)
    scores, positions = (each[0, :, :kept] for each in lists)
    if ordered:
        scores, positions = lax.sort((-scores, positions), num_keys=2)
        scores = jnp.where(scores == 0, 0.0, -scores)
    missing = [(0, 0), (0, k - kept)]
    return (
        jnp.pad(scores, missing, constant_values=-jnp.inf),
        jnp.pad(positions, missing, constant_values=-1),
    )


def unsupported_merge(num_shards: int, k: int) -> str | None:
    """Why the kernel cannot merge so many lists of k, None if it can."""
    if num_shards > 1 and num_shards * _padded(k) > LARGEST_MERGE:
        return f"{num_shards} lists of k={k} are more than {LARGEST_MERGE} candidates"
    return None


def merge_topk(
    scores: Float[Array, "shards rows k"],
    positions: Int[Array, "shards rows k"],
    shard: Int[Array, ""],
    *,
    interpret: Interpret,
) -> Int[Array, "rows k"]:
    """`operation.merge_topk`: one block a row, which has the keys of all shards in registers."""
    num_shards, num_rows, k = scores.shape
    if num_shards == 1:
        return positions[0]
    width = _padded(k)
    if width > k:
        missing = [(0, 0), (0, 0), (0, width - k)]
        scores = jnp.pad(scores, missing, constant_values=-jnp.inf)
        positions = jnp.pad(positions, missing, constant_values=-1)
    merged = plgpu.kernel(
        functools.partial(_merge_row, k=k, interpreted=interpret is not None),
        out_type=jax.ShapeDtypeStruct((num_rows, width), jnp.int32),
        grid=(num_rows,),
        grid_names=("row",),
        scratch_types=[plgpu.SMEM((block_selection.buffer_size(width),), jnp.int32)],
        kernel_name="merge_topk",
        interpret=interpret,
    )(scores, positions, jnp.asarray(shard, jnp.int32).reshape(1))
    return merged[:, :k]


def _padded(k: int) -> int:
    return -(-k // block_selection.GRANULE) * block_selection.GRANULE


def _merge_row(
    scores_ref: Ref,
    positions_ref: Ref,
    shard_ref: Ref,
    merged_ref: Ref,
    buffer: Ref,
    *,
    k: int,
    interpreted: bool,
) -> None:
    """The kernel: one row on one warpgroup. References are those of `merge_topk`, and a buffer."""
    row, shard = lax.axis_index("row"), shard_ref[0]
    num_shards, _, width = scores_ref.shape

    def keys_of(number: Scalar) -> jax.Array:
        scores = block_selection.load(scores_ref.at[number, row], 0, width)
        return _keys(scores, scores > -jnp.inf)

    keys = [keys_of(number) for number in range(num_shards)]

    def total(marked: Callable[[int], jax.Array]) -> jax.Array:
        """Number of all shards' candidates that are marked, given those of a shard."""
        return jnp.sum(sum(marked(number).astype(jnp.int32) for number in range(num_shards)))

    def positions_of(number: Scalar) -> jax.Array:
        return block_selection.load(positions_ref.at[number, row], 0, width)

    lowest = [
        jnp.min(jnp.where(each > block_selection.NEVER, each, jnp.iinfo(jnp.int32).max))
        for each in keys
    ]
    found = total(lambda number: keys[number] > block_selection.NEVER)
    wanted = jnp.minimum(found, k)
    threshold, found = block_selection.bisect(
        lambda key: total(lambda number: keys[number] >= key),
        wanted,
        functools.reduce(jnp.minimum, lowest),
        functools.reduce(jnp.maximum, map(jnp.max, keys)) + 1,
        found,
    )
    room = wanted - total(lambda number: keys[number] > threshold)
    # Positions are read again in each turn, of which there are none but where scores are equal.
    bound, _ = block_selection.bisect(
        lambda bound: total(
            lambda number: (keys[number] == threshold) & (positions_of(number) < -bound)
        ),
        room,
        jnp.int32(-_LAST),
        jnp.int32(0),
        found - wanted + room,
    )
    own, positions = keys_of(shard), positions_of(shard)
    chosen = (own > threshold) | ((own == threshold) & (positions < -bound))
    rank = block_selection.ranks(chosen, buffer)
    scatter(buffer, rank, positions, interpreted=interpreted)
    best = block_selection.load(buffer, 0, width)
    merged_ref[row] = jnp.where(
        block_selection.indices(width) < block_selection.count(chosen), best, -1
    )


def _keys(scores: jax.Array, allowed: jax.Array) -> jax.Array:
    """Integers in the order of the scores; NEVER where not allowed."""
    # Scores of 0 are equal, whatever their sign.
    values = block_selection.ordered_bits(jnp.where(scores == 0, 0.0, scores))
    return jnp.where(allowed, values, block_selection.NEVER)


def _best_of_blocks(
    scores: Float[Array, "lists rows width"],
    positions: Int[Array, "*lists_rows width"],
    k: int,
    *,
    bounds: tuple[int, Int[Array, " rows"]] | None = None,
    interpret: Interpret,
) -> tuple[Float[Array, "blocks rows kept"], Int[Array, "blocks rows kept"]]:
    """One round: the best k of each block of a row, in their order, then -inf and -1; of equal
    scores the first.

    A row's candidates are in several lists, which are numbered through. A block is a part of the
    one list that there is, or some of several lists.

    Args:
        scores: scores of the candidates; -inf is never chosen. Several lists are of a multiple of
            GRANULE each, and two of them fit into a block.
        positions: their positions; given bounds, those of the one list of every row, ascending.
        k: how many are wanted.
        bounds: the first position to choose, and the last, by row.
        interpret: parameters of the interpreter.
    """
    num_lists, num_rows, width = scores.shape
    size = min(num_lists * width, block_selection.LARGEST_BLOCK)
    if num_lists > 1:
        size -= size % width
    elif missing := -size % block_selection.GRANULE:
        # A row of less than a block.
        scores = jnp.pad(scores, [(0, 0), (0, 0), (0, missing)], constant_values=-jnp.inf)
        widths = [(0, 0)] * (positions.ndim - 1) + [(0, missing)]
        positions = jnp.pad(positions, widths, constant_values=_LAST)
        size += missing
    lists = (pl.cdiv(num_lists * width, size), num_rows, _padded(k))
    first, *last = (None,) if bounds is None else bounds
    best, chosen = plgpu.kernel(
        functools.partial(_block, size=size, k=k, first=first, interpreted=interpret is not None),
        out_type=[jax.ShapeDtypeStruct(lists, dtype) for dtype in (jnp.float32, jnp.int32)],
        grid=(num_rows, lists[0]),
        grid_names=("row", "block"),
        scratch_types=[plgpu.SMEM((block_selection.buffer_size(size),), jnp.int32)],
        kernel_name="select_topk",
        interpret=interpret,
    )(scores, positions, *last)
    return best, chosen


def _block(
    scores_ref: Ref,
    positions_ref: Ref,
    *references: Ref,
    size: int,
    k: int,
    first: int | None,
    interpreted: bool,
) -> None:
    """The kernel: one block of one row on one warpgroup.

    References are those of `_best_of_blocks`, in its order: scores, positions, given bounds the
    last positions, then scores and positions to write, and the buffer.
    """
    *last, best_ref, chosen_ref, buffer = references
    row, block = lax.axis_index("row"), lax.axis_index("block")
    num_lists, _, width = scores_ref.shape
    kept = best_ref.shape[-1]
    # The last block begins early enough to be full, and leaves out what the one before it has.
    begin = block * size
    start = jnp.minimum(begin, num_lists * width - size)

    def candidates(reference: Ref) -> jax.Array:
        """Part of a row of all lists that the block has."""
        if num_lists == 1:
            return block_selection.load(reference.at[0, row], start, size)
        first_list = lax.div(start, width)
        for number in range(size // width):
            part = block_selection.load(reference.at[first_list + number, row], 0, width)
            part = lax.bitcast_convert_type(part, jnp.int32)
            buffer[pl.ds(number * width, width)] = part
        joined = block_selection.load(buffer, 0, size)
        return lax.bitcast_convert_type(joined, reference.dtype)

    def positions() -> jax.Array:
        if first is None:
            return candidates(positions_ref)
        return block_selection.load(positions_ref, start, size)

    def keys() -> jax.Array:
        scores = candidates(scores_ref)
        allowed = (scores > -jnp.inf) & (block_selection.indices(size) >= begin - start)
        if first is not None:
            here = positions()
            allowed &= (here >= first) & (here <= last[0][row])
        return _keys(scores, allowed)

    def run() -> None:
        values = keys()
        wanted = jnp.minimum(block_selection.count(values > block_selection.NEVER), k)

        @pl.when(wanted > 0)
        def _() -> None:
            chosen = block_selection.choose(values, wanted, block_selection.indices(size), size)
            rank = block_selection.ranks(chosen, buffer)
            is_found = block_selection.indices(kept) < wanted

            def close_up(values: jax.Array) -> jax.Array:
                scatter(buffer, rank, values, interpreted=interpreted)
                return block_selection.load(buffer, 0, kept)

            best = block_selection.values_of_bits(close_up(values))
            best_ref[block, row] = jnp.where(is_found, best, -jnp.inf)
            chosen_ref[block, row] = jnp.where(is_found, close_up(positions()), -1)

        pl.when(wanted == 0)(nothing)

    def nothing() -> None:
        none = block_selection.filled(kept, -1)
        best_ref[block, row] = jnp.where(none < 0, -jnp.inf, 0.0)
        chosen_ref[block, row] = none

    if first is None:
        run()
    else:
        reached = positions_ref[start] <= last[0][row]
        pl.when(reached)(run)
        pl.when(~reached)(nothing)
