"""Which implementation resolves."""

import functools

from jaxtyping import Array, Float, Int

from pallas_kernels.common.implementation import Implementation, run
from pallas_kernels.resolve_rows import mosaic_gpu, reference
from pallas_kernels.resolve_rows.reference import Resolution


def resolve_rows(
    hot_row: Int[Array, "slots groups hot"],
    hot_mean: Float[Array, "slots groups hot"],
    hot_slot: Int[Array, "slots context"],
    hot_page: Int[Array, "slots hot_pages"],
    slots: Int[Array, " sequences"],
    group: int | Int[Array, ""],
    rows: Int[Array, "sequences rows k"],
    located: Int[Array, "sequences rows k"],
    hot_scores: Float[Array, "sequences hot"],
    first_host_row: int,
    rows_per_page: int,
    *,
    implementation: Implementation | None = None,
) -> Resolution:
    """Resolves the selections of all query rows of each sequence together.

    A host row selected by several rows of a sequence is staged once. Of the hot rows that no row
    selects those give way whose index scores have the lowest running mean, in the order of their
    slots where it is equal; empty ones first. Where they do not suffice, the rest stay in host
    memory, to be read in place.

    Args:
        hot_row: row of the sequence on this device that each hot row holds, -1 none.
        hot_mean: running mean of its index scores, each step counting as much as all before it;
            NaN before the first.
        hot_slot: int16, by row of the sequence: the hot row that may hold it.
        hot_page: device pages of each slot's hot rows, -1 where it has none.
        slots: slot of each sequence, -1 for padding; no slot twice.
        group: index group.
        rows: selected rows of the sequence on this device, each at most once a query row; those of
            entries that lie nowhere are not read.
        located: where they lie; ids from `first_host_row` on are host rows, -1 is nowhere.
        hot_scores: this step's index score of what each hot row holds, the best of the query rows.
        first_host_row: id of the first host row.
        rows_per_page: rows of a page on this device.
        implementation: None takes the kernel on a GPU where it supports the shapes.

    Raises:
        ValueError: the kernel is asked for, and does not support the shapes.
    """
    sizes = {"first_host_row": first_host_row, "rows_per_page": rows_per_page}
    state = (hot_row, hot_mean, hot_slot, hot_page)
    return run(
        implementation,
        functools.partial(reference.resolve_rows, **sizes),
        functools.partial(mosaic_gpu.resolve_rows, **sizes),
        mosaic_gpu.unsupported(hot_row.shape[2]),
        *state,
        slots,
        group,
        rows,
        located,
        hot_scores,
    )
