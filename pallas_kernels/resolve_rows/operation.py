"""Public function that resolves rows."""

import functools

from jaxtyping import Array, Float, Int

from pallas_kernels.common.implementation import Implementation, run
from pallas_kernels.resolve_rows import mosaic_gpu, reference
from pallas_kernels.resolve_rows.reference import Resolution


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
    *,
    implementation: Implementation | None = None,
) -> Resolution:
    """Resolves the selections of all query rows of each sequence together.

    A host row selected by several rows of a sequence is staged once. Of the row-cache rows that no
    row selects those give way whose index scores have the lowest running mean, in the order of
    their slots where it is equal; empty ones first. Where they do not suffice, the rest stay in
    host memory, to be read in place.

    Args:
        row_cache_row: row of the sequence on this device that each row-cache row holds, -1 none.
        row_cache_mean: running mean of its index scores, each step counting as much as all before
            it; NaN before the first.
        row_cache_entry: int16, by row of the sequence: the row-cache row that may hold it.
        row_cache_page: device pages of each slot's row-cache rows, -1 where it has none.
        slots: slot of each sequence, -1 for padding; no slot twice.
        group: index group.
        rows: selected rows of the sequence on this device, each at most once a query row; those of
            entries that lie nowhere are not read.
        located: where they lie; ids from `first_host_row` on are host rows, -1 is nowhere.
        row_cache_scores: this step's index score of what each row-cache row holds, the best of the
            query rows.
        first_host_row: id of the first host row.
        rows_per_page: rows of a page on this device.
        implementation: None takes the kernel on a GPU where it supports the shapes.

    Raises:
        ValueError: the kernel is asked for, and does not support the shapes.
    """
    sizes = {"first_host_row": first_host_row, "rows_per_page": rows_per_page}
    state = (row_cache_row, row_cache_mean, row_cache_entry, row_cache_page)
    return run(
        implementation,
        functools.partial(reference.resolve_rows, **sizes),
        functools.partial(mosaic_gpu.resolve_rows, **sizes),
        mosaic_gpu.unsupported(row_cache_row.shape[2]),
        *state,
        slots,
        group,
        rows,
        located,
        row_cache_scores,
    )
