"""Shapes of fetching: GLM-5.3's, and small odd ones for the interpreter."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from pallas_kernels.common.row_format import RowFormat
from pallas_kernels.common.slab_spec import GLM_ROWS, SlabSpec, glm_slab


@dataclasses.dataclass(frozen=True, slots=True)
class FetchSpec:
    """A buffer of rows, and a list as long.

    Attributes:
        slabs: the slabs, of which that in host memory is read.
        rows: rows of the buffer.
    """

    slabs: SlabSpec
    rows: int

    @property
    def buffer(self) -> jax.ShapeDtypeStruct:
        """[rows, width]."""
        row = self.slabs.row_format
        return jax.ShapeDtypeStruct((self.rows, row.width), row.dtype)


def _odd(row_format: RowFormat) -> FetchSpec:
    slabs = SlabSpec(row_format=row_format, layers=7, rows_per_page=5, device_pages=1, host_pages=4)
    return FetchSpec(slabs, rows=9)


SPECS = {
    # What a row of a step selects.
    **{f"glm_{kind}": FetchSpec(glm_slab(row), 2048) for kind, row in GLM_ROWS.items()},
    **{f"odd_{kind}": _odd(row) for kind, row in GLM_ROWS.items()},
    "odd_narrow": _odd(RowFormat("float32", 8, 4, 1e-4)),
}
"""By name."""


def row_lists(
    spec: FetchSpec, rng: np.random.Generator
) -> tuple[Int[Array, " listed"], Int[Array, " listed"]]:
    """Host rows and targets."""
    slabs = spec.slabs
    host_rows = rng.integers(0, slabs.host_pages * slabs.rows_per_page, spec.rows)
    return jnp.asarray(host_rows, jnp.int32), jnp.asarray(rng.permutation(spec.rows), jnp.int32)
