"""Counts of the rows that steps read, by where they were found."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Int64

from pallas_kernels.common.pytree import pytree_dataclass


@pytree_dataclass
class Reads[Count]:
    """Counts of what steps read, arrays or numbers. A read is one row that an index group selected
    for one token.

    They are kept and sent packed, in one array with the fields side by side.

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

    def pack(self: "Reads[Int[Array, ' sequences']]") -> Int[Array, "sequences reads"]:
        """Counts of sequences, side by side."""
        return jnp.stack(jax.tree.leaves(self), axis=1)

    @classmethod
    def unpack(cls, packed: Int[np.ndarray, " reads"]) -> "Reads[int]":
        """Counts as Python's numbers, of one sequence or of a sum."""
        return Reads(*packed.tolist())


NUM_READS = len(dataclasses.fields(Reads))
"""Fields of `Reads`."""


def no_reads(*shape: int) -> Int64[np.ndarray, "*shape reads"]:
    """Counts of nothing, side by side."""
    return np.zeros((*shape, NUM_READS), np.int64)
