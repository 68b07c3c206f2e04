"""Decode steps with pages in host memory, at toy size, whatever time they take."""

import dataclasses

import jax
import numpy as np
import pytest

from benchmarks.common.small_checkpoint import small_fields, write_checkpoint
from benchmarks.cpu.hybrid_decode import (
    VARIANTS,
    Decoder,
    HybridBench,
    Timing,
    format_table,
    measure,
)
from glm53.checkpoint import load_hugging_face
from glm53.model.config import GLMConfig
from glm53.model.sharding import make_mesh
from tests.helpers.toy_model import SIZES

pytestmark = pytest.mark.compiles
CONTEXT = 256


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> HybridBench:
    path = tmp_path_factory.mktemp("model")
    write_checkpoint(
        path, small_fields(max_position_embeddings=CONTEXT, **SIZES | {"index_topk": 40})
    )
    config = GLMConfig.from_pretrained(path)
    params = load_hugging_face(path, config, make_mesh())
    return HybridBench(config, params, 2, CONTEXT, 0.05)


def test_variants_read_what_they_claim(bench: HybridBench) -> None:
    """A benchmark that times something else than it claims: its steps check rows and logits."""
    timing = measure(bench, 2, CONTEXT, 3)
    assert {variant: len(samples) for variant, samples in timing.samples.items()} == dict.fromkeys(
        VARIANTS, 3
    )
    assert timing.missed == 2 / 40
    assert min(map(min, timing.samples.values())) > 0


def test_other_reads_are_noticed(bench: HybridBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Misses taken for hits: dropping cached rows does nothing, or too much."""
    forget = Decoder.forget
    for count in (0, 3):
        with monkeypatch.context() as patch:
            patch.setattr(Decoder, "forget", lambda self, _, seed, n=count: forget(self, n, seed))
            with pytest.raises(RuntimeError, match="8 rows should be missed"):
                bench.step("some missed")
    bench.step("all cached")


def test_other_logits_are_noticed(bench: HybridBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows in host memory that differ from those of the store that keeps all on the device."""
    decoder = bench._decoders["all cached"]
    host = decoder._store.host
    assert host is not None
    slab = jax.device_put(np.zeros(host.slab.shape, np.float32), host.slab.sharding)
    other = dataclasses.replace(host, slab=slab)
    monkeypatch.setattr(decoder, "_store", dataclasses.replace(decoder._store, host=other))
    with pytest.raises(RuntimeError, match="logits of 'some missed' differ"):
        bench._check_logits()


def test_table_compares_medians() -> None:
    """Ratios of means, or against the wrong variant."""
    times = [[8.0, 10.0, 90.0], [11.0] * 3, [11.0, 22.0, 22.0], [33.0] * 3]
    samples: dict[str, list[float]] = dict(zip(VARIANTS, times, strict=True))
    row = format_table([Timing(4, 8192, 0.05, samples)]).splitlines()[-1]
    cells = [cell.strip() for cell in row.split("|")[1:-1]]
    assert cells[:3] == ["4", "8,192", "10.00 (8.00 to 90.00)"]
    assert cells[-4:] == ["5.0%", "1.100", "+100.0%", "+200.0%"]
