"""Selection as a tournament of blocks, each exact, until one block a row is left.

A block holds up to 8,192 scores of a row in registers, finds the threshold of its own best k by
counting, and lists their indices in ascending order. XLA gathers what they name, and the next round
selects from it. So scores are read from memory once, no block waits for another, and a row of 128K
scores takes three rounds.

After the first round a row's candidates are in lists [lists, rows, width], one from each block.

`merge_topk` needs no order but that of a shard's own list: it finds the threshold of all shards'
lists, by counts alone, and keeps what of the shard's list is above it.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int, Shaped

from pallas_kernels.common import block_selection
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
    index = _best_of_blocks(
        scores[None], kept, bounds=(positions, last), first=first, interpret=interpret
    )
    best = _take(scores[None], index), jnp.where(index < 0, -1, positions[jnp.maximum(index, 0)])
    scores, positions = _finish(*best, kept, interpret=interpret)
    scores = jnp.where(scores == 0, 0.0, scores)
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
        functools.partial(_merge_row, k=k),
        out_type=jax.ShapeDtypeStruct((num_rows, width), jnp.int32),
        grid=(num_rows,),
        grid_names=("row",),
        scratch_types=[plgpu.SMEM((block_selection.buffer_size(width),), jnp.int32)] * 2,
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
    distances: Ref,
    buffer: Ref,
    *,
    k: int,
) -> None:
    """The kernel: one row on one warpgroup. References are those of `merge_topk`, and buffers."""
    row, shard = lax.axis_index("row"), shard_ref[0]
    num_shards, _, width = scores_ref.shape

    def keys_of(number: Scalar) -> jax.Array:
        scores = block_selection.load(scores_ref.at[number, row], 0, width)
        return _keys(scores, scores > -jnp.inf)

    keys = [keys_of(number) for number in range(num_shards)]

    def total(marked: Callable[[int], jax.Array]) -> jax.Array:
        """How many of all shards' candidates are marked; takes a shard's number."""
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
    block_selection.close_up(chosen, positions, distances, buffer)
    best = block_selection.load(buffer, 0, width)
    merged_ref[row] = jnp.where(
        block_selection.indices(width) < block_selection.count(chosen), best, -1
    )


def _keys(scores: jax.Array, allowed: jax.Array) -> jax.Array:
    """Integers in the order of the scores; NEVER where not allowed."""
    # Scores of 0 are equal, whatever their sign.
    values = block_selection.ordered_bits(jnp.where(scores == 0, 0.0, scores))
    return jnp.where(allowed, values, block_selection.NEVER)


def _finish(
    scores: Float[Array, "lists rows width"],
    positions: Int[Array, "lists rows width"],
    k: int,
    *,
    interpret: Interpret,
) -> tuple[Float[Array, "rows k"], Int[Array, "rows k"]]:
    """The best k of each row, by rounds, in the order they are in; of equal scores the first. Where
    there are fewer, -inf and -1."""
    while scores.shape[0] > 1:
        index = _best_of_blocks(scores, k, interpret=interpret)
        scores, positions = _take(scores, index), _take(positions, index)
    return scores[0, :, :k], positions[0, :, :k]


def _take(
    values: Shaped[Array, "lists rows width"], index: Int[Array, "blocks rows kept"]
) -> Shaped[Array, "blocks rows kept"]:
    """Entries that indices name in a row of all lists; where they are -1, -inf or -1."""
    _, num_rows, width = values.shape
    named = jnp.maximum(index, 0)
    row = jnp.arange(num_rows, dtype=jnp.int32)[:, None]
    place = (lax.div(named, width) * num_rows + row) * width + lax.rem(named, width)
    found = values.reshape(-1).at[place].get(mode="promise_in_bounds")
    return jnp.where(index < 0, -jnp.inf if values.dtype == jnp.float32 else -1, found)


def _best_of_blocks(
    scores: Float[Array, "lists rows width"],
    k: int,
    *,
    bounds: tuple[Int[Array, " width"], Int[Array, " rows"]] | None = None,
    first: int = 0,
    interpret: Interpret,
) -> Int[Array, "blocks rows kept"]:
    """One round: indices of the best k of each block of a row, ascending, then -1.

    A row's candidates are in several lists, which are numbered through. A block is a part of the
    one list that there is, or some of several lists.

    Args:
        scores: scores of the candidates; -inf is never chosen. Several lists are of a multiple of
            GRANULE each, and two of them fit into a block.
        k: how many are wanted.
        bounds: positions of one list's candidates, ascending, and the last to choose, by row.
        first: first position to choose, given bounds.
        interpret: parameters of the interpreter.
    """
    num_lists, num_rows, width = scores.shape
    size = min(num_lists * width, block_selection.LARGEST_BLOCK)
    if num_lists > 1:
        size -= size % width
    elif missing := -size % block_selection.GRANULE:
        # A row of less than a block.
        scores = jnp.pad(scores, [(0, 0), (0, 0), (0, missing)], constant_values=-jnp.inf)
        if bounds is not None:
            bounds = (jnp.pad(bounds[0], (0, missing), constant_values=_LAST), bounds[1])
        size += missing
    num_blocks = pl.cdiv(num_lists * width, size)
    kept = _padded(k)
    return plgpu.kernel(
        functools.partial(
            _block,
            size=size,
            k=k,
            first=None if bounds is None else first,
        ),
        out_type=jax.ShapeDtypeStruct((num_blocks, num_rows, kept), jnp.int32),
        grid=(num_rows, num_blocks),
        grid_names=("row", "block"),
        scratch_types=[plgpu.SMEM((block_selection.buffer_size(size),), jnp.int32)],
        kernel_name="select_topk",
        interpret=interpret,
    )(scores, *(bounds or ()))


def _block(
    scores_ref: Any,
    *references: Any,
    size: int,
    k: int,
    first: int | None,
) -> None:
    """The kernel: one block of one row on one warpgroup.

    References are those of `_best_of_blocks`, in its order: scores, bounds, then the indices to
    write, and the buffer.
    """
    *bounds, index_ref, buffer = references
    row, block = lax.axis_index("row"), lax.axis_index("block")
    num_lists, _, width = scores_ref.shape
    kept = index_ref.shape[-1]
    # The last block begins early enough to be full, and leaves out what the one before it has.
    begin = block * size
    start = jnp.minimum(begin, num_lists * width - size)

    def candidates(reference: Any) -> jax.Array:
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

    def keys() -> tuple[jax.Array, jax.Array]:
        """Keys, and the index of each in the block."""
        scores = candidates(scores_ref)
        index = block_selection.indices(size)
        allowed = (scores > -jnp.inf) & (index >= begin - start)
        if first is not None:
            positions = block_selection.load(bounds[0], start, size)
            allowed &= (positions >= first) & (positions <= bounds[1][row])
        return _keys(scores, allowed), index

    def run() -> None:
        values, index = keys()
        wanted = jnp.minimum(block_selection.count(values > block_selection.NEVER), k)

        @pl.when(wanted > 0)
        def _() -> None:
            chosen = block_selection.choose(values, wanted, index, size)
            block_selection.compact(chosen, buffer)
            found = start + block_selection.load(buffer, 0, kept)
            index_ref[block, row] = jnp.where(block_selection.indices(kept) < wanted, found, -1)

        pl.when(wanted == 0)(nothing)

    def nothing() -> None:
        index_ref[block, row] = block_selection.filled(kept, -1)

    if first is None:
        run()
    else:
        reached = bounds[0][start] <= bounds[1][row]
        pl.when(reached)(run)
        pl.when(~reached)(nothing)
