"""Public function that fetches rows. Entries beyond the count, which is on the device, are free."""

from jaxtyping import Array, Int

from pallas_kernels.common.implementation import Implementation, run
from pallas_kernels.common.ring_copy import unsupported_rows
from pallas_kernels.common.types import HostSlab, Scalar
from pallas_kernels.fetch_rows import mosaic_gpu, reference
from pallas_kernels.fetch_rows.reference import Rows


def fetch_rows(
    rows: Rows,
    host: HostSlab,
    layer: Scalar,
    host_rows: Int[Array, " listed"],
    targets: Int[Array, " listed"],
    count: Int[Array, ""],
    *,
    implementation: Implementation | None = None,
) -> Rows:
    """Copies rows of one layer of host memory to rows of a buffer.

    Args:
        rows: the buffer; what is not a target stays as it is.
        host: rows in host memory.
        layer: the layer to read.
        host_rows: rows to read, counted over pages.
        targets: rows of the buffer to write; no two are the same.
        count: how many of the lists are valid.
        implementation: None takes the kernel on a GPU where it supports the shapes.

    Raises:
        ValueError: the kernel is asked for, and does not support the shapes.
    """
    arrays = (rows, host, layer, host_rows, targets, count)
    unsupported = unsupported_rows(host)
    return run(implementation, reference.fetch_rows, mosaic_gpu.fetch_rows, unsupported, *arrays)
