"""A context that lies mostly in host memory, against references that know of no tiers."""

import dataclasses
from collections import Counter

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from kvcache.device.resolve import MAX_ROWS_WITH_ROW_CACHE
from kvcache.tiers.page_states import PageState
from pallas_kernels.common.row_format import ROW_KINDS, RowFormat, RowKind
from pallas_kernels.sparse_attention import sparse_attention
from pallas_kernels.sparse_attention.packed import unpack
from tests.glm53.model.test_golden import LOGITS_ATOL
from tests.helpers.cached_session import CachedSession
from tests.helpers.golden import golden_arrays, golden_config, golden_params

pytestmark = pytest.mark.compiles
KIT = "tiny_f32"
LAYERS, DEVICE_PAGES, HOST_PAGES, ROWS = 3, 4, 6, 8
LATENT, ROPE, HEADS = 160, 8, 3


@pytest.mark.parametrize(
    ("num_devices", "rows", "device_pages", "host_pages"),
    [(1, 4, 8, 24), pytest.param(2, 16, 5, 11, marks=pytest.mark.slow)],
)
def test_mostly_on_the_host(
    num_devices: int, rows: int, device_pages: int, host_pages: int
) -> None:
    """Logits, selections and tokens of Hugging Face transformers, from rows of both tiers.

    Steps of few rows find row-cache rows, those of many stage pages; both read the rest in place.
    """
    golden, config = golden_arrays(KIT), golden_config(KIT)
    ids, greedy = golden["p0_ids"], golden["p0_e5_greedy"]
    tokens = np.concatenate([ids, greedy[:-1]])
    session = CachedSession(
        config,
        golden_params(KIT, num_devices),
        num_devices=num_devices,
        max_step_rows=rows,
        row_kind="float32",
        rows_per_device=8,
        device_pages=device_pages,
        host_pages=host_pages,
        row_cache_rows=8,
        staging_pages=1,
        max_sequences=2,
        max_model_len=len(tokens),
    )
    session.cache.open(1, tokens[: len(ids)].tolist(), len(tokens))
    full = [layer for layer, kind in enumerate(config.indexer_types) if kind == "full"]
    uses_row_cache_rows = rows <= MAX_ROWS_WITH_ROW_CACHE
    logits, selected, reads = [], [], Counter[str]()
    for start in range(0, len(tokens), rows):
        some = tokens[start : start + rows]
        output, found = session.append({1: some}, rows=rows, staging=not uses_row_cache_rows)
        assert output.trace is not None
        logits.append(np.array(output.logits)[0, : len(some)])
        selected.append(np.array(output.trace.selected)[full, : len(some)])
        reads.update(dataclasses.asdict(found))
    logits, selected = np.concatenate(logits), np.concatenate(selected, axis=1)
    expected = golden["p0_e5_logits"]
    np.testing.assert_allclose(logits[: len(ids)], expected, rtol=0, atol=LOGITS_ATOL)
    np.testing.assert_array_equal(selected[:, : len(ids)], golden["p0_e5_topk"])
    assert logits[len(ids) - 1 :].argmax(axis=1).tolist() == greedy.tolist()
    on_host = session.cache.residency.states.count(PageState.HOST)
    assert on_host > len(session.cache.pages_of(1)) // 2
    assert min(reads[name] for name in ("resident", "staged", "host")) > 100, reads
    assert (reads["row_cache"] > 100) == uses_row_cache_rows, reads


def random_rows(kind: RowKind, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Stored rows made of random bytes, and the numbers that they stand for in float64."""
    rng = np.random.default_rng(len(shape))
    if kind != "fp8":
        dtype = ml_dtypes.bfloat16 if kind == "bfloat16" else np.float32
        stored = rng.normal(size=(*shape, LATENT + ROPE)).astype(dtype)
        return stored, stored.astype(np.float64)
    latent = rng.integers(0, 0x7F, (*shape, LATENT), np.uint8)  # 0x7F is NaN
    latent |= rng.integers(0, 2, latent.shape, np.uint8) << 7
    scale = np.exp2(rng.integers(-9, -6, (*shape, 2))).astype(np.float32)
    rope = rng.normal(size=(*shape, ROPE)).astype(ml_dtypes.bfloat16)
    parts = [latent, scale.view(np.uint8), rope.view(np.uint8)]
    scales = np.concatenate(
        [np.repeat(scale[..., :1], 128, axis=-1), np.repeat(scale[..., 1:], LATENT - 128, axis=-1)],
        axis=-1,
    )
    values = latent.view(ml_dtypes.float8_e4m3fn).astype(np.float64) * scales
    stored = np.concatenate(parts, axis=-1).view(np.int32)
    return stored, np.concatenate([values, rope.astype(np.float64)], axis=-1)


@pytest.mark.parametrize("kind", ROW_KINDS)
def test_attention_over_both_tiers(kind: RowKind) -> None:
    """A row taken from the wrong tier, layer or index, or bytes read as other numbers."""
    row_format = RowFormat(kind, LATENT, ROPE, 1e-4)
    slab, device_values = random_rows(kind, (LAYERS, DEVICE_PAGES, ROWS))
    host, host_values = random_rows(kind, (HOST_PAGES, ROWS, LAYERS))
    query = np.random.default_rng(2).normal(size=(1, 1, HEADS, LATENT + ROPE)).astype(np.float32)
    device_rows, scale = DEVICE_PAGES * ROWS, 0.05
    layer = 1
    values = np.concatenate(
        [
            device_values[layer].reshape(device_rows, -1),
            host_values[:, :, layer].reshape(HOST_PAGES * ROWS, -1),
        ]
    )
    selected = np.random.default_rng(3).permutation(len(values))[:20]
    on_host = selected >= device_rows
    assert 5 < on_host.sum() < 15
    ids = np.where(on_host, selected - device_rows + LAYERS * device_rows, selected)
    ids = np.append(ids, -1).astype(np.int32)[None]
    count = np.asarray([len(selected)], np.int32)
    attend = jax.jit(sparse_attention, static_argnums=(3, 6, 7))
    slabs = jnp.asarray(slab), jnp.asarray(host)
    output, lse = unpack(attend(query, *slabs, layer, ids, count, scale, row_format)[0])
    scores = query[0, 0].astype(np.float64) @ values[selected].T * scale
    total = np.exp(scores).sum(axis=1)
    mixed = np.exp(scores) @ values[selected, :LATENT] / total[:, None]
    np.testing.assert_allclose(output[0], mixed, rtol=0, atol=1e-5)
    np.testing.assert_allclose(lse[0], np.log(total), rtol=0, atol=1e-5)
