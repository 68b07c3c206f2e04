"""Public functions that stage. Entries beyond the counts, which are on the device, are free."""

from jaxtyping import Array, Int

from pallas_kernels.common.implementation import Implementation, run
from pallas_kernels.common.ring_copy import unsupported_rows
from pallas_kernels.common.types import HostSlab, Scalar, Slab
from pallas_kernels.stage_rows import mosaic_gpu, reference


def stage_rows(
    slab: Slab,
    host: HostSlab,
    first_layer: Scalar,
    num_layers: Scalar,
    host_rows: Int[Array, " misses"],
    device_rows: Int[Array, " misses"],
    count: Int[Array, ""],
    *,
    implementation: Implementation | None = None,
) -> Slab:
    """Copies rows of host memory into the slab, for all layers of an index group.

    Args:
        slab: rows on the device.
        host: rows in host memory, a row's layers side by side.
        first_layer: first layer of the group.
        num_layers: layers of the group.
        host_rows: rows to read, counted over pages.
        device_rows: rows of a layer to write, counted over its pages; no two are the same.
        count: how many of the lists are valid.
        implementation: None takes the kernel on a GPU where it supports the shapes.

    Raises:
        ValueError: the kernel is asked for, and does not support the shapes.
    """
    arrays = (slab, host, first_layer, num_layers, host_rows, device_rows, count)
    unsupported = unsupported_rows(slab)
    return run(implementation, reference.stage_rows, mosaic_gpu.stage_rows, unsupported, *arrays)


def stage_pages(
    slab: Slab,
    host: HostSlab,
    layer: Scalar,
    host_pages: Int[Array, " pages"],
    targets: Int[Array, " pages"],
    count: Int[Array, ""],
    *,
    implementation: Implementation | None = None,
) -> Slab:
    """Copies one layer of host pages into the slab.

    Args:
        slab: rows on the device.
        host: rows in host memory.
        layer: the layer to read.
        host_pages: pages to read.
        targets: pages to write, counted over all layers from this layer on, round the end;
            no two are the same.
        count: how many of the lists are valid.
        implementation: None takes the kernel on a GPU where it supports the shapes.

    Raises:
        ValueError: the kernel is asked for, and does not support the shapes.
    """
    arrays = (slab, host, layer, host_pages, targets, count)
    unsupported = unsupported_rows(slab)
    return run(implementation, reference.stage_pages, mosaic_gpu.stage_pages, unsupported, *arrays)
