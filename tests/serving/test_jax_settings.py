"""Settings of jax that a process has made for itself: none changes a token or refuses a program."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

from glm53 import SamplingParams, ServingLoop
from glm53.checkpoint import convert_checkpoint
from serving.engine.compile_counter import CompileCounter
from serving.engine.engine import Engine
from tests.helpers.toy_engine import finish, request, tokens, toy_options

pytestmark = pytest.mark.compiles

SETTINGS: list[tuple[str, Any]] = [
    ("jax_enable_x64", True),
    ("jax_numpy_dtype_promotion", "strict"),
    ("jax_numpy_rank_promotion", "raise"),
    ("jax_threefry_partitionable", False),
    ("jax_default_matmul_precision", "bfloat16"),
    ("jax_debug_nans", True),
    ("jax_debug_infs", True),
    ("jax_disable_jit", True),
    ("jax_transfer_guard", "disallow"),
    ("jax_default_prng_impl", "rbg"),
    ("jax_legacy_prng_key", "error"),
]


@contextlib.contextmanager
def process_wide(*settings: tuple[str, Any]) -> Iterator[None]:
    """Settings as the environment makes them, for all threads."""
    guards = [f"jax_transfer_guard_{way}" for way in ("host_to_device", "device_to_host")]
    guards.append("jax_transfer_guard_device_to_device")
    names = [*dict(settings), *guards]
    before = {name: getattr(jax.config, name) for name in names}
    try:
        for name, value in settings:
            jax.config.update(name, value)
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


def served(engine: Engine) -> list[tuple[list[int], float | None]]:
    """Tokens and their log-probability of requests that choose in all ways."""
    kinds: list[dict[str, Any]] = [
        {"logprobs": 1},
        {"temperature": 1.0, "seed": 7, "top_p": 0.9, "logprobs": 1},
        {"temperature": 0.7, "seed": 8, "frequency_penalty": 0.5, "logit_bias": {3: 1.0}},
    ]
    requests = [
        request(engine, str(number), tokens(number, 20 + 40 * number), **kind)
        for number, kind in enumerate(kinds)
    ]
    outputs = [output for each in finish(engine, *requests) for output in each.outputs]
    return [(output.token_ids, output.cumulative_logprob) for output in outputs]


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    return Engine(toy_options(folder))


@pytest.fixture(scope="module")
def expected(engine: Engine) -> list[tuple[list[int], float | None]]:
    served(engine)
    return served(engine)  # With everything cached and compiled.


@pytest.mark.parametrize(("name", "value"), SETTINGS)
def test_serves_the_same(engine: Engine, expected: Any, name: str, value: Any) -> None:
    """Tokens that a setting changes, or a program or operation that it reaches."""
    counter = CompileCounter()
    with process_wide((name, value)):
        assert served(engine) == expected
    assert counter.count == 0


def test_an_ambient_mesh(engine: Engine, expected: Any) -> None:
    """A mesh of the caller's, with an axis of our name, and a device of its choice."""
    counter = CompileCounter()
    with (
        jax.set_mesh(jax.make_mesh((2,), ("model",), devices=jax.devices()[2:])),
        jax.default_device(jax.devices()[3]),
    ):
        assert served(engine) == expected
        assert not jax.sharding.get_abstract_mesh().empty
    assert counter.count == 0


def test_from_start_to_end(engine: Engine, expected: Any, folder: Path, tmp_path: Path) -> None:
    """Weights that cannot be loaded or converted, a prefix of which the digest is another, or a
    thread of ours that goes by other settings."""
    finish(engine, request(engine, "cached", tokens(5, 40)))
    engine.export_prefix(tokens(5, 40), tmp_path / "prefix")
    greedy = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    with process_wide(*SETTINGS), jax.set_mesh(jax.make_mesh((2,), ("x",))):
        convert_checkpoint(folder, tmp_path / "converted")
        other = Engine(toy_options(tmp_path / "converted"))
        assert served(other) == expected
        assert other.import_prefix(tmp_path / "prefix") == 40
        with ServingLoop(toy_options(folder), warm_up=False) as loop:
            stream = loop.submit({"prompt_token_ids": tokens(0, 20)}, greedy)
            assert stream.result(timeout=60).outputs[0].token_ids == expected[0][0]
