"""Contexts of which the device holds a twentieth: the answers of a store that holds them all."""

import gc
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from glm53 import LLM, SamplingParams, chat
from kvcache import CacheCounters
from kvcache.prefix_transfer import PrefixImport
from serving.engine.buckets import Buckets
from serving.options.engine_options import model_path
from tests.helpers.toy_model import write_grouped_model

pytestmark = pytest.mark.compiles
LONGEST = 131_072
NEW_TOKENS = 8
STEP_ROWS = 192
FEW_PAGES = 6  # of 250 that the longer document takes, of 125 that the shorter one does


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_grouped_model(path, max_position_embeddings=LONGEST)
    return path


def import_random_rows(llm: LLM, token_ids: list[int]) -> None:
    """Fills the cache with a prefix of whole pages: rows of no model, the same at every call."""
    geometry, random = llm._engine.runner.geometry, np.random.default_rng(0)
    layers = (geometry.num_layers, geometry.row_format.width)
    index_layers = (geometry.num_index_layers, geometry.index_row_format.width)
    with PrefixImport(llm._engine.runner.cache, token_ids) as prefix:
        for start in range(0, len(token_ids), 4096):
            count = min(4096, len(token_ids) - start)
            prefix.write(
                random.standard_normal((count, *layers), np.float32),
                random.standard_normal((count, *index_layers), np.float32),
            )
        prefix.finish()


def continue_imported(model: Path, **options: Any) -> tuple[list[int], float | None, CacheCounters]:
    """An answer that ends at 131,072 tokens, its log-probability, and what the cache did."""
    llm = LLM(model, max_model_len=LONGEST, max_num_seqs=1, **options)
    prompt = np.random.default_rng(1).integers(0, 256, LONGEST - NEW_TOKENS).tolist()
    whole_pages = len(prompt) // 64 * 64
    import_random_rows(llm, prompt[:whole_pages])
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=1)
    (output,) = llm.generate({"prompt_token_ids": prompt}, params)
    assert output.num_cached_tokens == whole_pages
    llm._engine.runner.cache.check_integrity()
    (completion,) = output.outputs
    return completion.token_ids, completion.cumulative_logprob, output.cache_counters


def read_elsewhere(counters: CacheCounters) -> float:
    """Share of the reads whose rows were on no page of the device."""
    away = counters.row_cache_reads + counters.staged_reads + counters.host_reads
    return away / (away + counters.resident_reads)


@pytest.mark.slow
def test_longest_context(toy: Path) -> None:
    """A row id, place or count that overflows, or a row misplaced, far beyond what fits."""
    *expected, _ = continue_imported(toy, kv_policy="resident")
    gc.collect()  # A store's memory is given back when its cycles are found.
    # Fewer row-cache rows than a token selects.
    *found, counters = continue_imported(toy, device_pages=102, row_cache_rows=8)
    assert found == expected
    assert min(counters.row_cache_reads, counters.staged_reads, counters.host_reads) > 0
    assert read_elsewhere(counters) > 0.5


def questions(name: str, count: int) -> list[str]:
    """Prompts that ask for facts of one document."""
    lines = (model_path("tiny") / "needles.jsonl").read_text(encoding="utf-8").splitlines()
    document = next(line for line in map(json.loads, lines) if line["id"] == name)
    contents = [f"{document['text']}\n{item['question']}" for item in document["questions"][:count]]
    return [
        chat.render([{"role": "user", "content": content}], add_generation_prompt=True)
        for content in contents
    ]


def reader(model: str | Path, **options: Any) -> LLM:
    llm = LLM(
        model, max_model_len=16_640, max_num_seqs=1, max_num_batched_tokens=STEP_ROWS, **options
    )
    # One shape of each step.
    pages = llm._engine.runner.geometry.max_pages_per_sequence
    llm._engine.runner.buckets = Buckets((STEP_ROWS,), (1,), (pages,), 64)
    return llm


def test_long_prompt(toy: Path) -> None:
    """16,384 tokens whose pages leave the device while the prompt is computed."""
    prompt = np.random.default_rng(2).integers(0, 256, 16_384).tolist()
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=1)
    found = []
    for options in ({"kv_policy": "resident"}, {"device_pages": 12}):
        llm = reader(toy, **options)
        (output,) = llm.generate({"prompt_token_ids": prompt}, params)
        llm._engine.runner.cache.check_integrity()
        found.append((output.outputs[0].token_ids, output.outputs[0].cumulative_logprob))
    assert found[0] == found[1]
    assert len(set(found[0][0])) > 10
    assert read_elsewhere(output.cache_counters) > 0.8


@pytest.mark.slow
@pytest.mark.parametrize("document", ["16000-0", "8000-0"])
def test_facts_of_a_document(document: str) -> None:
    """A prefill or a decode step that reads a stale, lost or misplaced row of a page that left."""
    resident = reader("tiny", kv_policy="resident")
    spilling = reader("tiny", device_pages=FEW_PAGES, host_memory_gib=0.1)
    params = SamplingParams(temperature=0, max_tokens=20)
    for number, prompt in enumerate(questions(document, 2)):
        (expected,), (found,) = resident.generate(prompt, params), spilling.generate(prompt, params)
        assert found.outputs[0].token_ids == expected.outputs[0].token_ids
        num_tokens = len(found.prompt_token_ids)
        assert num_tokens >= 20 * 64 * FEW_PAGES
        assert (found.num_cached_tokens > 0.98 * num_tokens) == (number > 0)
        assert read_elsewhere(found.cache_counters) > 0.5
    spilling._engine.runner.cache.check_integrity()
