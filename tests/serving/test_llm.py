"""The offline entry point: outputs, limits, and what bad input gets."""

import contextlib
import gc
import json
import re
import shutil
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from glm53 import LLM, SamplingParams
from glm53.checkpoint import CheckpointError
from serving.engine.model_runner import ModelRunner
from serving.scheduler import Scheduler
from tests.helpers.golden import GOLDEN, golden_arrays

pytestmark = pytest.mark.compiles
# One bucket of rows, so that one prefill step is compiled.
SMALL: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": 2, "max_num_batched_tokens": 16}
FREE = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)


def greedy(max_tokens: int | None = 16, **fields: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, **fields)


@pytest.fixture(scope="module")
def llm() -> LLM:
    """The golden float32 model, with pages for two short sequences and no tokenizer."""
    return LLM(GOLDEN / "tiny_f32", device_pages=10, kv_policy="resident", **SMALL)


@pytest.fixture(scope="module")
def text_llm(tiny_llm: LLM) -> LLM:
    return tiny_llm


def ids(array: np.ndarray) -> dict:
    return {"prompt_token_ids": array.tolist()}


def assert_idle(llm: LLM) -> None:
    """No page is in use and none is lost."""
    cache = llm._engine.runner.cache
    cache.check_integrity()
    assert cache.pool.num_free + cache.pool.num_cached_only == cache.geometry.num_pages


def test_golden_tokens_in_a_crowd(llm: LLM) -> None:
    """More prompts than slots and pages, of different lengths: each gets its own golden tokens,
    in the order of the prompts, and all pages come back."""
    golden = golden_arrays("tiny_f32")
    expected = {name: golden[f"{name}_e5_greedy"].tolist() for name in ("p0", "p1")}
    names = ["p0", "p1", "p0", "p1", "p1", "p0"]
    params = [greedy(count, ignore_eos=True) for count in (32, 5, 1, 32, 17, 32)]
    outputs = llm.generate([ids(golden[f"{name}_ids"]) for name in names], params, use_tqdm=False)
    for name, param, output in zip(names, params, outputs, strict=True):
        (completion,) = output.outputs
        assert completion.token_ids == expected[name][: param.max_tokens]
        assert completion.finish_reason == "length"
        assert completion.stop_reason is None
        assert output.prompt_token_ids == golden[f"{name}_ids"].tolist()
        assert output.finished
    assert len({output.request_id for output in outputs}) == len(outputs)
    assert_idle(llm)


def test_two_devices_give_the_golden_tokens() -> None:
    """The same through a mesh of two."""
    golden = golden_arrays("tiny_f32")
    llm = LLM(GOLDEN / "tiny_f32", tensor_parallel_size=2, **SMALL)
    (output,) = llm.generate(ids(golden["p0_ids"]), FREE)
    assert output.outputs[0].token_ids == golden["p0_e5_greedy"].tolist()
    assert_idle(llm)


def test_stop_ids(llm: LLM) -> None:
    """A stop id ends the output, is part of its ids, and is named, also with `ignore_eos`."""
    golden = golden_arrays("tiny_f32")
    expected = golden["p0_e5_greedy"].tolist()
    stop = expected[4]
    assert stop not in expected[:4]
    params = greedy(32, stop_token_ids=[stop], ignore_eos=True)
    (output,) = llm.generate(ids(golden["p0_ids"]), params)
    assert output.outputs[0].token_ids == expected[:5]
    assert output.outputs[0].finish_reason == "stop"
    assert output.outputs[0].stop_reason == stop


def test_end_of_sequence(text_llm: LLM) -> None:
    """An end-of-sequence id ends the output without a stop reason and is not in its text."""
    prompt = "[gMASK]<sop><|system|>Reasoning Effort: Max<|user|>The code of mint is 31-94.\n"
    prompt += "What is the code of mint?<|assistant|><think>"
    (output,) = text_llm.generate(prompt, greedy(40))
    completion = output.outputs[0]
    assert completion.token_ids[-1] in text_llm.config.eos_token_ids
    assert (completion.finish_reason, completion.stop_reason) == ("stop", None)
    assert completion.text == "</think>The code of mint is 31-94."
    assert output.prompt == prompt
    (longer,) = text_llm.generate(prompt, greedy(40, ignore_eos=True))
    assert len(longer.outputs[0].token_ids) == 40
    assert longer.outputs[0].token_ids[: len(completion.token_ids)] == completion.token_ids


def test_text_and_its_ids_are_one_prompt(text_llm: LLM) -> None:
    """Text, a dict with text, and the text's ids give the same tokens; one prompt needs no list."""
    assert text_llm.tokenizer is not None
    text = "The Congress of the United States"
    forms = [text, {"prompt": text}, {"prompt_token_ids": text_llm.tokenizer.encode(text)}]
    outputs = text_llm.generate(forms, greedy(8))
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1
    (single,) = text_llm.generate(text, greedy(8))
    assert single.outputs[0].text == outputs[0].outputs[0].text != ""
    (short,) = text_llm.generate(text, SamplingParams(temperature=0))
    assert len(short.outputs[0].token_ids) == 16


def test_prompt_logprobs_of_the_whole_vocabulary(llm: LLM) -> None:
    """-1 gives every token's log-probability at every position but the first."""
    golden = golden_arrays("tiny_f32")
    prompt, logits = golden["p0_ids"], golden["p0_e5_logits"].astype(np.float64)
    params = greedy(1, prompt_logprobs=-1)
    (output,) = llm.generate(ids(prompt), params)
    found = output.prompt_logprobs
    assert found is not None
    assert len(found) == len(prompt)
    assert found[0] is None
    expected = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    for position in range(1, len(prompt)):
        entry = found[position]
        assert entry is not None
        assert len(entry) == logits.shape[1]
        got = np.array([entry[token].logprob for token in range(logits.shape[1])])
        np.testing.assert_allclose(got, expected[position - 1], rtol=0, atol=4e-4)
        best = next(iter(entry))
        assert entry[best].rank == 1
        assert best == int(np.argmax(logits[position - 1]))


def test_prompt_logprobs_of_a_few(text_llm: LLM) -> None:
    """k gives the k best and the prompt's own token, each with its rank and text."""
    params = greedy(1, prompt_logprobs=2)
    (output,) = text_llm.generate("The Congress of the United States", params)
    assert output.prompt_logprobs is not None
    for token, entry in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True):
        assert entry is not None
        assert len(entry) in (2, 3)
        ranks = sorted(entry[other].rank for other in entry)
        assert ranks[:2] == [1, 2]
        assert token in entry
        assert entry[token].decoded_token is not None
        with pytest.raises(KeyError):
            entry[1599]


def test_length_limit(llm: LLM) -> None:
    """The output stops at max_model_len; a prompt that leaves no room is refused."""
    prompt = np.full(505, 7)
    (output,) = llm.generate(ids(prompt), greedy(None, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 7
    assert output.outputs[0].finish_reason == "length"
    (last,) = llm.generate(ids(prompt), greedy(100, ignore_eos=True))
    assert len(last.outputs[0].token_ids) == 7
    with pytest.raises(ValueError, match=r"512 tokens.*max_model_len 512"):
        llm.generate(ids(np.full(512, 7)))
    assert_idle(llm)


BAD_PROMPTS = [
    ({"prompt_token_ids": []}, ValueError, "is empty"),
    ({"prompt_token_ids": [1, 256]}, ValueError, "256.*0..255"),
    ({"prompt_token_ids": [-1]}, ValueError, "-1"),
    ({"prompt_token_ids": [1.5]}, ValueError, "1.5"),
    ({"prompt_token_ids": [True]}, ValueError, "True"),
    ([], ValueError, "is empty"),
    ([1, "x"], ValueError, "token id 'x'"),
    (b"ab", TypeError, "bytes"),
    ({"prompt_token_ids": "12"}, TypeError, "list of ids"),
    ({"prompt_token_ids": 5}, TypeError, "list of ids"),
    ({"prompt_token_ids": b"abc"}, TypeError, "list of ids"),
    ({"prompt_token_ids": np.array(3)}, TypeError, "list of ids"),
    ({"prompt_token_ids": [1], "prompt": 5}, TypeError, "must be text"),
    ({1: 2, "x": 3}, ValueError, "unknown field 1"),
    ({"token_ids": [1]}, ValueError, "unknown field 'token_ids'"),
    ({}, ValueError, "needs"),
    ("text", ValueError, "no tokenizer.json"),
    (5, TypeError, "int"),
    (None, TypeError, "NoneType"),
]


@pytest.mark.usefixtures("as_a_user")
@pytest.mark.parametrize(("prompt", "kind", "message"), BAD_PROMPTS)
def test_bad_prompt_among_good_ones(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, prompt, kind, message: str
) -> None:
    """A bad prompt is named by its index and refused before anything is computed."""
    monkeypatch.setattr(ModelRunner, "launch_prefill", lambda *_: pytest.fail("a prompt was begun"))
    good = {"prompt_token_ids": [1, 2, 3]}
    with pytest.raises(kind, match=rf"prompts\[1\].*{message}"):
        llm.generate([good, prompt, good], FREE)


def test_text_that_is_none(text_llm: LLM) -> None:
    """Empty text and lone surrogates are no prompts."""
    with pytest.raises(ValueError, match=r"prompts\[0\]: the prompt is empty"):
        text_llm.generate("")
    with pytest.raises(ValueError, match=r"prompts\[1\]: the prompt is not valid Unicode"):
        text_llm.generate(["good", "bad \ud800"])


@pytest.mark.usefixtures("as_a_user")
def test_prompts_that_are_none(llm: LLM) -> None:
    """A number, or bytes, in place of prompts; parameters that are none."""
    for prompts in (5, None, b"abc", bytearray(b"abc")):
        with pytest.raises(TypeError, match="prompts must be"):
            llm.generate(prompts)  # pyright: ignore[reportArgumentType]
    for params in ("x", {"temperature": 0}, 5):
        with pytest.raises(TypeError, match="sampling_params must be"):
            llm.generate([[1]], params)  # pyright: ignore[reportArgumentType]


@pytest.mark.usefixtures("as_a_user")
def test_forms_of_prompts(llm: LLM) -> None:
    """Bare ids are one prompt, lists of ids several; iterators are drawn to their end."""
    one, other = [7, 8, 9], [5, 6]
    (expected,), (second,) = (llm.generate(ids(np.array(each)), greedy(4)) for each in (one, other))
    several: list[Any] = [
        [one, other],
        (tuple(one), other),
        iter([one, other]),
        [np.array(one), other],
        (prompt for prompt in ({"prompt_token_ids": one}, other)),
    ]
    for prompts in several:
        found = llm.generate(prompts, (greedy(4) for _ in range(2)))
        assert [output.outputs for output in found] == [expected.outputs, second.outputs]
    for prompt in (one, tuple(one), np.array(one), range(7, 10), [one], np.array([one])):
        (output,) = llm.generate(prompt, greedy(4))
        assert (output.prompt_token_ids, output.outputs) == (one, expected.outputs)
    streamed = dict(llm.generate_iter(iter([one, other]), greedy(4)))
    assert [streamed[index].outputs for index in range(2)] == [expected.outputs, second.outputs]


@pytest.mark.usefixtures("as_a_user")
def test_serving_what_is_no_pair(llm: LLM) -> None:
    """Prompts without parameters, of which the letters are taken for them."""
    for requests in (["ab"], [[1, 2, 3]], ["The"]):
        with pytest.raises(TypeError, match=r"requests\[0\] must be a pair \(prompt, SamplingP"):
            list(llm.serve(requests))  # pyright: ignore[reportArgumentType]
    assert_idle(llm)


def test_refused_texts_come_back(llm: LLM) -> None:
    """An output that does not tell whose it is."""
    prompts = ["a", {"prompt": "b"}, {"prompt": "c", "prompt_token_ids": [9999]}, [9999]]
    outputs = llm.generate(prompts, on_error="return")
    assert all(output.error for output in outputs)
    assert [output.prompt for output in outputs] == ["a", "b", "c", None]


@pytest.mark.usefixtures("as_a_user")
def test_refused_before_the_weights_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A format that does not fit the model costs no loading."""
    monkeypatch.setattr(
        "serving.engine.engine.load_checkpoint", lambda *_, **__: pytest.fail("loaded")
    )
    with pytest.raises(ValueError, match="max_model_len"):
        LLM(GOLDEN / "tiny_f32", max_model_len=10**6)
    with pytest.raises(ValueError, match="kv_cache_dtype"):
        LLM(GOLDEN / "tiny_f32", kv_cache_dtype="int8")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="warm_up must be True or False, got 'x'"):
        LLM(GOLDEN / "tiny_f32", warm_up="x")  # pyright: ignore[reportArgumentType]
    with pytest.raises(FileNotFoundError, match="is not a directory: the built-in model is the t"):
        LLM(Path("tiny"))


def test_calls_beside_an_open_iterator(llm: LLM) -> None:
    """An iterator that nobody reads from, with more prompts waiting than have slots."""
    golden = golden_arrays("tiny_f32")
    prompts = [ids(golden[f"{name}_ids"]) for name in ("p0", "p1")]
    expected = [golden[f"{name}_e5_greedy"].tolist() for name in ("p0", "p1")]
    iterator = llm.generate_iter(prompts * 3, FREE, stream=True)
    next(iterator)
    (output,) = llm.generate(prompts[0], FREE)
    assert output.outputs[0].token_ids == expected[0]
    finished = {index: output for index, output in iterator if output.finished}
    for index in range(6):
        assert finished[index].outputs[0].token_ids == expected[index % 2]
    assert_idle(llm)


def test_what_is_done_stays_cached_until_the_step_ends(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages of a prompt that the step's other sequences take before its caller can export them."""
    golden, calls, finish = golden_arrays("tiny_f32"), [], Scheduler.finish

    def record(name: str) -> None:
        method = getattr(ModelRunner, name)
        monkeypatch.setattr(ModelRunner, name, lambda *args: calls.append(name) or method(*args))

    record("launch_decode")
    monkeypatch.setattr(Scheduler, "finish", lambda *args: calls.append("finish") or finish(*args))
    iterator = llm.generate_iter(ids(golden["p0_ids"]), FREE, stream=True)
    with contextlib.closing(iterator):  # pyright: ignore[reportArgumentType]
        next(iterator)
        calls.clear()
        llm.generate(ids(golden["p1_ids"]), greedy(1))
        assert calls[-2:] == ["launch_decode", "finish"]
        assert calls.count("finish") == 1
    assert_idle(llm)


@pytest.mark.usefixtures("as_a_user")
def test_wrong_parameters_among_good_ones(llm: LLM) -> None:
    """Of one of the requests that are drawn one by one: the others are served."""
    good, bad = (ids(np.arange(5)), greedy(2)), (ids(np.arange(5)), "x")
    found = dict(llm.serve([good, bad, good]))  # pyright: ignore[reportArgumentType]
    assert found[1].error == "parameters must be SamplingParams, got str"
    assert found[0].outputs[0].token_ids == found[2].outputs[0].token_ids
    assert found[0].error is found[2].error is None


def test_no_prompts(llm: LLM) -> None:
    """An empty list gives an empty list."""
    assert llm.generate([]) == []


def test_more_pages_than_there_are() -> None:
    """A request that the whole store cannot hold is refused, naming the limit."""
    llm = LLM(GOLDEN / "tiny_f32", device_pages=2, kv_policy="resident", **SMALL)
    with pytest.raises(ValueError, match=r"3 pages.*has 2 .*at most 9, or raise device_pages$"):
        llm.generate(ids(np.full(120, 7)), greedy(20))
    assert_idle(llm)


@pytest.mark.usefixtures("as_a_user")
def test_params_for_another_number_of_prompts(llm: LLM) -> None:
    """One set of parameters for all prompts, or one each."""
    good = {"prompt_token_ids": [1]}
    with pytest.raises(ValueError, match="2 sampling_params for 1 prompts"):
        llm.generate([good], [FREE, FREE])
    with pytest.raises(TypeError, match=r"sampling_params\[0\]"):
        llm.generate([good], [{"max_tokens": 3}])  # pyright: ignore[reportArgumentType]


BAD_ARGUMENTS = [
    ({"dtype": "float16"}, "dtype"),
    ({"kv_cache_dtype": "int8"}, "kv_cache_dtype"),
    ({"max_model_len": 5000}, "max_model_len 5000.*4096"),
    ({"max_model_len": 0}, "max_model_len"),
    ({"max_num_seqs": 0}, "max_num_seqs"),
    ({"max_num_seqs": None}, "max_num_seqs"),
    ({"max_num_seqs": 10**30}, "max_num_seqs"),
    ({"model": 7}, "model must be text"),
    ({"model": ""}, "model must be text or a path, got ''"),
    ({"max_num_batched_tokens": 0}, "max_num_batched_tokens"),
    ({"tensor_parallel_size": None}, "tensor_parallel_size"),
    ({"device_pages": -1}, "device_pages"),
    ({"device_pages": 3}, "device_pages must be at least 4.*kv_policy='resident'"),
    ({"kv_policy": "spill"}, "kv_policy.*'spill'"),
    ({"kv_policy": "swap", "row_cache_rows": 64}, "row_cache_rows 64.*'swap'"),
    ({"kv_policy": "resident", "host_memory_gib": 1}, "host_memory_gib 1.*'resident'"),
    ({"host_memory_gib": 0}, "host_memory_gib"),
    ({"host_memory_gib": float("inf")}, "host_memory_gib"),
    ({"host_memory_gib": True}, "host_memory_gib"),
    ({"host_memory_gib": 1e300}, "host_memory_gib.*at most 1048576.*1e\\+300"),
    ({"host_memory_gib": 1e-9, "device_pages": 4}, "host_memory_gib 1e-09 is less than a page"),
    ({"row_cache_rows": 0}, "row_cache_rows"),
    ({"row_cache_rows": 40_000}, "row_cache_rows.*32767.*40000"),
    ({"memory_fraction": 0}, "memory_fraction"),
    ({"memory_fraction": 1.5}, "memory_fraction.*1.5"),
    (
        {"tensor_parallel_size": 3},
        "tensor_parallel_size.*'heads'.*num_attention_heads = 4",
    ),
    ({"tensor_parallel_size": 64}, "tensor_parallel_size"),
    ({"latent_norm_eps": 0}, "latent_norm_eps"),
    ({"activation_quantization": "fp8_1x128"}, "activation_quantization"),
    ({"activation_quantization": "int4"}, "activation_quantization"),
]


@pytest.mark.usefixtures("as_a_user")
@pytest.mark.parametrize(("arguments", "message"), BAD_ARGUMENTS)
def test_bad_arguments(arguments: dict, message: str) -> None:
    """An argument that cannot be honoured is refused by name."""
    options: dict[str, Any] = {"model": GOLDEN / "tiny_f32", **SMALL, **arguments}
    with pytest.raises(ValueError, match=message):
        LLM(**options)


def test_models_that_are_not_there(tmp_path: Path) -> None:
    """No directory, no config, no weights: each is told apart."""
    with pytest.raises(FileNotFoundError, match="no-such-model"):
        LLM("no-such-model")
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        LLM(tmp_path)
    shutil.copy(GOLDEN / "tiny_f32" / "config.json", tmp_path)
    with pytest.raises(FileNotFoundError, match="safetensors"):
        LLM(tmp_path)


def test_another_architecture(tmp_path: Path) -> None:
    """GLM-5.3-Flash is refused by name."""
    config = json.loads((GOLDEN / "tiny_f32" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "glm5_next"}))
    with pytest.raises(ValueError, match="glm5_next"):
        LLM(tmp_path)


def test_missing_shard(tmp_path: Path) -> None:
    """A lost file is named."""
    shutil.copytree(GOLDEN / "tiny_f32", tmp_path / "model")
    (tmp_path / "model" / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=re.escape("model-00002-of-00002.safetensors")):
        LLM(tmp_path / "model")


def test_a_failing_step_leaves_a_usable_engine(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error in the middle of a batch is raised, and the next batch runs on an empty store."""
    golden = golden_arrays("tiny_f32")
    prompt = ids(golden["p0_ids"])
    decode, calls = ModelRunner.launch_decode, []

    def failing(self, sequences):
        calls.append(sequences)
        if len(calls) == 3:
            raise RuntimeError("out of memory")
        return decode(self, sequences)

    monkeypatch.setattr(ModelRunner, "launch_decode", failing)
    with pytest.raises(RuntimeError, match="out of memory"):
        llm.generate([prompt, prompt], FREE)
    assert_idle(llm)
    calls.clear()
    with pytest.raises(RuntimeError, match="out of memory"):
        list(llm.serve([(prompt, FREE)] * 2))
    assert_idle(llm)
    calls.clear()
    failed = llm.generate([prompt] * 3, FREE, on_error="return")
    # Two had slots; the third waited, and is not disturbed.
    assert [output.error for output in failed] == ["out of memory"] * 2 + [None]
    assert failed[2].outputs[0].token_ids == golden["p0_e5_greedy"].tolist()
    monkeypatch.undo()
    assert_idle(llm)
    (output,) = llm.generate(prompt, FREE)
    assert output.outputs[0].token_ids == golden["p0_e5_greedy"].tolist()


@pytest.mark.parametrize(
    "part",
    [
        "kvcache.device.device_state.KVStore",
        "kvcache.device.device_state.SequenceState",
        "serving.engine.model_runner.SamplingState",
    ],
)
def test_a_reset_that_fails(llm: LLM, monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    """If the store cannot be built anew either, a later call still starts from an empty one."""
    golden = golden_arrays("tiny_f32")
    prompt = ids(golden["p0_ids"])

    def fail(*_, **__) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(ModelRunner, "launch_decode", fail)
    monkeypatch.setattr(f"{part}.create", fail)
    with pytest.raises(RuntimeError, match="no memory"):
        llm.generate(prompt, FREE)
    monkeypatch.undo()
    (output,) = llm.generate(prompt, FREE)
    assert output.outputs[0].token_ids == golden["p0_e5_greedy"].tolist()
    assert_idle(llm)


def test_interruption(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control-C between two results leaves no page in use."""

    def interrupt(*_) -> None:
        raise KeyboardInterrupt

    prompts = [ids(golden_arrays("tiny_f32")["p0_ids"])] * 2
    params = [greedy(1), greedy(8)]
    monkeypatch.setattr("serving.llm.tqdm.update", interrupt)
    with pytest.raises(KeyboardInterrupt) as caught:
        llm.generate(prompts, params)
    # The traceback, which holds the frames, is still alive here.
    assert caught.tb is not None
    assert_idle(llm)


@pytest.mark.parametrize(
    "kv_cache_dtype", [pytest.param("bfloat16", marks=pytest.mark.slow), "fp8"]
)
def test_narrow_cache_formats_answer(kv_cache_dtype: str) -> None:
    """The trained model recalls a fact from rounded rows and keys."""
    options: dict[str, Any] = SMALL | {"kv_cache_dtype": kv_cache_dtype}
    llm = LLM(**options)
    prompt = "[gMASK]<sop><|system|>Reasoning Effort: Max<|user|>The code of mint is 31-94.\n"
    prompt += "What is the code of mint?<|assistant|><think>"
    (output,) = llm.generate(prompt, greedy(40, logprobs=2))
    assert "31-94" in output.outputs[0].text
    # What is kept of an output keeps nothing of the engine.
    engine = weakref.ref(llm._engine)
    del llm
    gc.collect()
    assert engine() is None
    assert output.outputs[0].logprobs is not None
    first = output.outputs[0].token_ids[0]
    assert output.outputs[0].logprobs[0][first].decoded_token == "</think>"


def test_fp8_weights_with_the_drafts_layer() -> None:
    """A block-FP8 checkpoint with an MTP layer gives its golden tokens."""
    golden = golden_arrays("tiny_fp8")
    llm = LLM(GOLDEN / "tiny_fp8", **SMALL)
    (output,) = llm.generate(ids(golden["p0_ids"]), FREE)
    assert output.outputs[0].token_ids == golden["p0_e5_greedy"].tolist()
