"""Shapes of staging: GLM-5.3's, and small odd ones for the interpreter."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from pallas_kernels.common.row_format import RowFormat
from pallas_kernels.common.slab_spec import GLM_ROWS, SlabSpec, glm_slab


@dataclasses.dataclass(frozen=True, slots=True)
class StageSpec:
    """Lists to stage.

    Attributes:
        slabs: the slabs.
        misses: length of the lists of `stage_rows`.
        pages: length of the lists of `stage_pages`.
    """

    slabs: SlabSpec
    misses: int
    pages: int


def _odd(row_format: RowFormat) -> StageSpec:
    slabs = SlabSpec(row_format=row_format, layers=7, rows_per_page=5, device_pages=3, host_pages=4)
    return StageSpec(slabs, misses=9, pages=5)


SPECS = {
    # Eight sequences with a row and three drafts each, which select 2,048 rows of eight devices.
    **{f"glm_{kind}": StageSpec(glm_slab(row), 8192, 512) for kind, row in GLM_ROWS.items()},
    **{f"odd_{kind}": _odd(row) for kind, row in GLM_ROWS.items()},
    "odd_narrow": _odd(RowFormat("float32", 8, 4, 1e-4)),
}
"""By name."""


def row_lists(
    spec: StageSpec, rng: np.random.Generator
) -> tuple[Int[Array, " misses"], Int[Array, " misses"]]:
    """Host rows and device rows for `stage_rows`."""
    slabs, rows = spec.slabs, spec.slabs.rows_per_page
    host_rows = rng.integers(0, slabs.host_pages * rows, spec.misses)
    device_rows = rng.permutation(slabs.device_pages * rows)[: spec.misses]
    return jnp.asarray(host_rows, jnp.int32), jnp.asarray(device_rows, jnp.int32)


def page_lists(
    spec: StageSpec, rng: np.random.Generator
) -> tuple[Int[Array, " pages"], Int[Array, " pages"]]:
    """Host pages and targets for `stage_pages`."""
    slabs = spec.slabs
    host_pages = rng.integers(0, slabs.host_pages, spec.pages)
    targets = rng.permutation(slabs.layers * slabs.device_pages)[: spec.pages]
    return jnp.asarray(host_pages, jnp.int32), jnp.asarray(targets, jnp.int32)
