"""Sizes of slabs, shared by the tests and benchmarks of the operations on them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Shaped

from pallas_kernels.common.row_format import ROW_KINDS, RowFormat

GLM_ROWS = {kind: RowFormat(kind, 512, 64, 1e-4) for kind in ROW_KINDS}
"""GLM-5.3's MLA rows, by kind."""
GLM_KEYS = {kind: RowFormat(kind, 128, 0, 1e-4 / 448) for kind in ROW_KINDS}
"""GLM-5.3's index keys, by kind."""
GLM_LAYERS, GLM_INDEX_LAYERS = 79, 22


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SlabSpec:
    """A slab on the device and one in host memory.

    Attributes:
        row_format: format of their rows.
        layers: layers of both.
        rows_per_page: rows of a page on one device.
        device_pages: pages of the slab on the device.
        host_pages: pages of the slab in host memory.
    """

    row_format: RowFormat
    layers: int
    rows_per_page: int
    device_pages: int
    host_pages: int

    @property
    def slab(self) -> jax.ShapeDtypeStruct:
        """[layers, device_pages, rows_per_page, width]."""
        row = self.row_format
        shape = (self.layers, self.device_pages, self.rows_per_page, row.width)
        return jax.ShapeDtypeStruct(shape, row.dtype)

    @property
    def host(self) -> jax.ShapeDtypeStruct:
        """[host_pages, rows_per_page, layers, width]."""
        row = self.row_format
        shape = (self.host_pages, self.rows_per_page, self.layers, row.width)
        return jax.ShapeDtypeStruct(shape, row.dtype)


def glm_slab(row_format: RowFormat) -> SlabSpec:
    """One H200's part of a store of GLM-5.3, of MLA rows or of index keys."""
    layers = GLM_LAYERS if row_format.rope_dim else GLM_INDEX_LAYERS
    return SlabSpec(
        row_format=row_format, layers=layers, rows_per_page=64, device_pages=400, host_pages=3000
    )


def random_bytes(rng: np.random.Generator, array: jax.ShapeDtypeStruct) -> Shaped[Array, "*shape"]:
    """An array of that shape and dtype of bytes that mean nothing."""
    dtype = jnp.dtype(array.dtype)
    drawn = rng.integers(0, 256, (*array.shape[:-1], array.shape[-1] * dtype.itemsize), np.uint8)
    return jnp.asarray(drawn.view(dtype))
