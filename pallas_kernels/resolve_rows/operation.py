"""Public function that resolves rows."""

import functools

from pallas_kernels.common.implementation import Implementation, run
from pallas_kernels.common.types import Scalar
from pallas_kernels.resolve_rows import mosaic_gpu, reference
from pallas_kernels.resolve_rows.reference import Resolution
from pallas_kernels.resolve_rows.row_cache import RowCache, SelectedRows


def resolve_rows(
    row_cache: RowCache,
    selected: SelectedRows,
    index_group: Scalar,
    first_host_row: int,
    rows_per_page: int,
    *,
    implementation: Implementation | None = None,
) -> Resolution:
    """Resolves the selections of all query rows of each sequence together.

    A host row selected by several rows of a sequence is staged once. Of the entries whose rows none
    selects those give way whose index scores have the lowest running mean, in their order where it
    is equal; empty ones first. Where they do not suffice, the rest stay in host memory, to be read
    in place. A sequence that selects no host row keeps its means as they are.

    Args:
        row_cache: the row cache of all slots.
        selected: the selections.
        index_group: the index group that selected.
        first_host_row: id of the first host row.
        rows_per_page: rows of a page on this device.
        implementation: None takes the kernel on a GPU where it supports the shapes.

    Raises:
        ValueError: the kernel is asked for, and does not support the shapes.
    """
    sizes = {"first_host_row": first_host_row, "rows_per_page": rows_per_page}
    return run(
        implementation,
        functools.partial(reference.resolve_rows, **sizes),
        functools.partial(mosaic_gpu.resolve_rows, **sizes),
        mosaic_gpu.unsupported(row_cache.row.shape[2]),
        row_cache,
        selected,
        index_group,
    )
