"""Public functions that move pages.

Lists have a fixed size; an entry with negative pages is padding, lies after the others and moves
nothing. No move of a list reads or writes what another one writes.
"""

from pallas_kernels.common.implementation import Implementation, run
from pallas_kernels.common.ring_copy import unsupported_rows
from pallas_kernels.common.types import HostSlab, Slab
from pallas_kernels.move_pages import mosaic_gpu, reference
from pallas_kernels.move_pages.reference import Moves


def offload_pages(
    slab: Slab, host: HostSlab, moves: Moves, *, implementation: Implementation | None = None
) -> HostSlab:
    """Copies pages (device page, host page) to host memory, whose layers lie side by side.

    Args:
        slab: rows on the device.
        host: rows in host memory.
        moves: pages to copy.
        implementation: None takes the kernel on a GPU where it supports the shapes.

    Raises:
        ValueError: the kernel is asked for, and does not support the shapes.
    """
    unsupported = unsupported_rows(slab)
    arrays = (slab, host, moves)
    return run(
        implementation, reference.offload_pages, mosaic_gpu.offload_pages, unsupported, *arrays
    )


def onload_pages(
    slab: Slab, host: HostSlab, moves: Moves, *, implementation: Implementation | None = None
) -> Slab:
    """Copies pages (host page, device page) to the device; arguments as for `offload_pages`."""
    unsupported = unsupported_rows(slab)
    arrays = (slab, host, moves)
    return run(
        implementation, reference.onload_pages, mosaic_gpu.onload_pages, unsupported, *arrays
    )


def copy_pages(slab: Slab, moves: Moves, *, implementation: Implementation | None = None) -> Slab:
    """Copies pages (from, to) of axis 1, for rows or for index keys; see `offload_pages`."""
    unsupported = mosaic_gpu.unsupported_copy(slab)
    return run(
        implementation, reference.copy_pages, mosaic_gpu.copy_pages, unsupported, slab, moves
    )
