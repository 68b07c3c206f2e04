import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.common.row_format import ROW_KINDS, RowFormat, RowKind
from pallas_kernels.index_scores import KEY_BLOCK, index_scores

pytestmark = pytest.mark.compiles

HEADS, KEY_DIM, LAYERS, LAYER = 8, 32, 3, 1


@functools.cache
def compiled(row_format: RowFormat, layer: int | None = None) -> Callable:
    """Returns the op, jitted, with the layer static or, if None, an argument."""

    def run(query, weights, keys, traced_layer, pages, num_keys):
        index_layer = traced_layer if layer is None else layer
        return index_scores(query, weights, keys, index_layer, pages, num_keys, row_format)

    return jax.jit(run)


@dataclasses.dataclass(frozen=True)
class Context:
    """A sequence's keys in logical order, and pages that hold them in scrambled places."""

    row_format: RowFormat
    stored: np.ndarray  # [context, width]
    keys: np.ndarray  # [context, key_dim], as unpacked

    @classmethod
    def create(cls, kind: RowKind, num_keys: int, key_dim: int = KEY_DIM) -> "Context":
        row_format = RowFormat(kind, key_dim, 0, 1e-4 / 448)
        keys = np.random.default_rng(3).normal(size=(num_keys, key_dim)).astype(np.float32)
        stored = jax.jit(row_format.pack)(keys, np.zeros((num_keys, 0), np.float32))
        return cls(row_format, np.asarray(stored), np.asarray(jax.jit(row_format.unpack)(stored)))

    def paged(self, rows_per_page: int, num_pages: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns keys of all layers, the other pages full of junk, and the sequence's pages."""
        shape = (LAYERS, num_pages, rows_per_page, self.row_format.width)
        junk = np.random.default_rng(4).integers(0, 256, (*shape, self.stored.itemsize), np.uint8)
        keys = junk.view(self.stored.dtype).reshape(shape)
        pages = np.random.default_rng(5).permutation(num_pages)
        pages = pages[: len(self.stored) // rows_per_page].astype(np.int32)
        keys[LAYER, pages] = self.stored.reshape(-1, *shape[2:])
        return keys, pages

    def scores(
        self,
        query: np.ndarray,
        weights: np.ndarray,
        *,
        rows_per_page: int = 64,
        num_pages: int = 24,
        context_pages: int | None = None,
        num_keys: int | None = None,
        static_layer: bool = False,
    ) -> np.ndarray:
        keys, pages = self.paged(rows_per_page, num_pages)
        run = compiled(self.row_format, LAYER if static_layer else None)
        num_keys = len(self.stored) if num_keys is None else num_keys
        pages = pages[:context_pages]
        args = (query, weights, keys, jnp.int32(LAYER), pages, jnp.int32(num_keys))
        return np.asarray(run(*args))


def queries(num_rows: int, heads: int = HEADS, key_dim: int = KEY_DIM) -> tuple:
    """Returns queries and head weights, about half of them negative."""
    rng = np.random.default_rng(6)
    query = rng.normal(size=(num_rows, heads, key_dim)).astype(np.float32)
    return query, rng.normal(size=(num_rows, heads)).astype(np.float32)


@functools.cache
def context(kind: RowKind) -> Context:
    """Returns 20 pages of 64 keys: two blocks and half of one."""
    return Context.create(kind, 1280)


def exact_scores(query: np.ndarray, weights: np.ndarray, keys: np.ndarray) -> np.ndarray:
    similarity = np.einsum("rhd,sd->rsh", query.astype(np.float64), keys.astype(np.float64))
    return np.einsum("rsh,rh->rs", np.maximum(similarity, 0), weights.astype(np.float64))


@pytest.mark.parametrize("kind", ROW_KINDS)
def test_scores(kind: RowKind) -> None:
    """A wrong formula, key, page or layer, and a half block at the end that is lost."""
    query, weights = queries(3)
    found = context(kind).scores(query, weights)
    expected = exact_scores(query, weights, context(kind).keys)
    assert (expected < 0).any()
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("kind", ROW_KINDS)
@pytest.mark.parametrize(
    ("num_keys", "scored"),
    [
        (0, 0),
        (1, KEY_BLOCK),
        (KEY_BLOCK, KEY_BLOCK),
        (KEY_BLOCK + 1, 2 * KEY_BLOCK),
        (2 * KEY_BLOCK + 1, 1280),
        (1280, 1280),
    ],
)
def test_blocks_beyond_num_keys(kind: RowKind, num_keys: int, scored: int) -> None:
    """A block scored in vain, one skipped too early, or a skipped score that could be selected."""
    query, weights = queries(3)
    found = context(kind).scores(query, weights, num_keys=num_keys)
    whole = context(kind).scores(query, weights)
    assert found.shape == whole.shape == (3, 1280)
    assert found[:, :scored].tobytes() == whole[:, :scored].tobytes()
    assert np.isneginf(found[:, scored:]).all()
    assert np.isfinite(whole).all()


@pytest.mark.parametrize(
    ("kind", "heads", "key_dim"),
    # The last is GLM-5.3, whose sizes XLA may multiply otherwise.
    [("float32", HEADS, KEY_DIM), ("bfloat16", HEADS, KEY_DIM), ("fp8", 32, 128)],
)
def test_bits_depend_on_query_and_key_alone(kind: RowKind, heads: int, key_dim: int) -> None:
    """A score that changes with the batch, the pages of the context, their size or the layer."""
    context = Context.create(kind, 1280, key_dim)
    query, weights = queries(6, heads, key_dim)
    whole = context.scores(query, weights)
    for row in (0, 3, 5):
        alone = context.scores(query[row : row + 1], weights[row : row + 1])
        assert alone.tobytes() == whole[row].tobytes(), "alone and among others"
    few = context.scores(query, weights, context_pages=9)
    assert few.tobytes() == whole[:, : 9 * 64].tobytes(), "with more context pages"
    for rows_per_page, num_pages in ((8, 200), (256, 7)):
        paged = context.scores(query, weights, rows_per_page=rows_per_page, num_pages=num_pages)
        assert paged.tobytes() == whole.tobytes(), f"with {rows_per_page} rows a page"
    more = context.scores(query, weights, num_pages=40)
    assert more.tobytes() == whole.tobytes(), "in a larger store"
    static = context.scores(query, weights, static_layer=True)
    assert static.tobytes() == whole.tobytes(), "with the layer known when compiling"
