"""Counts of the rows that steps read, by where they were found."""

import dataclasses

import numpy as np
from jaxtyping import Int64

from pallas_kernels.common.pytree import pytree_dataclass


@pytree_dataclass
class Reads[Count]:
    """Counts of what steps read, arrays or numbers. A read is one row that an index group selected
    for one token.

    The device keeps them in one array, the fields side by side: `NUM_READS` entries a device.

    Attributes:
        resident: rows read on resident pages.
        row_cache: rows of host pages found in the row cache.
        staged: rows brought to the device in the step that read them.
        host: rows read in host memory, in place.
        missed: different rows of a step that were on no page of the device and not in the row
            cache.
        layer_rows_staged: rows staged, each layer counted.
    """

    resident: Count
    row_cache: Count
    staged: Count
    host: Count
    missed: Count
    layer_rows_staged: Count


NUM_READS = len(dataclasses.fields(Reads))
"""Fields of `Reads`."""


def no_reads(*shape: int) -> Int64[np.ndarray, "*shape reads"]:
    """Counts of nothing, side by side."""
    return np.zeros((*shape, NUM_READS), np.int64)
