"""Selection as a tournament of blocks, each exact, until one block a row is left.

A block holds up to 8,192 scores of a row in registers, finds the threshold of its own best k by
counting, and lists their indices in ascending order. XLA gathers what they name, and the next round
selects from it. So scores are read from memory once, no block waits for another, and a row of 128K
scores takes three rounds.

After the first round a row's candidates are in lists [lists, rows, width], one from each block. The
devices of a mesh are one round more: `merge_topk` selects from the lists of all of them, as
`all_gather` leaves them. In its place their common threshold could be had with counts alone:
`block_selection.bisect` asks for a count from a bound on, which may be a sum over blocks and a
`psum` over devices.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int, Shaped

from pallas_kernels.common import block_selection
from pallas_kernels.common.types import Interpret

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
    scores, positions = _finish(*best, kept, by_position=False, interpret=interpret)
    scores = jnp.where(scores == 0, 0.0, scores)
    if ordered:
        scores, positions = lax.sort((-scores, positions), num_keys=2)
        scores = jnp.where(scores == 0, 0.0, -scores)
    missing = [(0, 0), (0, k - kept)]
    return (
        jnp.pad(scores, missing, constant_values=-jnp.inf),
        jnp.pad(positions, missing, constant_values=-1),
    )


def merge_topk(
    scores: Float[Array, "shards rows k"],
    positions: Int[Array, "shards rows k"],
    *,
    interpret: Interpret,
) -> Int[Array, "rows k"]:
    """`operation.merge_topk`."""
    num_shards, _, k = scores.shape
    if num_shards == 1:
        best = positions[0]
    else:
        missing = [(0, 0), (0, 0), (0, -k % block_selection.GRANULE)]
        scores = jnp.pad(scores, missing, constant_values=-jnp.inf)
        positions = jnp.pad(positions, missing, constant_values=-1)
        _, best = _finish(scores, positions, k, by_position=True, interpret=interpret)
    ordered = jnp.sort(jnp.where(best < 0, _LAST, best), axis=-1)
    return jnp.where(ordered == _LAST, -1, ordered)


def _finish(
    scores: Float[Array, "lists rows width"],
    positions: Int[Array, "lists rows width"],
    k: int,
    *,
    by_position: bool,
    interpret: Interpret,
) -> tuple[Float[Array, "rows k"], Int[Array, "rows k"]]:
    """The best k of each row, by rounds, in the order they are in; of equal scores those of the
    lowest positions, or the first. Where there are fewer, -inf and -1."""
    while scores.shape[0] > 1:
        order = positions if by_position else None
        index = _best_of_blocks(scores, k, order=order, interpret=interpret)
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
    order: Int[Array, "lists rows width"] | None = None,
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
        order: what breaks ties, distinct and not negative where a score is above -inf; by default
            the index.
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
    kept = -(-k // block_selection.GRANULE) * block_selection.GRANULE
    optional = [*(bounds or ()), *(() if order is None else (order,))]
    return plgpu.kernel(
        functools.partial(
            _block,
            size=size,
            k=k,
            first=None if bounds is None else first,
            by_order=order is not None,
        ),
        out_type=jax.ShapeDtypeStruct((num_blocks, num_rows, kept), jnp.int32),
        grid=(num_rows, num_blocks),
        grid_names=("row", "block"),
        scratch_types=[plgpu.SMEM((block_selection.buffer_size(size),), jnp.int32)],
        kernel_name="select_topk",
        interpret=interpret,
    )(scores, *optional)


def _block(
    scores_ref: Any,
    *references: Any,
    size: int,
    k: int,
    first: int | None,
    by_order: bool,
) -> None:
    """The kernel: one block of one row on one warpgroup.

    References are those of `_best_of_blocks`, in its order: scores, bounds, order, then the indices
    to write, and the buffer.
    """
    *optional, index_ref, buffer = references
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
            positions = block_selection.load(optional[0], start, size)
            allowed &= (positions >= first) & (positions <= optional[1][row])
        # Scores of 0 are equal, whatever their sign.
        values = block_selection.ordered_bits(jnp.where(scores == 0, 0.0, scores))
        return jnp.where(allowed, values, block_selection.NEVER), index

    def run() -> None:
        values, index = keys()
        wanted = jnp.minimum(block_selection.count(values > block_selection.NEVER), k)

        @pl.when(wanted > 0)
        def _() -> None:
            order, limit = index, size
            if by_order:
                order, limit = candidates(optional[-1]), _LAST
            chosen = block_selection.choose(values, wanted, order, limit)
            block_selection.compact(chosen, buffer)
            found = start + block_selection.load(buffer, 0, kept)
            index_ref[block, row] = jnp.where(block_selection.indices(kept) < wanted, found, -1)

        pl.when(wanted == 0)(nothing)

    def nothing() -> None:
        index_ref[block, row] = block_selection.filled(kept, -1)

    if first is None:
        run()
    else:
        reached = optional[0][start] <= optional[1][row]
        pl.when(reached)(run)
        pl.when(~reached)(nothing)
