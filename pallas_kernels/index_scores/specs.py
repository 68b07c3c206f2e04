"""Shapes of index scores: GLM-5.3's, and small odd ones for the interpreter."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Shaped

from pallas_kernels.common.row_format import RowFormat
from pallas_kernels.common.slab_spec import GLM_INDEX_LAYERS, GLM_KEYS, random_bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ScoreSpec:
    """Queries of several sequences, and the keys of all.

    Attributes:
        row_format: format of a stored key.
        query_dtype: dtype of a query.
        sequences: sequences scored together.
        rows: query rows of a sequence.
        heads: heads of a row.
        index_layers: layers of keys.
        num_pages: pages of a layer.
        rows_per_page: keys of a page.
        context_pages: pages of a sequence.
    """

    row_format: RowFormat
    query_dtype: str
    sequences: int
    rows: int
    heads: int = 32
    index_layers: int = GLM_INDEX_LAYERS
    num_pages: int
    rows_per_page: int = 64
    context_pages: int

    @property
    def context(self) -> int:
        """Keys of a sequence's pages."""
        return self.context_pages * self.rows_per_page

    @property
    def query(self) -> jax.ShapeDtypeStruct:
        """[sequences, rows, heads, key_dim]."""
        shape = (self.sequences, self.rows, self.heads, self.row_format.latent_dim)
        return jax.ShapeDtypeStruct(shape, jnp.dtype(self.query_dtype))

    @property
    def head_weights(self) -> jax.ShapeDtypeStruct:
        """[sequences, rows, heads]."""
        return jax.ShapeDtypeStruct(self.query.shape[:3], jnp.float32)

    @property
    def index_keys(self) -> jax.ShapeDtypeStruct:
        """[index_layers, num_pages, rows_per_page, width]."""
        row = self.row_format
        shape = (self.index_layers, self.num_pages, self.rows_per_page, row.width)
        return jax.ShapeDtypeStruct(shape, row.dtype)

    @property
    def pages(self) -> jax.ShapeDtypeStruct:
        """[sequences, context_pages]."""
        return jax.ShapeDtypeStruct((self.sequences, self.context_pages), jnp.int32)

    @property
    def num_keys(self) -> jax.ShapeDtypeStruct:
        """[sequences]."""
        return jax.ShapeDtypeStruct((self.sequences,), jnp.int32)


def _glm(kind: str, sequences: int, rows: int, context: int) -> ScoreSpec:
    """One H200 of eight, which has an eighth of a context of so many tokens."""
    return ScoreSpec(
        row_format=GLM_KEYS[kind],
        query_dtype="bfloat16",
        sequences=sequences,
        rows=rows,
        num_pages=3400,
        context_pages=context // 8 // 64,
    )


def _odd(kind: str, query_dtype: str, **sizes: int) -> ScoreSpec:
    sizes = {"sequences": 3, "heads": 8, "index_layers": 2, "num_pages": 24} | sizes
    return ScoreSpec(row_format=GLM_KEYS[kind], query_dtype=query_dtype, **sizes)


SPECS = {
    **{
        f"glm_{kind}_{sequences}x{rows}_{name}": _glm(kind, sequences, rows, context)
        for kind in ("fp8", "bfloat16")
        for name, context in (("128k", 1 << 17), ("1m", 1 << 20))
        for sequences, rows in ((8, 1), (8, 4), (32, 4), (8, 6), (1, 64))
    },
    # Two blocks of keys of which the second is not whole, an odd number of rows.
    "odd_fp8": _odd("fp8", "bfloat16", rows=3, heads=32, context_pages=3),
    "odd_fp8_float32": _odd("fp8", "float32", rows=1, rows_per_page=32, context_pages=21),
    "odd_fp8_e4m3": _odd("fp8", "float8_e4m3fn", rows=1, rows_per_page=128, context_pages=1),
    "odd_bfloat16": _odd("bfloat16", "bfloat16", rows=2, rows_per_page=256, context_pages=3),
    # Rows that do not all fit in shared memory.
    "odd_bfloat16_float32": _odd("bfloat16", "float32", rows=3, heads=32, context_pages=2),
}
"""By name."""


def random_queries(
    spec: ScoreSpec, rng: np.random.Generator
) -> tuple[Float[Array, "sequences rows heads key_dim"], Float[Array, "sequences rows heads"]]:
    """Queries, and head weights about half of which are negative."""
    query = rng.normal(size=spec.query.shape).astype(np.float32)
    weights = rng.normal(size=spec.head_weights.shape).astype(np.float32)
    return jnp.asarray(query).astype(spec.query.dtype), jnp.asarray(weights)


def random_keys(
    spec: ScoreSpec, layer: int, rng: np.random.Generator
) -> Shaped[Array, "index_layers num_pages rows_per_page width"]:
    """Stored keys of one layer; what the others hold means nothing."""
    junk = random_bytes(rng, spec.index_keys)
    _, num_pages, rows_per_page, _ = junk.shape
    keys = rng.normal(size=(num_pages, rows_per_page, spec.row_format.latent_dim))
    nothing = jnp.zeros((num_pages, rows_per_page, 0))
    pack = jax.jit(spec.row_format.pack)
    return junk.at[layer].set(pack(jnp.asarray(keys, jnp.float32), nothing))


def random_pages(
    spec: ScoreSpec, rng: np.random.Generator
) -> Int[Array, "sequences context_pages"]:
    """Pages of each sequence; no two of a sequence are the same."""
    pages = [rng.permutation(spec.num_pages)[: spec.context_pages] for _ in range(spec.sequences)]
    return jnp.asarray(np.stack(pages), jnp.int32)
