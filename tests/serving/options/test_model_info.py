import functools
import math

import jax
import numpy as np
import pytest
from flax import nnx

from glm53.model.config import GLMConfig
from glm53.model.params import abstract_model
from glm53.model.presets import preset
from glm53.model.sharding import make_mesh, parameter_shardings
from serving.cli import main
from serving.options.model_info import PARTS, ModelInfo, model_info
from tests.helpers.golden import GOLDEN

GIB = 1 << 30
KINDS = ("float32", "bfloat16", "fp8")


@functools.cache
def info_of(name: str, **options) -> ModelInfo:
    """Sizes of a preset."""
    return model_info(preset(name), **options)


def test_released_model() -> None:
    """A figure that differs from what is public of the FP8 checkpoint of GLM-5.3."""
    info = info_of("glm-5.3", memory_gib=141, num_devices=8)
    assert info.num_tensors == 118_629
    assert info.num_bytes == 755_617_140_416
    sizes = {part.name: (part.num_parameters, part.num_bytes) for part in info.parts}
    assert tuple(sizes) == PARTS
    assert sizes["embedding and head"] == (2 * 154_880 * 6144, 4 * 154_880 * 6144)
    expert, blocks = 3 * 2048 * 6144, 3 * 16 * 48
    assert sizes["routed experts"] == (75 * 256 * expert, 75 * 256 * (expert + 4 * blocks))
    assert sizes["shared experts"] == (75 * expert, 75 * (expert + 4 * blocks))
    assert sizes["dense MLP"] == (3 * 6 * expert, 3 * 6 * (expert + 4 * blocks))
    assert sizes["router"] == (75 * 256 * 6145, 75 * 256 * (2 * 6144 + 4))
    assert sizes["norms"][0] == 78 * (2 * 6144 + 2048 + 512) + 6144 + 21 * 256
    indexer = 4096 * 2048 + 128 * 6144
    assert sizes["indexer"][0] == 21 * (indexer + 32 * 6144)
    # "744B parameters, 40B active": published of the trunk.
    trunk = info.num_parameters - sizes["MTP layer"][0]
    assert trunk == 743_377_019_904
    idle = 75 * (256 - 8) * expert
    assert info.active_parameters == trunk - idle == 41_250_530_304


def test_cache_of_released_model() -> None:
    """Bytes of a token that differ from the published layouts of rows and index keys."""
    caches = info_of("glm-5.3", memory_gib=141, num_devices=8).caches
    found = {(x.with_mtp, x.row_kind): (x.row_bytes, x.key_bytes) for x in caches}
    widths = {"float32": (2304, 512), "bfloat16": (1152, 256), "fp8": (656, 132)}
    assert found == {
        (mtp, kind): (row * (78 + mtp), key * (21 + mtp))
        for mtp in (False, True)
        for kind, (row, key) in widths.items()
    }
    assert caches[-1].token_bytes == 54_728
    assert [x.row_kind for x in caches] == [*KINDS, *KINDS]


def test_what_fits() -> None:
    """A fit that forgets the replicated weights, the share of memory, or that pages are whole."""
    info = info_of("glm-5.3", memory_gib=141, num_devices=8)
    assert info.weights_fit
    free = 8 * (int(141 * GIB * 0.92) - info.device_weight_bytes)
    for cache in info.caches:
        pages = free // (512 * cache.token_bytes)
        assert cache.fitting_tokens == 512 * pages
        assert cache.fitting_sequences == pages // 2048
    shorter = info_of("glm-5.3", memory_gib=141, num_devices=8, max_model_len=1000)
    tokens = shorter.caches[0].fitting_tokens
    assert tokens == info.caches[0].fitting_tokens
    assert tokens is not None
    assert shorter.caches[0].fitting_sequences == tokens // 1024


@pytest.mark.parametrize("name", ["test-small", "test-small-fp8"])
@pytest.mark.parametrize("num_devices", [1, 2, 4])
def test_weights_on_a_device(name: str, num_devices: int) -> None:
    """Replicated parameters counted as sharded, or the other way round."""
    config = preset(name)
    _, abstract = abstract_model(config)
    shardings = jax.tree.leaves(parameter_shardings(abstract, make_mesh(num_devices)))
    on_device = replicated = 0
    for leaf, sharding in zip(jax.tree.leaves(abstract), shardings, strict=True):
        size = math.prod(sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        on_device += size
        replicated += size * sharding.is_fully_replicated
    info = info_of(name, num_devices=num_devices)
    assert info.device_weight_bytes == on_device
    if num_devices > 1:
        assert info.replicated_bytes == replicated
        assert 0 < replicated < on_device
    else:
        assert info.device_weight_bytes == info.num_bytes


def test_without_mtp_layer() -> None:
    """A part or a cache of a layer that is not there."""
    config = GLMConfig.from_pretrained(GOLDEN / "tiny_f32")
    info = model_info(config.replace(compute_dtype="bfloat16"))
    assert [cache.with_mtp for cache in info.caches] == [False] * 3
    assert (info.parts[-1].name, info.parts[-1].num_bytes) == ("MTP layer", 0)
    arrays = [leaf.get_value() for _, leaf in nnx.to_flat_state(abstract_model(config)[1])]
    assert info.num_parameters == sum(int(np.prod(array.shape)) for array in arrays)
    # The checkpoint's dtype counts, not that of the computation.
    assert info.device_weight_bytes == info.num_bytes == 4 * info.num_parameters
    assert info.weights_fit is None
    assert info.caches[0].fitting_tokens is None
    assert info.max_model_len == config.max_position_embeddings


def test_format_that_cannot_hold_the_rows() -> None:
    """A format that is left out without a word, or that refuses the whole report."""
    info = model_info(preset("test-small").replace(kv_lora_rank=30))
    assert [cache.row_kind for cache in info.caches] == ["float32", "bfloat16"] * 2
    (reason,) = info.refused_formats
    assert "fp8 rows need a latent width divisible by 4" in reason


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_devices": 0}, "devices must be a positive integer, got 0"),
        ({"num_devices": 3}, "3 devices do not divide axis 0 of embed_tokens.weight"),
        ({"memory_gib": 0.0}, "memory_gib must be a positive, finite number, got 0.0"),
        ({"memory_gib": math.nan}, "memory_gib .* got nan"),
        ({"memory_gib": math.inf}, "memory_gib .* got inf"),
        ({"max_model_len": 0}, "max_model_len must be a positive integer, got 0"),
        ({"max_model_len": 5000}, "max_model_len 5000 exceeds .* 4096"),
    ],
)
def test_refused_arguments(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model_info(preset("test-small"), **options)


def test_command(capsys: pytest.CaptureFixture) -> None:
    """Prints the figures; for a preset, the built-in model and a directory alike."""
    arguments = ["--memory-gib", "1", "--max-model-len", "1024"]
    for model in ("test-small", "tiny", str(GOLDEN / "tiny_fp8")):
        assert main(["info", model, *arguments]) == 0
        captured = capsys.readouterr()
        assert captured.err == ""
        assert "fp8 with MTP" in captured.out
        assert "sequences of 1,024" in captured.out
    info = model_info(preset("test-small"), memory_gib=1, max_model_len=1024)
    main(["info", "test-small", *arguments])
    printed = capsys.readouterr().out
    assert f"{info.active_parameters:,} active a token" in printed
    for part in info.parts:
        assert f"{part.num_parameters:,}" in printed
        assert f"{part.num_bytes:,}" in printed
    for cache in info.caches:
        assert f"{cache.token_bytes:,}" in printed
        assert f"{cache.fitting_tokens:,}   {cache.fitting_sequences:,}\n" in printed


def test_command_where_weights_do_not_fit(capsys: pytest.CaptureFixture) -> None:
    """A cache size beside weights that fill the memory."""
    assert main(["info", "test-small", "--memory-gib", "0.0001"]) == 0
    printed = capsys.readouterr().out
    assert "weights alone do not fit" in printed
    assert "tokens fit" not in printed
    info = model_info(preset("test-small"), memory_gib=0.0001)
    assert not info.weights_fit
    assert {(x.fitting_tokens, x.fitting_sequences) for x in info.caches} == {(0, 0)}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nor a preset (glm-5, "),
        (["tiny", "--devices", "3"], "3 devices do not divide"),
        (["tiny", "--memory-gib", "nan"], "memory_gib"),
    ],
)
def test_refused_command(arguments: list[str], message: str, capsys: pytest.CaptureFixture) -> None:
    """One line on standard error, exit code 2, no traceback."""
    assert main(["info", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert captured.err.count("\n") == 1
