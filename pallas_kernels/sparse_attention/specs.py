"""Shapes of attention: GLM-5.3's on one H200 of eight, and small odd ones for the interpreter."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Shaped

from pallas_kernels.common.slab_spec import GLM_ROWS, SlabSpec, glm_slab, random_bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """Queries, and the slabs of rows that they select from.

    Attributes:
        slabs: the slabs.
        parts: parts of the heads, one of each device.
        rows: query rows.
        part_heads: heads of a part.
        k: most selected rows of a query row.
        query_dtype: dtype of a query.
    """

    slabs: SlabSpec
    parts: int
    rows: int
    part_heads: int
    k: int
    query_dtype: str = "bfloat16"

    @property
    def query(self) -> jax.ShapeDtypeStruct:
        """[parts, rows, part_heads, values]."""
        row = self.slabs.row_format
        shape = (self.parts, self.rows, self.part_heads, row.latent_dim + row.rope_dim)
        return jax.ShapeDtypeStruct(shape, jnp.dtype(self.query_dtype))

    @property
    def row_ids(self) -> jax.ShapeDtypeStruct:
        """[rows, k]."""
        return jax.ShapeDtypeStruct((self.rows, self.k), jnp.int32)

    @property
    def count(self) -> jax.ShapeDtypeStruct:
        """[rows]."""
        return jax.ShapeDtypeStruct((self.rows,), jnp.int32)


def _glm(kind: str, rows: int) -> AttentionSpec:
    return AttentionSpec(slabs=glm_slab(GLM_ROWS[kind]), parts=8, rows=rows, part_heads=8, k=2048)


def _odd(kind: str, *, parts: int, part_heads: int, rows: int = 3) -> AttentionSpec:
    slabs = SlabSpec(
        row_format=GLM_ROWS[kind], layers=3, rows_per_page=5, device_pages=7, host_pages=4
    )
    return AttentionSpec(slabs=slabs, parts=parts, rows=rows, part_heads=part_heads, k=99)


SPECS = {
    **{
        f"glm_{kind}_{rows}": _glm(kind, rows)
        for kind in ("fp8", "bfloat16")
        for rows in (1, 8, 128, 8192)
    },
    "odd_fp8": _odd("fp8", parts=2, part_heads=32),
    "odd_bfloat16": _odd("bfloat16", parts=8, part_heads=8),
    # Two blocks of heads of a row.
    "odd_wide": _odd("bfloat16", parts=1, rows=2, part_heads=128),
}
"""By name."""


def random_query(
    spec: AttentionSpec, rng: np.random.Generator
) -> Float[Array, "parts rows part_heads values"]:
    """Queries."""
    query = jnp.asarray(rng.normal(size=spec.query.shape), jnp.float32)
    return query.astype(spec.query_dtype)


def random_slabs(
    spec: AttentionSpec, layer: int, rng: np.random.Generator
) -> tuple[
    Shaped[Array, "layers device_pages rows_per_page width"],
    Shaped[Array, "host_pages rows_per_page layers width"],
]:
    """Stored rows on the device and in host memory; what the host has of other layers means
    nothing."""
    slabs = spec.slabs
    row = slabs.row_format
    pack = jax.jit(row.pack)

    def rows(*shape: int) -> Array:
        values = rng.normal(size=(*shape, row.latent_dim + row.rope_dim)).astype(np.float32)
        return pack(values[..., : row.latent_dim], values[..., row.latent_dim :])

    host = random_bytes(rng, slabs.host)
    host = host.at[:, :, layer].set(rows(slabs.host_pages, slabs.rows_per_page))
    return rows(*slabs.slab.shape[:3]), host


def random_rows(spec: AttentionSpec, rng: np.random.Generator) -> Int[Array, "rows k"]:
    """Ids of rows on the device, in pages of any layer, and in host memory."""
    slabs = spec.slabs
    on_device = slabs.layers * slabs.device_pages * slabs.rows_per_page
    on_host = slabs.host_pages * slabs.rows_per_page
    row_ids = [rng.permutation(on_device + on_host)[: spec.k] for _ in range(spec.rows)]
    return jnp.asarray(np.stack(row_ids), jnp.int32)
