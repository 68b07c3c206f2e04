"""Public functions that select positions."""

import functools

from jaxtyping import Array, Float, Int

from pallas_kernels.common.implementation import Implementation, run
from pallas_kernels.select_topk import mosaic_gpu, reference


def select_topk(
    scores: Float[Array, "rows context"],
    positions: Int[Array, " context"],
    first: int,
    last: Int[Array, " rows"],
    k: int,
    ordered: bool = True,
    *,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "rows k"], Int[Array, "rows k"]]:
    """The `k` best of the positions from `first` to `last`, both included.

    Args:
        scores: score of each candidate; no NaN.
        positions: position of each candidate, ascending.
        first: lowest position that may be selected.
        last: highest position that may be selected, by row.
        k: how many.
        ordered: whether the best come first, for which a kernel sorts; otherwise they are in the
            order of their positions.
        implementation: None takes the kernel on a GPU where it supports the shapes.

    Returns:
        Scores in descending order, or that of positions, then -inf; their positions, then -1. -0.0
        is returned as 0.0.

    Raises:
        ValueError: the kernel is asked for, and does not support the shapes.
    """
    return run(
        implementation,
        functools.partial(reference.select_topk, first=first, k=k, ordered=ordered),
        functools.partial(mosaic_gpu.select_topk, first=first, k=k, ordered=ordered),
        mosaic_gpu.unsupported(scores.shape[1], k),
        scores,
        positions,
        last=last,
    )


def merge_topk(
    scores: Float[Array, "shards rows k"],
    positions: Int[Array, "shards rows k"],
    shard: Int[Array, ""],
    *,
    implementation: Implementation | None = None,
) -> Int[Array, "rows k"]:
    """One shard's part of the best k of the selections of several shards of a context.

    Args:
        scores: each shard's best scores, -inf where it has fewer; no NaN.
        positions: their positions, ascending, then -1 where it has fewer; disjoint between shards.
        shard: whose positions are returned.
        implementation: None takes the kernel on a GPU where it supports the shapes.

    Returns:
        The shard's positions that are among the best k of all, ascending, then -1.

    Raises:
        ValueError: the kernel is asked for, and does not support the shapes.
    """
    num_shards, _, k = scores.shape
    return run(
        implementation,
        reference.merge_topk,
        mosaic_gpu.merge_topk,
        mosaic_gpu.unsupported_merge(num_shards, k),
        scores,
        positions,
        shard,
    )
