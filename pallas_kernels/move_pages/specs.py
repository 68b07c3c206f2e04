"""Shapes of page moves: GLM-5.3's, and small odd ones for the interpreter."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from pallas_kernels.common.row_format import RowFormat
from pallas_kernels.common.slab_spec import GLM_KEYS, GLM_ROWS, SlabSpec, glm_slab


@dataclasses.dataclass(frozen=True, slots=True)
class MoveSpec:
    """A list of `moves` page moves between or within `slabs`."""

    slabs: SlabSpec
    moves: int


def _odd(row_format: RowFormat, layers: int = 29, rows_per_page: int = 2) -> MoveSpec:
    slabs = SlabSpec(
        row_format=row_format,
        layers=layers,
        rows_per_page=rows_per_page,
        device_pages=8,
        host_pages=6,
    )
    return MoveSpec(slabs, moves=5)


SPECS = {
    **{f"glm_{kind}": MoveSpec(glm_slab(row), 16) for kind, row in GLM_ROWS.items()},
    **{f"odd_{kind}": _odd(row) for kind, row in GLM_ROWS.items()},
    "odd_narrow": _odd(RowFormat("float32", 8, 4, 1e-4)),
}
"""By name; for all moves."""

COPY_SPECS = {
    **{f"glm_keys_{kind}": MoveSpec(glm_slab(key), 16) for kind, key in GLM_KEYS.items()},
    **{f"odd_keys_{kind}": _odd(key, 3, 4) for kind, key in GLM_KEYS.items()},
    "odd_keys_long": _odd(GLM_KEYS["fp8"], 2, 128),
}
"""By name; for `copy_pages` alone, as index keys do not leave the device."""


def random_moves(
    spec: MoveSpec, rng: np.random.Generator, sources: int, targets: int, count: int
) -> Int[Array, "moves 2"]:
    """`count` moves from some of `sources` pages to others of `targets`, then padding."""
    pairs = np.full((spec.moves, 2), -1, np.int32)
    pairs[:count, 0] = rng.permutation(sources)[:count]
    idle = np.setdiff1d(np.arange(targets), pairs[:, 0])
    pairs[:count, 1] = rng.permutation(idle)[:count]
    return jnp.asarray(pairs)
