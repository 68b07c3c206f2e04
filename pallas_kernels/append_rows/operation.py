"""Public function that appends rows."""

import functools

from jaxtyping import Array, Float, Int

from pallas_kernels.append_rows import mosaic_gpu, reference
from pallas_kernels.common.implementation import Implementation, run
from pallas_kernels.common.row_format import RowFormat
from pallas_kernels.common.types import Scalar, Slab


def append_rows(
    slab: Slab,
    layer: Scalar,
    latent: Float[Array, "tokens latent"],
    rope: Float[Array, "tokens rope"],
    pages: Int[Array, " tokens"],
    rows: Int[Array, " tokens"],
    row_format: RowFormat,
    *,
    implementation: Implementation | None = None,
) -> Slab:
    """Writes rows of one layer, MLA rows or index keys, in their row format.

    Args:
        slab: stored rows.
        layer: layer to write.
        latent: what fp8 quantises.
        rope: what fp8 does not quantise; 0 wide for index keys.
        pages: page of `slab` that each row is written to; -1 drops the row.
        rows: row of the page; no two rows that are written have both in common.
        row_format: format of a stored row.
        implementation: None takes the kernel on a GPU where it supports the shapes.

    Raises:
        ValueError: the kernel is asked for, and does not support the shapes.
    """
    return run(
        implementation,
        functools.partial(reference.append_rows, row_format=row_format),
        functools.partial(mosaic_gpu.append_rows, row_format=row_format),
        mosaic_gpu.unsupported(row_format),
        slab,
        layer,
        latent,
        rope,
        pages,
        rows,
    )
