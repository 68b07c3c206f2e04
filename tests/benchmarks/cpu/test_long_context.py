"""Long context with few pages on the device, at toy size, whatever time it takes."""

import dataclasses
from pathlib import Path

import pytest

from benchmarks.common.small_checkpoint import small_fields, write_checkpoint
from benchmarks.cpu import long_context
from benchmarks.cpu.long_context import (
    STORES,
    MeasuredLLM,
    Run,
    compare,
    decode,
    format_tables,
    prefill,
    store_options,
)
from tests.helpers.toy_model import SIZES

CONTEXT = 512


@pytest.fixture(scope="module")
def llms(tmp_path_factory: pytest.TempPathFactory) -> dict[str, MeasuredLLM]:
    path: Path = tmp_path_factory.mktemp("model")
    write_checkpoint(path, small_fields(max_position_embeddings=CONTEXT, **SIZES))
    return {
        store: MeasuredLLM(path, max_num_batched_tokens=16, **store_options(store, CONTEXT))
        for store in STORES
    }


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_context, "_VOCABULARY", SIZES["vocab_size"])
    monkeypatch.setattr(long_context, "_BLOCK", 100)


@pytest.mark.compiles
@pytest.mark.slow
@pytest.mark.parametrize("work", [decode, prefill])
def test_few_pages_give_the_same_tokens(llms: dict[str, MeasuredLLM], work) -> None:
    """Rows lost between the tiers, or a comparison that keeps all pages on the device."""
    runs = {store: work(llm, CONTEXT) for store, llm in llms.items()}
    compared = compare({store: [run] for store, run in runs.items()})
    hybrid = compared["hybrid"]
    assert len(set(hybrid.tokens)) > 3
    assert hybrid.device_pages == 4
    assert hybrid.slab_bytes * 2 == compared["resident"].slab_bytes
    assert hybrid.counters["missed_rows"] > 0
    assert hybrid.counters["staged_reads"] > 0
    assert compared["resident"].counters["missed_rows"] == 0
    for llm in llms.values():
        llm.cache.check_integrity()


def run(tokens_per_second: float, tokens: list[int], peak: int = 1 << 20) -> Run:
    names = ("resident_reads", "row_cache_reads", "staged_reads", "host_reads", "missed_rows")
    counters: dict[str, int] = dict.fromkeys((*names, "staged_bytes", "offloaded_pages"), 3)
    return Run(tokens_per_second, tokens, 1, 20, 1 << 20, 2 << 20, 3 << 20, peak, counters)


def test_other_tokens_are_refused() -> None:
    """A table of speeds although a run generated other tokens."""
    right, wrong = run(1.0, [1, 2]), run(1.0, [1, 3])
    with pytest.raises(RuntimeError, match="'hybrid' gave"):
        compare({"resident": [right, right], "hybrid": [right, wrong]})


def test_tables() -> None:
    """Inverted ratios, or the fastest run instead of the median."""
    runs = {
        "resident": [run(40.0, [1]), run(50.0, [1]), run(90.0, [1])],
        "hybrid": [run(20.0, [1]), run(25.0, [1], 9 << 20), run(80.0, [1], 10 << 20)],
    }
    lines = format_tables({"decode": compare(runs)}).splitlines()
    assert (
        lines[2] == "| decode | resident | 1 of 20 | 50.0 | 20.00 | 1.00 | 1.0 | 2.0 | 3.0 | 1.0 |"
    )
    assert lines[3] == "| decode | hybrid | 1 of 20 | 25.0 | 40.00 | 0.50 | 1.0 | 2.0 | 3.0 | 9.0 |"
    assert lines[-1] == "| decode | 3 | 3 | 3 | 3 | 3 | 0.0 | 3 |"
    assert dataclasses.asdict(compare(runs)["hybrid"])["tokens"] == [1]
