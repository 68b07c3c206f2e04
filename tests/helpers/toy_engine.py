"""Engines of a toy model whose store is too small for all that runs on it."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from glm53 import LLM, EngineOptions, SamplingParams
from serving.engine.engine import Engine
from serving.requests.outputs import RequestOutput
from serving.requests.request import Request
from tests.helpers.toy_model import write_grouped_model

LONGEST = 256
PAGES = 8  # where three sequences may come to have twelve
SEQUENCES = 3


def toy_options(folder: Path, **options: Any) -> EngineOptions:
    """A model in the folder: one shape of a prefill, two of a decode."""
    if not (folder / "config.json").exists():
        write_grouped_model(folder, max_position_embeddings=4 * LONGEST)
    sizes: dict[str, Any] = {
        "max_model_len": LONGEST,
        "max_num_seqs": SEQUENCES,
        "max_num_batched_tokens": 32,
        "device_pages": 6,
        "host_memory_gib": 0.00005,  # 2 pages
        "row_cache_rows": 1,
    }
    return EngineOptions(model=folder, **(sizes | options))


def toy_llm(folder: Path) -> LLM:
    return LLM(**dataclasses.asdict(toy_options(folder)))


def tokens(seed: int, count: int) -> list[int]:
    return [seed, *np.random.default_rng(seed).integers(0, 256, count - 1).tolist()]


def request(engine: Engine, name: str, token_ids: list[int], **params: Any) -> Request:
    fields = {"temperature": 0, "max_tokens": 16, "ignore_eos": True} | params
    priority = fields.pop("priority", 0)
    prompt = {"prompt_token_ids": token_ids}
    return engine.input_processor.read(name, prompt, SamplingParams(**fields), priority)


def finish(engine: Engine, *requests: Request) -> list[RequestOutput]:
    """Adds requests that are not there yet, and runs to the end, checking integrity each step."""
    for one in requests:
        if one.sequences[0] not in engine.scheduler:
            engine.add(one)
    while engine.has_work:
        engine.step()
        engine.scheduler.check_integrity()
        engine.runner.cache.check_integrity()
    assert_idle(engine)
    return [one.output() for one in requests]


def assert_idle(engine: Engine) -> None:
    """No page is in use and none is lost; no sequence is kept."""
    cache = engine.runner.cache
    cache.check_integrity()
    engine.scheduler.check_integrity()
    assert len(engine.scheduler) == engine.scheduler.num_running == 0
    assert cache.pool.num_free + cache.pool.num_cached_only == cache.geometry.num_pages
    assert not len(engine.requests)
