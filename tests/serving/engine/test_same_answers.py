"""Greedy answers are the same bits however requests are batched, cached, moved or preempted."""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from glm53 import SamplingParams
from serving.engine.engine import Engine
from serving.requests.request import Request
from tests.helpers.toy_engine import assert_idle, tokens, toy_options

pytestmark = pytest.mark.compiles

PROMPTS = [
    tokens(1, 90),
    tokens(2, 100),
    [*tokens(1, 90)[:80], *tokens(3, 20)],  # begins as the first
    tokens(4, 1),
]
OUTPUT_TOKENS = [110, 100, 90, 4]

Answer = tuple[list[int], list[float]]

STORES: dict[str, dict[str, Any]] = {
    "resident": {"kv_policy": "resident"},
    "swap": {"kv_policy": "swap", "row_cache_rows": None},
    "hybrid": {},
}
"""Each holds the longest request, and not all that may run beside it."""


def make(folder: Path, num_devices: int = 1, **options: Any) -> Engine:
    if options.get("kv_policy") == "resident":
        options |= {"host_memory_gib": None, "row_cache_rows": None}
    elif num_devices > 1:
        # As many pages, which are larger.
        options |= {"device_pages": 4, "host_memory_gib": 0.00005}
    return Engine(toy_options(folder, tensor_parallel_size=num_devices, **options))


def request(engine: Engine, number: int) -> Request:
    params = SamplingParams(
        temperature=0, max_tokens=OUTPUT_TOKENS[number], ignore_eos=True, logprobs=0
    )
    prompt = {"prompt_token_ids": PROMPTS[number]}
    return engine.input_processor.read(str(number), prompt, params)


def answer(one: Request) -> Answer:
    output = one.output()
    assert output.error is None
    part = output.outputs[0]
    assert part.logprobs is not None and len(part.token_ids) == len(part.logprobs)
    return part.token_ids, [entry.token_logprob for entry in part.logprobs]


def run(engine: Engine) -> None:
    while engine.has_work:
        engine.step()
        engine.scheduler.check_integrity()
        engine.runner.cache.check_integrity()
    assert_idle(engine)


@pytest.fixture(scope="module")
def alone(folder: Path) -> Any:
    """Answers of requests that have a store for themselves, by number of devices."""

    @functools.cache
    def answers(num_devices: int) -> list[Answer]:
        # The store of "resident", whose steps are compiled anyway; each request has it for itself.
        engine = make(folder, num_devices, kv_policy="resident", enable_prefix_caching=False)
        found = []
        for number in range(len(PROMPTS)):
            one = request(engine, number)
            engine.add(one)
            run(engine)
            assert one.output().num_cached_tokens == 0
            found.append(answer(one))
        return found

    return answers


def check(engine: Engine, expected: Sequence[Answer]) -> None:
    """Arrivals, some of which are aborted, some come again, and those that count."""
    doomed = []
    for number in (0, 1, 3, 2):
        doomed.append(request(engine, number))
        engine.add(doomed[-1])
        for _ in range(4):
            engine.step()
    for one in doomed:
        engine.abort(one)
    engine.runner.cache.check_integrity()
    counted = [request(engine, number) for number in range(len(PROMPTS))]
    for one in counted:
        engine.add(one)
        engine.step()
    run(engine)
    assert [answer(one) for one in counted] == expected


@pytest.mark.parametrize(
    ("kv_policy", "num_devices"), [("resident", 1), ("swap", 1), ("hybrid", 1), ("hybrid", 2)]
)
def test_same_answers(folder: Path, alone: Any, kv_policy: str, num_devices: int) -> None:
    """A token that depends on what else runs, on where a page lies, on the turn of a request that
    was preempted, or on rows that another has left, also one that was aborted."""
    expected = alone(num_devices)
    for enable_prefix_caching in (True, False):
        engine = make(
            folder,
            num_devices,
            enable_prefix_caching=enable_prefix_caching,
            **STORES[kv_policy],
        )
        check(engine, expected)
        counters, metrics = engine.scheduler.counters, engine.metrics()
        assert counters.preempted > 0 or kv_policy == "hybrid"  # which has room for more
        assert (counters.cached_tokens > 0) == enable_prefix_caching
        if kv_policy == "hybrid" and enable_prefix_caching:
            cache = metrics.cache
            assert cache.row_cache_reads + cache.staged_reads + cache.host_reads > 0
        if kv_policy == "swap" and enable_prefix_caching:
            assert engine.runner.cache.residency.pages_onloaded > 0
    same = [found[0] for found in alone(1)] == [found[0] for found in expected]
    assert same, "other tokens on two devices"
