"""Contexts of which the device holds a twentieth: the answers of a store that holds them all."""

import dataclasses
import functools
import gc
import json
from typing import Any

import numpy as np
import pytest

from glm53 import LLM, SamplingParams, chat
from kvcache import CacheCounters
from kvcache.prefix_transfer import PrefixImport
from serving.buckets import Buckets
from serving.engine_options import model_path

LONGEST = 131_072
NEW_TOKENS = 8
READING = {"max_model_len": 16_640, "max_num_seqs": 1, "max_num_batched_tokens": 192}
FEW_PAGES = 6  # of 260, and of the 129 of the shorter documents


def import_random_rows(llm: LLM, token_ids: list[int]) -> None:
    """Fills the cache with a prefix of whole pages: rows of no model, the same at every call."""
    geometry, random = llm._runner.geometry, np.random.default_rng(0)
    layers = (geometry.num_layers, geometry.row_format.width)
    index_layers = (geometry.num_index_layers, geometry.index_row_format.width)
    with PrefixImport(llm._runner.cache, token_ids) as prefix:
        for start in range(0, len(token_ids), 4096):
            count = min(4096, len(token_ids) - start)
            prefix.write(
                random.standard_normal((count, *layers), np.float32),
                random.standard_normal((count, *index_layers), np.float32),
            )
        prefix.finish()


def continue_imported(**options: Any) -> tuple[list[int], float | None, CacheCounters]:
    """Tokens and log-probability of an answer within 131,072 tokens, and what the cache did."""
    llm = LLM(max_model_len=LONGEST, max_num_seqs=1, **options)
    prompt = np.random.default_rng(1).integers(0, 1500, LONGEST - NEW_TOKENS).tolist()
    whole_pages = len(prompt) // 64 * 64
    import_random_rows(llm, prompt[:whole_pages])
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=1)
    (output,) = llm.generate({"prompt_token_ids": prompt}, params)
    assert output.num_cached_tokens == whole_pages
    llm._runner.cache.check_integrity()
    (completion,) = output.outputs
    return completion.token_ids, completion.cumulative_logprob, output.cache_counters


def test_longest_context() -> None:
    """A row id, place or count that overflows, or a row misplaced, far beyond what fits."""
    *expected, counters = continue_imported(kv_policy="resident")
    assert counters == CacheCounters(cached_tokens=counters.cached_tokens)
    gc.collect()  # The store refers to itself.
    # Fewer hot rows than a token selects.
    *found, counters = continue_imported(device_pages=102, host_memory_gib=0.4, hot_rows=48)
    assert found == expected
    assert min(counters.hot_reads, counters.staged_reads, counters.host_reads) > 0
    away = counters.hot_reads + counters.staged_reads + counters.host_reads
    assert away > 0.9 * (away + counters.resident_reads)


@functools.cache
def questions(document: str, count: int) -> list[list[int]]:
    """Prompts that ask for facts of one document."""
    lines = (model_path("tiny") / "needles.jsonl").read_text(encoding="utf-8").splitlines()
    found = next(line for line in map(json.loads, lines) if line["id"] == document)
    prompts = []
    for item in found["questions"][:count]:
        message = {"role": "user", "content": f"{found['text']}\n{item['question']}"}
        prompts.append(chat.render([message], add_generation_prompt=True))
    return prompts


def reader(**options: Any) -> LLM:
    llm = LLM(**READING, **options)
    # One shape of a prefill and one of a decode step.
    assert llm._runner._buckets.rows[-1] == READING["max_num_batched_tokens"]
    llm._runner._buckets = Buckets((READING["max_num_batched_tokens"],), (1,), (260,))
    return llm


@dataclasses.dataclass
class Readers:
    """Two that must answer alike."""

    resident: LLM
    spilling: LLM


@pytest.fixture(scope="module")
def readers() -> Readers:
    return Readers(
        reader(kv_policy="resident"),
        reader(device_pages=FEW_PAGES, host_memory_gib=0.1),
    )


@pytest.mark.parametrize("document", ["16000-0", "8000-0"])
def test_facts_of_a_document(readers: Readers, document: str) -> None:
    """A prefill or a decode step that reads a stale, lost or misplaced row of a page that left."""
    params = SamplingParams(temperature=0, max_tokens=20)
    for number, prompt in enumerate(questions(document, 3)):
        outputs = [
            llm.generate(prompt, params)[0] for llm in (readers.resident, readers.spilling)
        ]
        expected, found = (output.outputs[0] for output in outputs)
        assert found.token_ids == expected.token_ids
        num_tokens = len(outputs[1].prompt_token_ids)
        assert FEW_PAGES * 64 <= 0.05 * num_tokens
        if number:
            assert outputs[1].num_cached_tokens > 0.95 * num_tokens
        counters = outputs[1].cache_counters
        away = counters.hot_reads + counters.staged_reads + counters.host_reads
        assert away > 0.8 * (away + counters.resident_reads)
    readers.spilling._runner.cache.check_integrity()
