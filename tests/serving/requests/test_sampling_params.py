"""Fields of SamplingParams: ranges, defaults, and what a model's own file fills in."""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from serving.options.engine_options import EngineOptions
from serving.requests.generation_config import GenerationConfig
from serving.requests.sampling_params import SamplingParams

NAN, INF = float("nan"), float("inf")
BAD = [
    ("temperature", [-0.1, NAN, INF, 10**400, True, "1"]),
    ("top_p", [0, -1, 1.01, NAN, "x"]),
    ("top_k", [-2, 1.5, True, 2**31]),
    ("min_p", [-0.1, 1.1, NAN]),
    ("repetition_penalty", [0, -1, 1e7, INF, NAN]),
    ("presence_penalty", [-2.1, 2.1, NAN, None]),
    ("frequency_penalty", [-2.1, 2.1, INF]),
    ("seed", [1.5, 2**64, -(2**63) - 1, "7", True]),
    ("n", [0, -1, 1.5, None, True, 2**14 + 1]),
    ("stop", ["", [""], [1], 5, ["ok", None]]),
    ("stop_token_ids", [5, [-1], ["a"], [True]]),
    ("include_stop_str_in_output", [1, None]),
    ("ignore_eos", ["yes", 0]),
    ("min_tokens", [-1, 1.5, None]),
    ("max_tokens", [-1, -3, 1.5, True]),
    ("logprobs", [-2, 21, 1.5, True]),
    ("prompt_logprobs", [-2, 21]),
    ("logit_bias", [[1], {"1": 2.0}, {1: "x"}, {-1: 0.0}, {1: 101}, {1: NAN}]),
    ("allowed_token_ids", [[], [-1], 5, ["a"]]),
    ("bad_words", [[""], [5], 5]),
    ("detokenize", [None]),
    ("skip_special_tokens", ["no"]),
]


@pytest.mark.usefixtures("as_a_user")
@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in BAD for value in values]
)
def test_out_of_range(name: str, value: Any) -> None:
    """Refused by the name of the field."""
    with pytest.raises(ValueError, match=name):
        fields: dict[str, Any] = {name: value}
        SamplingParams(**fields)


@pytest.mark.compiles
@pytest.mark.usefixtures("as_a_user")
def test_numbers_of_numpy() -> None:
    """They are taken, and kept as Python's, which compare, pickle and print as such."""
    given: dict[str, Any] = dict(
        temperature=np.float32(0.5), top_k=np.int64(5), max_tokens=np.uint8(3), n=np.int32(2),
        ignore_eos=np.bool_(True), stop=np.str_("x"), stop_token_ids=np.array([1, 2]),
        allowed_token_ids=[np.int64(7)], logit_bias={np.int64(3): np.float32(0.25)},
        seed=np.array(4), top_p=jnp.float32(0.5), bad_words=np.array(["a", "b"]),
    )  # fmt: skip
    params = SamplingParams(**given)
    expected = SamplingParams(
        temperature=0.5, top_k=5, max_tokens=3, n=2, ignore_eos=True, stop="x",
        stop_token_ids=[1, 2], allowed_token_ids=[7], logit_bias={3: 0.25}, seed=4, top_p=0.5,
        bad_words=["a", "b"],
    )  # fmt: skip
    assert params == expected
    assert repr(params) == repr(expected)
    for name, value in (
        ("max_tokens", np.float32(3)),
        ("n", np.bool_(True)),
        ("stop", np.arange(2)),
    ):
        with pytest.raises(ValueError, match=name):
            SamplingParams(**{name: value})  # pyright: ignore[reportArgumentType]


@pytest.mark.usefixtures("as_a_user")
def test_options_of_numpy() -> None:
    """An engine's numbers, too."""
    options: dict[str, Any] = dict(
        max_num_seqs=np.int64(3), memory_fraction=np.float32(0.5), enable_prefix_caching=np.bool_(0)
    )
    expected = EngineOptions(max_num_seqs=3, memory_fraction=0.5, enable_prefix_caching=False)
    assert EngineOptions(**options) == expected
    assert repr(EngineOptions(**options)) == repr(expected)


def test_clone() -> None:
    """A copy that is equal, and shares nothing."""
    given = {3: 1.0}
    params = SamplingParams(logit_bias=given, stop=["x"], seed=7)
    clone = params.clone()
    assert clone == params
    assert clone is not params
    assert clone.logit_bias is not params.logit_bias
    given[4] = 2.0
    assert clone.logit_bias == params.logit_bias == {3: 1.0}


def test_seed_of_minus_one() -> None:
    """No seed, as with vLLM, also in a copy; its neighbours are seeds."""
    assert SamplingParams(seed=-1).seed is None
    assert SamplingParams(seed=-1).clone() == SamplingParams()
    assert (SamplingParams(seed=-2).seed, SamplingParams(seed=0).seed) == (-2, 0)


def test_fields_that_exclude_each_other() -> None:
    """More tokens at least than at most; stop texts without text."""
    with pytest.raises(ValueError, match="min_tokens 5 is more than max_tokens 4"):
        SamplingParams(min_tokens=5, max_tokens=4)
    with pytest.raises(ValueError, match="stop needs text"):
        SamplingParams(stop="x", detokenize=False)


def test_edges_are_allowed() -> None:
    """The ends of every range."""
    SamplingParams(
        temperature=0, top_p=1, top_k=-1, min_p=1, repetition_penalty=0.1, presence_penalty=-2,
        frequency_penalty=2, seed=2**64 - 1, logprobs=20, prompt_logprobs=-1, max_tokens=None,
        logit_bias={0: -100, 1: 100.0}, stop="x", min_tokens=3,
    )  # fmt: skip
    assert SamplingParams(stop="x").stop == ("x",)
    assert SamplingParams(stop=None, stop_token_ids=None, bad_words=None).stop_token_ids == ()
    assert SamplingParams(seed=-(2**63)).seed == -(2**63)


def test_only_what_is_left_out_is_filled() -> None:
    """The model's file fills gaps; what the caller says stays, even if it says the default."""
    defaults = {"temperature": 0.6, "top_p": 0.95}
    filled = SamplingParams(top_p=1.0, seed=4).filled(defaults)
    assert (filled.temperature, filled.top_p, filled.top_k, filled.min_p) == (0.6, 1.0, 0, 0.0)
    assert (filled.repetition_penalty, filled.seed) == (1.0, 4)
    assert SamplingParams(temperature=0).filled(defaults).temperature == 0
    assert SamplingParams().filled({}).temperature == 1.0


def write(path: Path, value: object) -> Path:
    text = value if isinstance(value, str) else json.dumps(value)
    (path / "generation_config.json").write_text(text)
    return path


def test_generation_config(tmp_path: Path) -> None:
    """Known fields are read, others are not ours; one end id or several."""
    assert GenerationConfig.from_dir(tmp_path, 10) == GenerationConfig({}, frozenset())
    fields = {"temperature": 0.6, "top_k": 20, "eos_token_id": [3, 4], "max_length": 5}
    config = GenerationConfig.from_dir(write(tmp_path, fields), 10)
    assert config.sampling == {"temperature": 0.6, "top_k": 20}
    assert config.eos_token_ids == {3, 4}
    config = GenerationConfig.from_dir(write(tmp_path, {"eos_token_id": 9}), 10)
    assert config.eos_token_ids == {9}


@pytest.mark.parametrize(
    ("fields", "temperature"),
    [({"do_sample": False}, 0.0), ({"do_sample": False, "temperature": 0.5}, 0.5), ({}, None)],
)
def test_greedy_models(tmp_path: Path, fields: dict, temperature: float | None) -> None:
    """A model that is not to be sampled is greedy, unless it names a temperature."""
    config = GenerationConfig.from_dir(write(tmp_path, fields), 10)
    assert config.sampling.get("temperature") == temperature


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("{", "Expecting"),
        ([1], "list"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"eos_token_id": 10}, "eos_token_id 10.*vocab_size 10"),
        ({"eos_token_id": "x"}, "eos_token_id 'x'"),
    ],
)
@pytest.mark.usefixtures("as_a_user")
def test_damaged_generation_config(tmp_path: Path, value: object, message: str) -> None:
    """Refused with the file's name."""
    with pytest.raises(ValueError, match=rf"generation_config\.json: .*{message}"):
        GenerationConfig.from_dir(write(tmp_path, value), 10)
