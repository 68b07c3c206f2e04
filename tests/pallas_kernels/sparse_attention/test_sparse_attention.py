import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.common.row_format import ROW_KINDS, RowFormat, RowKind
from pallas_kernels.sparse_attention import merge_attention, sparse_attention
from pallas_kernels.sparse_attention.packed import pack, unpack

pytestmark = pytest.mark.compiles
LATENT, ROPE, HEADS, LAYERS = 32, 8, 4, 3
PAGES, ROWS_PER_PAGE = 12, 8
NUM_ROWS = PAGES * ROWS_PER_PAGE
SCALE = 0.25


@functools.cache
def compiled(row_format: RowFormat, layer: int | None = None) -> Callable:
    """Returns the op, jitted, with the layer static or, if None, an argument."""

    def run(query, slab, traced_layer, row_ids, count, host=None):
        which = traced_layer if layer is None else layer
        attended = sparse_attention(
            query[None], slab, host, which, row_ids, count, SCALE, row_format
        )
        return unpack(attended[0])

    return jax.jit(run)


@dataclasses.dataclass(frozen=True)
class Slab:
    """Stored rows of all layers, and what they unpack to: [layers, rows, values]."""

    row_format: RowFormat
    stored: np.ndarray
    values: np.ndarray

    @classmethod
    @functools.cache
    def create(cls, kind: RowKind, latent: int = LATENT, rope: int = ROPE) -> "Slab":
        row_format = RowFormat(kind, latent, rope, 1e-4)
        values = np.random.default_rng(1).normal(size=(LAYERS, PAGES, ROWS_PER_PAGE, latent + rope))
        latents, ropes = np.split(values.astype(np.float32), [latent], axis=-1)
        stored = jax.jit(row_format.pack)(latents, ropes)
        unpacked = np.asarray(jax.jit(row_format.unpack)(stored))
        return cls(row_format, np.asarray(stored), unpacked.reshape(LAYERS, NUM_ROWS, -1))

    def with_garbage(self, layer: int, row_ids: np.ndarray, garbage: float) -> np.ndarray:
        """Returns the stored rows with garbage in all that are not selected of the layer."""
        word = np.float32(garbage)
        fp8 = self.row_format.kind == "fp8"
        stored = np.full_like(self.stored, word.view(np.int32) if fp8 else word)
        flat = stored.reshape(LAYERS, NUM_ROWS, -1)
        kept = np.unique(row_ids[row_ids >= 0])
        flat[layer, kept] = self.stored.reshape(flat.shape)[layer, kept]
        return stored

    def attend(
        self,
        query: np.ndarray,
        row_ids: np.ndarray,
        layer: int = 1,
        stored: np.ndarray | None = None,
        host: np.ndarray | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        stored = self.stored if stored is None else stored
        row_ids, count = compact(row_ids)
        outputs, lse = compiled(self.row_format)(
            query, stored, jnp.int32(layer), row_ids, count, host
        )
        assert outputs.dtype == lse.dtype == np.float32
        return np.asarray(outputs), np.asarray(lse)

    def exact(
        self, query: np.ndarray, row_ids: np.ndarray, layer: int = 1
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns what attention gives, in float64."""
        latent = self.row_format.latent_dim
        outputs = np.zeros((*query.shape[:2], latent))
        lse = np.full(query.shape[:2], -np.inf)
        for row, ids in enumerate(row_ids):
            values = self.values[layer, ids[ids >= 0]].astype(np.float64)
            if not len(values):
                continue
            scores = query[row].astype(np.float64) @ values.T * SCALE  # [heads, k]
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            total = weights.sum(axis=1, keepdims=True)
            outputs[row] = weights @ values[:, :latent] / total
            lse[row] = scores.max(axis=1) + np.log(total[:, 0])
        return outputs, lse


def queries(num_rows: int, width: int = LATENT + ROPE, heads: int = HEADS) -> np.ndarray:
    return np.random.default_rng(2).normal(size=(num_rows, heads, width)).astype(np.float32)


def selections(num_rows: int, k: int = 20, missing: float = 0.3) -> np.ndarray:
    """Returns distinct rows in no order, -1 among them, and nothing in the last row."""
    rng = np.random.default_rng(3)
    ids = np.stack([rng.permutation(NUM_ROWS)[:k] for _ in range(num_rows)]).astype(np.int32)
    ids[rng.random(ids.shape) < missing] = -1
    ids[-1] = -1
    return ids


def compact(row_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns rows' ids without -1, then junk, and how many they are."""
    count = (row_ids >= 0).sum(axis=1).astype(np.int32)
    order = np.argsort(row_ids < 0, axis=1, kind="stable")
    compacted = np.take_along_axis(row_ids, order, axis=1)
    junk = np.resize(np.asarray([-1, 2**31 - 1, 0], np.int32), compacted.shape)
    return np.where(np.arange(row_ids.shape[1]) < count[:, None], compacted, junk), count


def assert_close(found: tuple[np.ndarray, np.ndarray], exact: tuple) -> None:
    for array, expected in zip(found, exact, strict=True):
        np.testing.assert_allclose(array, expected, rtol=2e-5, atol=2e-6)


def bits(arrays: tuple[np.ndarray, np.ndarray]) -> tuple[bytes, bytes]:
    return arrays[0].tobytes(), arrays[1].tobytes()


def merge(outputs: np.ndarray, lse: np.ndarray) -> np.ndarray:
    packed = pack(jnp.asarray(outputs, jnp.float32), jnp.asarray(lse, jnp.float32), jnp.float32)
    return np.asarray(merge_attention(packed, RowFormat("float32", LATENT, ROPE, 1e-4)))


@pytest.mark.parametrize("kind", ROW_KINDS)
@pytest.mark.parametrize("layer", range(LAYERS))
def test_attention(kind: RowKind, layer: int) -> None:
    """A wrong formula, row or layer, or an empty selection that gives anything but 0 and -inf."""
    slab, query, ids = Slab.create(kind), queries(6), selections(6)
    outputs, lse = slab.attend(query, ids, layer)
    assert_close((outputs, lse), slab.exact(query, ids, layer))
    assert (outputs[-1] == 0).all()
    assert np.isneginf(lse[-1]).all()
    assert np.isfinite(lse[:-1]).all()


def test_scores_far_apart() -> None:
    """An exponential that overflows, or vanishes, where scores are large."""
    slab, query, ids = Slab.create("float32"), queries(6) * 1000, selections(6)
    found, exact = slab.attend(query, ids), slab.exact(query, ids)
    assert np.abs(exact[1][:-1]).max() > 1000
    np.testing.assert_allclose(found[0], exact[0], rtol=2e-3, atol=2e-3)
    np.testing.assert_allclose(found[1], exact[1], rtol=1e-5)


@pytest.mark.parametrize("kind", ROW_KINDS)
@pytest.mark.parametrize("garbage", [np.nan, np.inf, -np.inf])
def test_unselected_rows_do_not_leak(kind: RowKind, garbage: float) -> None:
    """NaN or infinity in a row nobody selected, row 0 first of all, that reaches a result."""
    slab, query, ids = Slab.create(kind), queries(6), selections(6)
    ids = np.where(ids == 0, -1, ids)
    stored = slab.with_garbage(1, ids, garbage)
    spoilt = np.asarray(jax.jit(slab.row_format.unpack)(stored)).reshape(LAYERS, NUM_ROWS, -1)
    assert not np.isfinite(spoilt[1, 0]).all()
    assert not np.isfinite(spoilt[0]).all(axis=-1).any()
    assert bits(slab.attend(query, ids, stored=stored)) == bits(slab.attend(query, ids))


@pytest.mark.parametrize("kind", ROW_KINDS)
def test_bits_of_a_row(kind: RowKind) -> None:
    """A result that changes with the batch, the ids of the rows or the kind of layer index."""
    check_bits(Slab.create(kind), queries(6))


def test_bits_at_full_size() -> None:
    """The same with the heads and widths of GLM-5.3, which XLA may multiply otherwise."""
    check_bits(Slab.create("fp8", 512, 64), queries(6, 576, heads=64))


def check_bits(slab: Slab, query: np.ndarray) -> None:
    ids = selections(len(query))
    whole = slab.attend(query, ids)
    for row in (0, 3, 5):
        alone = slab.attend(query[row : row + 1], ids[row : row + 1])
        assert bits(alone) == (whole[0][row].tobytes(), whole[1][row].tobytes()), "alone"
    static = compiled(slab.row_format, 1)(query, slab.stored, jnp.int32(0), *compact(ids))
    assert bits(jax.device_get(static)) == bits(whole), "with the layer known when compiling"
    # Elsewhere on the device, but visited in the same order: residency changes no bit.
    moved = np.random.default_rng(7).permutation(NUM_ROWS).astype(np.int32)
    stored = slab.stored.reshape(LAYERS, NUM_ROWS, -1)
    stored = stored[:, np.argsort(moved)].reshape(slab.stored.shape)
    placed = slab.attend(query, np.where(ids >= 0, moved[ids], -1), stored=stored)
    assert bits(placed) == bits(whole), "with the rows elsewhere"


@pytest.mark.parametrize("kind", ROW_KINDS)
@pytest.mark.parametrize("layer", range(LAYERS))
def test_bits_of_rows_elsewhere(kind: RowKind, layer: int) -> None:
    """A row in pages of another layer, round the end, or in host memory, that changes a bit."""
    slab, query, ids = Slab.create(kind), queries(6), selections(6)
    whole = slab.attend(query, ids, layer)
    rows = slab.stored.reshape(LAYERS, NUM_ROWS, -1)[layer]
    rng, num_rows, host_rows = np.random.default_rng(7), LAYERS * NUM_ROWS, 2 * NUM_ROWS
    # All else is NaN: unused rows of both memories, and the other layers of a host row.
    nothing = slab.with_garbage(layer, np.asarray([], np.int32), np.nan)
    for share in (0.0, 0.4, 1.0):
        stored = nothing.reshape(num_rows, -1).copy()
        host = np.resize(stored[0], (host_rows, LAYERS, stored.shape[1]))
        spilled = rng.random(NUM_ROWS) < share
        on_device, on_host = (
            rng.permutation(num_rows)[:NUM_ROWS],
            rng.permutation(host_rows)[:NUM_ROWS],
        )
        stored[(layer * NUM_ROWS + on_device[~spilled]) % num_rows] = rows[~spilled]
        host[on_host[spilled], layer] = rows[spilled]
        moved = np.where(spilled, num_rows + on_host, on_device).astype(np.int32)
        placed = slab.attend(
            query,
            np.where(ids >= 0, moved[ids], -1),
            layer,
            stored.reshape(slab.stored.shape),
            host.reshape(-1, ROWS_PER_PAGE, *host.shape[1:]),
        )
        assert bits(placed) == bits(whole), share


@pytest.mark.parametrize("kind", ROW_KINDS)
def test_order_changes_rounding_only(kind: RowKind) -> None:
    """A result that depends on the order of the ids by more than the order of its sums."""
    slab, query, ids = Slab.create(kind), queries(6), selections(6)
    assert_close(slab.attend(query, ids[:, ::-1]), slab.exact(query, ids))
    assert_close(slab.attend(query, np.sort(ids, axis=1)), slab.exact(query, ids))


@pytest.mark.parametrize("kind", ROW_KINDS)
@pytest.mark.parametrize("shards", [1, 2, 4, 8])
def test_merge_equals_the_whole(kind: RowKind, shards: int) -> None:
    """Attention over the rows of several devices that differs from attention over all of them."""
    slab, query, ids = Slab.create(kind), queries(6), selections(6)
    # With few ids most shards of the second row are empty.
    ids[1, 2:] = -1
    parts = [
        slab.attend(query, np.where(ids % shards == shard, ids, -1)) for shard in range(shards)
    ]
    outputs, lse = np.stack([x for x, _ in parts]), np.stack([x for _, x in parts])
    merged = merge(outputs, lse)
    np.testing.assert_allclose(merged, slab.exact(query, ids)[0], rtol=2e-5, atol=2e-6)
    assert (merged[-1] == 0).all()
    if shards == 1:
        assert merged.tobytes() == outputs.tobytes()


def test_merge_of_nothing() -> None:
    """NaN where no shard selected anything."""
    merged = merge(np.zeros((2, 4, HEADS, LATENT)), np.full((2, 4, HEADS), -np.inf))
    assert (merged == 0).all()


def test_empty_shards_count_for_nothing() -> None:
    """A shard with log-sum-exp -inf that changes a bit, whatever its output holds."""
    rng = np.random.default_rng(5)
    outputs = rng.normal(size=(1, 3, HEADS, LATENT)).astype(np.float32)
    lse = rng.normal(size=(1, 3, HEADS)).astype(np.float32) * 100
    for junk, place in ((0.0, 0), (np.nan, 0), (np.inf, 1), (-np.inf, 1)):
        with_empty = np.insert(outputs, place, junk, axis=0)
        with_lse = np.insert(lse, place, -np.inf, axis=0)
        assert merge(with_empty, with_lse).tobytes() == outputs.tobytes()


def test_merge_of_two() -> None:
    """Weights that are not the shares of the shards' sums of exponentials."""
    outputs = np.asarray([[[[1.0, 0.0]]], [[[0.0, 1.0]]]])
    lse = np.asarray([[[math.log(3.0) + 500]], [[math.log(1.0) + 500]]])
    np.testing.assert_allclose(merge(outputs, lse), [[[0.75, 0.25]]], rtol=1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_packed(dtype: str) -> None:
    """A log-sum-exp that is rounded with the mean, or bytes of another number."""
    lse = np.asarray([[0.1, -np.inf, 3e38], [-1e-40, 0.0, -7.3]], np.float32)
    mean = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    packed = pack(jnp.asarray(mean), jnp.asarray(lse), dtype)
    assert packed.shape == (2, 3, 4 + 16 // packed.dtype.itemsize)
    found = unpack(packed)
    assert bits((np.asarray(found[0]), np.asarray(found[1]))) == bits((mean, lse))
