"""Compiling at start-up: nothing is compiled afterwards, and nothing changes by it."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from serving.engine.compile_counter import CompileCounter
from serving.engine.engine import Engine
from serving.engine.warm_up import warm_up_programs
from serving.requests.request import Request
from tests.helpers.toy_engine import assert_idle, finish, request, tokens, toy_options

pytestmark = pytest.mark.compiles


def warm_engine(folder: Path, **options: Any) -> Engine:
    """One where a sequence may be longer than the device's pages."""
    sizes = {"max_model_len": 512, "host_memory_gib": 0.0002, "row_cache_rows": 64}
    return Engine(toy_options(folder, **sizes, **options), warm_up=True)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    return warm_engine(folder)


def varied(engine: Engine, seed: int) -> list[Request]:
    """Requests of all lengths and kinds, whose pages leave the device and which preempt each
    other."""
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 0.8, "seed": 1},
        {"logprobs": 0, "frequency_penalty": 1.0},
        {"prompt_logprobs": 5},
        {"temperature": 1.0, "top_p": 0.5, "logprobs": 20, "prompt_logprobs": 0},
        {"logprobs": -1, "prompt_logprobs": -1},
        {"logit_bias": {7: 3.0}, "min_tokens": 2, "stop_token_ids": [5]},
        {"n": 3, "temperature": 0.5},
    ]
    lengths = (1, 31, 32, 33, 450, 65, 130, 420)
    found = [
        request(
            engine, f"{number}", tokens(seed + number, length), max_tokens=min(56, length), **kind
        )
        for number, (kind, length) in enumerate(zip(kinds, lengths, strict=True))
    ]
    longer = [
        request(engine, f"l{number}", tokens(seed + number, 61), max_tokens=260, temperature=0.7)
        for number in range(8, 11)
    ]
    return [*found, *longer]


def test_serving_compiles_nothing(engine: Engine) -> None:
    """A program that start-up has missed, or an operation outside of all: requests that wait for
    the compiler."""
    before, counter = engine.metrics(), CompileCounter()
    for turn in range(2):
        finish(engine, *varied(engine, 100 * turn))
        cache = engine.runner.cache
        while cache.index.evict(cache.tick()):
            pass
        finish(engine, request(engine, "alone", tokens(30, 450), max_tokens=50))
        aborted = varied(engine, 100 * turn)
        for one in aborted:
            engine.add(one)
        for one in aborted:
            engine.step()
            engine.abort(one)
    finish(engine, request(engine, "last", tokens(1, 9)))
    after = engine.metrics()
    assert counter.count == after.compilations == 0
    assert after.num_preemptions > before.num_preemptions
    did = after.cache
    assert min(did.cached_tokens, did.staged_reads, did.row_cache_reads, did.offloaded_pages) > 0
    assert after.steps > 64, "long enough for the counts of selections to be read"


def test_padding_changes_nothing(engine: Engine) -> None:
    """A launch at start-up that writes a row, a page's place, a table or a token."""
    for one in varied(engine, 220)[:4]:
        engine.add(one)
    for _ in range(6):
        engine.step()

    def state() -> dict[str, np.ndarray]:
        device = engine.runner.cache.device
        leaves = jax.tree_util.tree_leaves_with_path((device.store, device.sequences))
        sampling = jax.tree_util.tree_leaves_with_path(engine.runner._sampling)
        return {jax.tree_util.keystr(path): np.array(leaf) for path, leaf in [*leaves, *sampling]}

    before = state()
    warm_up_programs(engine.runner)
    after = state()
    counts = {name for name in after if name.endswith("selections")}
    assert len(counts) == 1
    for name, array in after.items():
        expected = before[name] / 2 if name in counts else before[name]
        np.testing.assert_array_equal(array.view(np.uint8), expected.view(np.uint8), err_msg=name)
    for one in engine.requests.requests:
        engine.abort(one)
    assert_idle(engine)


def test_counter() -> None:
    """A compilation that is not counted, one that is counted for a counter made later, or a launch
    of what is compiled."""
    first = CompileCounter()
    double = jax.jit(lambda x: x * 2 + 17)
    double(np.zeros(3))
    assert first.count == 1
    second = CompileCounter()
    double(np.ones(3))
    assert (first.count, second.count) == (1, 0)
    jnp.arange(3731).block_until_ready()
    assert second.count >= 1


@pytest.mark.slow
def test_on_two_devices(folder: Path) -> None:
    """The same on a mesh, where arrays that lie elsewhere are other programs."""
    engine = warm_engine(folder, tensor_parallel_size=2)
    finish(engine, *varied(engine, 230))
    assert engine.metrics().compilations == 0
