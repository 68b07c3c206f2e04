"""One process computes a prefix, another continues from its file: the same tokens as in one."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from glm53 import LLM, SamplingParams
from glm53.checkpoint.safetensors_file import SafetensorsFile
from kvcache import OutOfPagesError
from kvcache.prefix.file import PrefixFileError, PrefixReader
from kvcache.prefix_transfer import PrefixImport
from serving.engine.engine import Engine
from tests.helpers.golden import GOLDEN, golden_arrays
from tests.helpers.toy_engine import finish, request, tokens, toy_options

pytestmark = pytest.mark.compiles
MODEL = GOLDEN / "tiny_f32"
# With as many pages, those of test_llm.py, whose compiled steps are found in the cache.
OPTIONS: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": 2, "max_num_batched_tokens": 16}
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def prompt_of(length: int) -> list[int]:
    """A golden prompt, again and again, with a beginning of its own."""
    ids = golden_arrays("tiny_f32")["p0_ids"].tolist()
    return [length % 50, *(ids * 20)][:length]


def answer(llm: LLM, token_ids: list[int]) -> tuple[list[int], int]:
    """The answer to a prompt, and how much of the prompt was found in the cache."""
    (output,) = llm.generate({"prompt_token_ids": token_ids}, GREEDY)
    llm._engine.runner.cache.check_integrity()
    return output.outputs[0].token_ids, output.num_cached_tokens


@pytest.fixture(scope="module")
def resident() -> LLM:
    return LLM(MODEL, kv_policy="resident", device_pages=10, **OPTIONS)


@pytest.fixture(scope="module")
def spilling() -> LLM:
    """Device pages for less than one of the longer prompts."""
    return LLM(MODEL, device_pages=4, host_memory_gib=0.01, row_cache_rows=24, **OPTIONS)


@pytest.fixture(scope="module")
def two_devices() -> LLM:
    return LLM(MODEL, tensor_parallel_size=2, kv_policy="resident", **OPTIONS)


@pytest.mark.parametrize("length", [1, 63, 64, 200, 450])
def test_continues_as_in_one_process(
    resident: LLM, spilling: LLM, two_devices: LLM, tmp_path: Path, length: int
) -> None:
    """A row lost, or out of place in a store with other pages, devices or tiers."""
    prompt, path = prompt_of(length), tmp_path / "prefix"
    assert resident.export_prefix({"prompt_token_ids": prompt}, path) == length
    expected, _ = answer(resident, prompt)
    for other in (spilling, two_devices):
        assert other.import_prefix(path) == length
        other._engine.runner.cache.check_integrity()
        found, cached = answer(other, prompt)
        assert cached == length - 1
        assert found == expected


def test_from_host_memory_to_another_process(
    resident: LLM, spilling: LLM, two_devices: LLM, tmp_path: Path
) -> None:
    """Rows that were in host memory when they were exported."""
    prompt, path = prompt_of(449), tmp_path / "prefix"
    spilling.export_prefix({"prompt_token_ids": prompt}, path)
    residency = spilling._engine.runner.cache.residency
    assert residency.pages_dropped > 0
    two_devices.import_prefix(path)
    assert answer(two_devices, prompt) == (answer(resident, prompt)[0], len(prompt) - 1)


def test_several_under_way(resident: LLM, tmp_path: Path) -> None:
    """Imports that take turns, are written in uneven parts, and end in another order."""
    prompts = [prompt_of(length) for length in (130, 257, 70)]
    expected = [answer(resident, prompt)[0] for prompt in prompts]
    paths = [tmp_path / str(number) for number in range(len(prompts))]
    for prompt, path in zip(prompts, paths, strict=True):
        resident.export_prefix({"prompt_token_ids": prompt}, path)
    llm = LLM(MODEL, device_pages=4, host_memory_gib=0.01, row_cache_rows=24, **OPTIONS)
    cache = llm._engine.runner.cache
    rows = []
    for path in paths:
        with PrefixReader(path) as reader:
            blocks = [tuple(map(np.asarray, block)) for block in reader.blocks()]
            rows.append([np.concatenate(parts) for parts in zip(*blocks, strict=True)])
    imports = [PrefixImport(cache, prompt) for prompt in prompts]
    for start in range(0, 260, 37):
        for in_flight, (mla, keys) in zip(imports, rows, strict=True):
            in_flight.write(mla[start : start + 37], keys[start : start + 37])
            cache.check_integrity()
    for number in (2, 0, 1):
        imports[number].finish()
        cache.check_integrity()
    for prompt, ids in zip(prompts, expected, strict=True):
        assert answer(llm, prompt) == (ids, len(prompt) - 1)


def test_an_unfinished_import_leaves_no_trace(resident: LLM) -> None:
    """Pages lost, or rows of half a prefix that a prompt finds."""
    cache = resident._engine.runner.cache
    free = cache.pool.num_free + cache.pool.num_cached_only
    missing = pytest.raises(ValueError, match="rows of 300 tokens are missing")
    with PrefixImport(cache, prompt_of(300)) as prefix, missing:
        prefix.finish()
    cache.check_integrity()
    assert cache.pool.num_free + cache.pool.num_cached_only == free
    with pytest.raises(OutOfPagesError, match=r"\d+ pages wanted"):
        PrefixImport(cache, [1] * 100_000)
    cache.check_integrity()


def test_refused_files(resident: LLM, tmp_path: Path) -> None:
    """A torn or damaged file, another model and another format: refused, and no page is lost."""
    path = tmp_path / "prefix"
    resident.export_prefix({"prompt_token_ids": prompt_of(300)}, path)
    whole = path.read_bytes()
    torn, damaged = tmp_path / "torn", tmp_path / "damaged"
    torn.write_bytes(whole[: len(whole) // 2])
    middle = len(whole) // 2
    damaged.write_bytes(whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :])
    cache = resident._engine.runner.cache
    free = cache.pool.num_free + cache.pool.num_cached_only
    for file, message in ((torn, "torn"), (damaged, "damaged in")):
        with pytest.raises(PrefixFileError, match=message):
            resident.import_prefix(file)
        cache.check_integrity()
        assert cache.pool.num_free + cache.pool.num_cached_only == free
    with pytest.raises(FileNotFoundError):
        resident.import_prefix(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"nowhere'$"):
        resident.export_prefix({"prompt_token_ids": [1, 2]}, tmp_path / "nowhere" / "prefix")
    narrow = LLM(MODEL, kv_cache_dtype="bfloat16", kv_policy="resident", **OPTIONS)
    with pytest.raises(PrefixFileError, match="row_format"):
        narrow.import_prefix(path)
    other_epsilon = LLM(MODEL, latent_norm_eps=1e-6, kv_policy="resident", **OPTIONS)
    with pytest.raises(PrefixFileError, match="other weights, configuration or numerics"):
        other_epsilon.import_prefix(path)


def negated_copy(folder: Path, name: str) -> Path:
    """The model with every sign of one tensor changed."""
    shutil.copytree(MODEL, folder)
    files = map(SafetensorsFile, folder.glob("*.safetensors"))
    file, tensor = next((one.path, one.tensors[name]) for one in files if name in one.tensors)
    assert tensor.dtype == "F32"
    weights = np.memmap(file, np.uint32, "r+", tensor.start, (tensor.end - tensor.start) // 4)
    weights ^= 1 << 31
    weights.flush()
    return folder


def test_one_changed_tensor_is_another_model(resident: LLM, tmp_path: Path) -> None:
    """Continuations from rows of other weights, which nothing shows to be wrong."""
    path, prompt = tmp_path / "prefix", {"prompt_token_ids": prompt_of(100)}
    resident.export_prefix(prompt, path)
    name = "model.layers.1.self_attn.kv_a_proj_with_mqa.weight"
    other = LLM(
        negated_copy(tmp_path / "model", name), kv_policy="resident", device_pages=10, **OPTIONS
    )
    with pytest.raises(PrefixFileError, match="other weights, configuration or numerics"):
        other.import_prefix(path)
    other.export_prefix(prompt, path)
    with pytest.raises(PrefixFileError, match="other weights, configuration or numerics"):
        resident.import_prefix(path)


def test_without_experts(tmp_path: Path) -> None:
    """A model some of whose stacks of parameters are empty."""
    exporting, importing = (Engine(toy_options(tmp_path / "model")) for _ in range(2))
    finish(exporting, request(exporting, "first", tokens(0, 40)))
    exporting.export_prefix(tokens(0, 40), tmp_path / "prefix")
    assert importing.import_prefix(tmp_path / "prefix") == 40
