"""Shapes of appending: GLM-5.3's, and small odd ones for the interpreter."""

import dataclasses
from typing import Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels.common.row_format import RowFormat
from pallas_kernels.common.slab_spec import GLM_KEYS, GLM_ROWS, SlabSpec, glm_slab


@dataclasses.dataclass(frozen=True, slots=True)
class AppendSpec:
    """Rows to append.

    Attributes:
        slabs: where to; what is in host memory plays no part.
        tokens: number of rows.
        dtype: type that they are computed in.
    """

    slabs: SlabSpec
    tokens: int
    dtype: Literal["float32", "bfloat16"]


def _odd(row_format: RowFormat, dtype: Literal["float32", "bfloat16"]) -> AppendSpec:
    slabs = SlabSpec(row_format=row_format, layers=3, rows_per_page=8, device_pages=5, host_pages=0)
    return AppendSpec(slabs, 13, dtype)


SPECS = {
    **{f"glm_{kind}": AppendSpec(glm_slab(row), 32, "bfloat16") for kind, row in GLM_ROWS.items()},
    **{
        f"glm_keys_{kind}": AppendSpec(glm_slab(key), 32, "float32")
        for kind, key in GLM_KEYS.items()
    },
    **{f"odd_{kind}": _odd(row, "float32") for kind, row in GLM_ROWS.items()},
    **{f"odd_keys_{kind}": _odd(key, "float32") for kind, key in GLM_KEYS.items()},
    "odd_bfloat16_values": _odd(GLM_ROWS["fp8"], "bfloat16"),
    "odd_three_groups": _odd(RowFormat("fp8", 384, 64, 1e-4), "float32"),
}
"""By name."""


def random_rows(
    spec: AppendSpec, rng: np.random.Generator
) -> tuple[Float[Array, "tokens latent"], Float[Array, "tokens rope"]]:
    """Latents and ropes, of all magnitudes."""
    row = spec.slabs.row_format

    def draw(width: int) -> jnp.ndarray:
        magnitude = np.exp2(rng.integers(-12, 12, (spec.tokens, width)))
        row_magnitude = np.exp2(rng.integers(-60, 60, (spec.tokens, 1)))
        drawn = rng.standard_normal((spec.tokens, width)) * magnitude * row_magnitude
        return jnp.asarray(drawn, spec.dtype)

    return draw(row.latent_dim), draw(row.rope_dim)


def random_pages(
    spec: AppendSpec, rng: np.random.Generator
) -> tuple[Int[Array, " tokens"], Int[Array, " tokens"]]:
    """Pages and rows of which no two are the same; about a third of the rows are dropped."""
    slabs = spec.slabs
    chosen = rng.permutation(slabs.device_pages * slabs.rows_per_page)[: spec.tokens]
    pages, rows = np.divmod(chosen, slabs.rows_per_page)
    pages = np.where(rng.random(spec.tokens) < 1 / 3, -1, pages)
    return jnp.asarray(pages, jnp.int32), jnp.asarray(rows, jnp.int32)
