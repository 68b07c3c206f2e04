"""Unknown options: what they are called here, for those who come from elsewhere."""

import dataclasses
import inspect
import re
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from glm53 import LLM, EngineOptions, SamplingParams
from serving.options.engine_options import LLMOptions
from serving.options.other_names import ENGINE_NAMES, FORMAT_NAMES, SAMPLING_NAMES


@pytest.mark.parametrize("kind", [LLM, EngineOptions])
@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("gpu_memory_utilization", "it is called memory_fraction here"),
        ("swap_space", "it is called host_memory_gib here"),
        ("tp_size", "it is called tensor_parallel_size here"),
        ("trust_remote_code", "no code of a checkpoint is run"),
        ("enforce_eager", "every step is compiled"),
        ("tokenizer", "the tokenizer is that of the model's directory"),
        ("block_size", "the kernels fix the size of a page"),
        ("quantization", "the checkpoint says how it is quantised"),
        ("seed", "it is of a request: pass it to SamplingParams"),
        ("cpu_offload_gb", "weights stay on the devices"),
        ("enable_hierarchical_cache", "kv_policy and host_memory_gib"),
        ("kv_transfer_config", "kv_policy and host_memory_gib"),
        ("rope_scaling", "config.json of the model's directory"),
        ("max_num_seq", "did you mean 'max_num_seqs'"),
    ],
)
def test_options_of_an_engine(kind: Any, name: str, hint: str) -> None:
    """Named with what to do instead, before anything is loaded."""
    with pytest.raises(TypeError, match=f"^{kind.__name__} takes no '{name}': {hint}"):
        kind(**{name: 1})


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("max_new_tokens", ": it is called max_tokens here"),
        ("best_of", ": ask for n"),
        ("use_beam_search", ": there is no beam search"),
        ("guided_json", ": output is not held to a grammar"),
        ("temprature", r": did you mean 'temperature'\?"),
        ("max_length", ": max_tokens limits the output alone, without the prompt"),
        ("bad_words_ids", ": bad_words takes texts"),
        ("no_stop_trim", ": it is called include_stop_str_in_output here"),
        ("extra_args", ": user code cannot run between tokens"),
        ("xyzzy", "$"),
        ("bos_token_id", "$"),
        ("flat_logprobs", "$"),
    ],
)
def test_sampling_parameters(name: str, hint: str) -> None:
    """Named with what to do instead, if that is known."""
    fields: dict[str, Any] = {name: 1}
    with pytest.raises(TypeError, match=f"^SamplingParams takes no '{name}'{hint}"):
        SamplingParams(**fields)


@pytest.mark.parametrize(
    ("kind", "names"), [(EngineOptions, ENGINE_NAMES), (SamplingParams, SAMPLING_NAMES)]
)
def test_tables(kind: Any, names: dict[str, str]) -> None:
    """What a table sends to is there, and what it renames is not."""
    known = {field.name for field in dataclasses.fields(kind)}
    called = {re.sub(r".* called (\w+) here", r"\1", hint) for hint in names.values()}
    assert {name for name in called if " " not in name} <= known
    assert not names.keys() & known


def test_warm_up() -> None:
    """An option of what has an engine, which is none of the engine itself."""
    fields: dict[str, Any] = {"warm_up": True}
    with pytest.raises(TypeError, match="no 'warm_up': pass it to LLM or ServingLoop"):
        EngineOptions(**fields)


@pytest.mark.usefixtures("as_a_user")
@pytest.mark.parametrize("name", ["dtype", "kv_cache_dtype"])
@pytest.mark.parametrize("value", FORMAT_NAMES)
def test_formats_of_numbers(name: str, value: str) -> None:
    """Refused with the format to take, also where another engine would take them."""
    options: dict[str, Any] = {name: value}
    with pytest.raises(
        ValueError, match=f"{name} must be .*got '{value}': .*{FORMAT_NAMES[value]}"
    ):
        LLM(**options)


@pytest.mark.usefixtures("as_a_user")
@pytest.mark.parametrize(
    ("value", "hint"),
    [
        (jnp.bfloat16, "pass the text 'bfloat16'"),
        (np.float32, "pass the text 'float32'"),
        (np.dtype("bfloat16"), "pass the text 'bfloat16'"),
        (np.float16, "the range of float16 is too small, use 'bfloat16'"),
    ],
)
def test_formats_that_are_types(value: Any, hint: str) -> None:
    """Refused with the text to give."""
    with pytest.raises(ValueError, match=f"dtype must be .*: {hint}"):
        LLM(dtype=value)


def test_signature_of_llm() -> None:
    """An option that LLM does not show, or an error that names a class which nobody called."""
    shown = inspect.signature(LLM).parameters
    assert list(shown.values()) == list(inspect.signature(LLMOptions).parameters.values())
    positional: Any = ("tiny", "float32")
    with pytest.raises(TypeError, match=r"^too many positional arguments$"):
        LLM(*positional)
