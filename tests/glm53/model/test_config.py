import copy
import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm53.model.config import GLMConfig
from glm53.model.presets import preset, preset_names
from tests.helpers.golden import GOLDEN

# A config file with every key that an official one has: six layers, FFFSSS, and an MTP layer.
FILE: dict[str, Any] = json.loads((GOLDEN / "tiny_mtp" / "config.json").read_text())
NUM_LAYERS = 6
SCHEDULE = ["full"] * 3 + ["shared"] * 3
NO_SCHEDULE = {"indexer_types": None, "index_topk_freq": None, "index_skip_topk_offset": None}
FP8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}

SIZES = [
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "index_n_heads",
    "index_head_dim",
    "index_topk",
    "intermediate_size",
    "moe_intermediate_size",
    "n_routed_experts",
    "num_experts_per_tok",
    "n_shared_experts",
    "max_position_embeddings",
]
NUMBERS = ("rms_norm_eps", "routed_scaling_factor", "rope_theta")
# What changes the arithmetic and has one value that is computed, as given in official files.
FIXED = [
    "attention_bias",
    "mlp_bias",
    "hidden_act",
    "tie_word_embeddings",
    "scoring_func",
    "topk_method",
    "norm_topk_prob",
    "n_group",
    "topk_group",
    "moe_layer_freq",
    "rope_interleave",
    "indexer_rope_interleave",
    "moe_router_dtype",
]
OTHERS = [
    "model_type",
    "dtype",
    "torch_dtype",
    "rope_parameters",
    "rope_scaling",
    "partial_rotary_factor",
    "indexer_types",
    "index_topk_pattern",
    "index_topk_freq",
    "index_skip_topk_offset",
    "mlp_layer_types",
    "first_k_dense_replace",
    "num_nextn_predict_layers",
    "index_share_for_mtp_iteration",
    "eos_token_id",
    "quantization_config",
    "qk_head_dim",
    "num_key_value_heads",
]


def read(**changes: Any) -> GLMConfig:
    """The config of the file with fields changed."""
    return GLMConfig.from_hf(FILE | changes)


def refused(*names: str, **changes: Any) -> str:
    """The message of the refusal, which must hold the names."""
    with pytest.raises(ValueError) as caught:
        read(**changes)
    for name in names:
        assert name in str(caught.value)
    return str(caught.value)


def full_layers(config: GLMConfig) -> list[int]:
    return [layer for layer, kind in enumerate(config.indexer_types) if kind == "full"]


NEWER_FULL = [0, 1, 2, 6, 10, 14, 18, 22, 26, 30, 34, 38, 42, 46, 50, 54, 58, 62, 66, 70, 74]
OLDER = (list(range(78)), 1e6, 202_752, False)
NEWER = (NEWER_FULL, 8e6, 1_048_576, True)


@pytest.mark.parametrize(
    ("name", "facts", "fp8"),
    [
        ("glm-5", OLDER, False),
        ("glm-5-fp8", OLDER, True),
        ("glm-5.1", OLDER, False),
        ("glm-5.1-fp8", OLDER, True),
        ("glm-5.2", NEWER, False),
        ("glm-5.2-fp8", NEWER, True),
        ("glm-5.3", NEWER, True),
        ("glm-5.3-bf16", NEWER, False),
    ],
)
def test_released_models(name: str, facts: tuple[list[int], float, int, bool], fp8: bool) -> None:
    """A preset that differs from the released model in any value."""
    indexed, theta, positions, shares = facts
    config = preset(name)
    assert full_layers(config) == indexed
    assert config.num_index_layers == len(indexed) + 1
    assert config == GLMConfig(
        vocab_size=154_880,
        hidden_size=6144,
        num_hidden_layers=78,
        num_attention_heads=64,
        q_lora_rank=2048,
        kv_lora_rank=512,
        qk_nope_head_dim=192,
        qk_rope_head_dim=64,
        v_head_dim=256,
        index_n_heads=32,
        index_head_dim=128,
        index_topk=2048,
        indexer_types=config.indexer_types,
        mlp_layer_types=("dense",) * 3 + ("sparse",) * 75,
        intermediate_size=12_288,
        moe_intermediate_size=2048,
        n_routed_experts=256,
        num_experts_per_tok=8,
        n_shared_experts=1,
        routed_scaling_factor=2.5,
        rope_theta=theta,
        max_position_embeddings=positions,
        rms_norm_eps=1e-5,
        latent_norm_eps=1e-5,
        num_nextn_predict_layers=1,
        index_share_for_mtp_iteration=shares,
        eos_token_ids=(154_820, 154_827, 154_829),
        weight_dtype="bfloat16",
        fp8_weights=fp8,
        compute_dtype="bfloat16",
        activation_quantization="none",
    )
    assert (config.qk_head_dim, config.num_layers) == (256, 79)
    assert (config.num_dense_layers, config.num_sparse_layers) == (3, 76)


def test_presets() -> None:
    """A preset that cannot be built, or an unknown name without a word on the known ones."""
    released = {"glm-5", "glm-5.1", "glm-5.2", "glm-5.3"}
    assert released < set(preset_names())
    for name in preset_names():
        assert preset(name).num_nextn_predict_layers == 1
    assert preset("test-small-fp8") == preset("test-small").replace(
        fp8_weights=True, weight_dtype="bfloat16", compute_dtype="bfloat16"
    )
    with pytest.raises(ValueError, match=r"'glm-6'.*glm-5\.3"):
        preset("glm-6")


@pytest.mark.parametrize(
    ("kit", "kinds", "dtype", "fp8", "mtp", "eos"),
    [
        ("tiny_f32", "FFFSSSFS", "float32", False, 0, ()),
        ("tiny_fp8", "FFFSSSF", "bfloat16", True, 1, ()),
        ("tiny_mtp", "FFFSSS", "bfloat16", False, 1, (1500, 1507, 1509)),
    ],
)
def test_files(kit: str, kinds: str, dtype: str, fp8: bool, mtp: int, eos: tuple[int, ...]) -> None:
    """A file as transformers writes it that is refused or misread."""
    config = GLMConfig.from_pretrained(GOLDEN / kit)
    assert "".join(kind[0].upper() for kind in config.indexer_types) == kinds
    assert (config.weight_dtype, config.compute_dtype, config.fp8_weights) == (dtype, dtype, fp8)
    assert (config.num_nextn_predict_layers, config.eos_token_ids) == (mtp, eos)
    assert (config.rope_theta, config.latent_norm_eps) == (8e6, 1e-5)


@pytest.mark.parametrize(
    "forms",
    [
        {"indexer_types": SCHEDULE},
        {"index_topk_pattern": "FFFSSS"},
        {"index_topk_pattern": list("FFFSSS")},
        {"index_topk_pattern": SCHEDULE},
        {"index_topk_freq": 4, "index_skip_topk_offset": 3},
        {"indexer_types": SCHEDULE, "index_topk_pattern": "FFFSSS", "index_topk_freq": 4}
        | {"index_skip_topk_offset": 3},
    ],
)
def test_every_form_of_a_schedule(forms: dict[str, Any]) -> None:
    """A form of the schedule that is ignored or misread."""
    assert full_layers(read(**NO_SCHEDULE | forms)) == [0, 1, 2]


@pytest.mark.parametrize(
    ("frequency", "offset", "full"),
    [
        (4, None, [0, 1, 5]),
        (4, 2, [0, 1, 5]),
        (4, 3, [0, 1, 2]),
        (3, 1, [0, 3]),
        (2, 4, [0, 1, 2, 3, 5]),
        (1, None, [0, 1, 2, 3, 4, 5]),
        (1, 0, [0, 1, 2, 3, 4, 5]),
        (9, 100, [0, 1, 2, 3, 4, 5]),
        (None, 3, [0, 1, 2, 3, 4, 5]),
    ],
)
def test_frequency_and_offset(frequency: int | None, offset: int | None, full: list[int]) -> None:
    """A layer on the wrong side of the offset; without an offset it is 2, as engines take it."""
    changes = {"index_topk_freq": frequency, "index_skip_topk_offset": offset}
    assert full_layers(read(**NO_SCHEDULE | changes)) == full
    absent = {name: value for name, value in FILE.items() if name not in NO_SCHEDULE}
    given = {name: value for name, value in changes.items() if value is not None}
    assert full_layers(GLMConfig.from_hf(absent | given)) == full


def test_no_schedule() -> None:
    """A model without IndexShare, such as GLM-5, whose layers come out shared."""
    assert full_layers(read(**NO_SCHEDULE)) == list(range(NUM_LAYERS))


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"indexer_types": ["full"] * 6, "index_topk_pattern": None}, ["indexer_types", "freq"]),
        ({"index_topk_pattern": "FFSSSS"}, ["indexer_types", "index_topk_pattern"]),
        (
            {"indexer_types": None, "index_topk_pattern": "FFSSSS"},
            ["index_topk_pattern", "index_topk_freq"],
        ),
        ({"index_topk_freq": 2}, ["indexer_types", "index_topk_freq"]),
        ({"index_skip_topk_offset": None}, ["indexer_types", "index_skip_topk_offset"]),
        (
            {"mlp_layer_types": ["dense"] * 2 + ["sparse"] * 4},
            ["mlp_layer_types", "first_k_dense_replace"],
        ),
        ({"first_k_dense_replace": 2}, ["mlp_layer_types", "first_k_dense_replace"]),
        ({"torch_dtype": "float32"}, ["dtype", "torch_dtype", "float32", "bfloat16"]),
        ({"rope_theta": 1e6}, ["rope_parameters.rope_theta", "rope_theta", "8000000", "1000000"]),
        ({"qk_head_dim": 33}, ["qk_head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "33", "32"]),
        ({"num_key_value_heads": 2}, ["num_key_value_heads", "num_attention_heads", "2", "4"]),
        ({"num_hidden_layers": 7}, ["num_hidden_layers", "indexer_types", "6", "7"]),
        (NO_SCHEDULE | {"index_topk_pattern": "FFF"}, ["index_topk_pattern", "num_hidden_layers"]),
        (NO_SCHEDULE | {"index_topk_pattern": "SFFFFF"}, ["index_topk_pattern", "layer 0"]),
        (NO_SCHEDULE | {"indexer_types": SCHEDULE[::-1]}, ["indexer_types", "layer 0"]),
        (
            NO_SCHEDULE | {"index_topk_freq": 2, "index_skip_topk_offset": 0},
            ["index_skip_topk_offset", "layer 0"],
        ),
        (
            {"num_experts_per_tok": 9},
            ["num_experts_per_tok", "n_routed_experts", "9", "8"],
        ),
        ({"qk_rope_head_dim": 7, "qk_head_dim": 31}, ["qk_rope_head_dim", "7"]),
        ({"index_head_dim": 4}, ["index_head_dim", "qk_rope_head_dim", "4", "8"]),
        ({"eos_token_id": 1600}, ["eos_token_id", "1600", "vocab_size"]),
        ({"eos_token_id": [0, -1]}, ["eos_token_id", "-1"]),
        ({"num_nextn_predict_layers": 2}, ["num_nextn_predict_layers", "2"]),
    ],
)
def test_contradictions(changes: dict[str, Any], names: list[str]) -> None:
    """Fields that contradict each other and are taken, or refused without naming both."""
    refused(*names, **changes)


@pytest.mark.parametrize("model_type", ["glm5_next", "deepseek_v32", "glm4_moe", "", None, 5, []])
def test_other_models(model_type: Any) -> None:
    """Another architecture that is taken for this one; the flash model shares its name."""
    message = refused("model_type", repr(model_type), "glm_moe_dsa", model_type=model_type)
    assert ("GLM-5.3-Flash" in message) == (model_type == "glm5_next")


@pytest.mark.parametrize("name", FIXED)
def test_unsupported_settings(name: str) -> None:
    """A setting that is not computed and is passed over; null and absence mean the default."""
    value = FILE[name]
    other = {bool: lambda: not value, int: lambda: value + 1, str: lambda: "gelu"}[type(value)]()
    refused(f"{name} {other!r}", f"only {value!r}", **{name: other})
    twins = [x for x in (0, 1, 0.0, 1.0, False, True) if x == value and type(x) is not type(value)]
    for wrong in (0.5, [value], {"a": value}, f"{value} ", not value, *twins):
        refused(name, **{name: wrong})
    assert read(**{name: None}) == GLMConfig.from_hf({**FILE, name: value}) == read()
    assert GLMConfig.from_hf({key: x for key, x in FILE.items() if key != name}) == read()


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": {"type": "yarn", "factor": 4.0}},
        {"partial_rotary_factor": 0.5},
        {"partial_rotary_factor": True},
        *(
            {"rope_parameters": FILE["rope_parameters"] | change}
            for change in (
                {"rope_type": "yarn"},
                {"rope_type": 1},
                {"type": "linear"},
                {"partial_rotary_factor": 0.5},
                {"partial_rotary_factor": True},
            )
        ),
    ],
)
def test_unsupported_rope(changes: dict[str, Any]) -> None:
    """A form of RoPE that is not computed and is passed over."""
    (name,) = changes
    refused(name, "not supported", **changes)


def test_supported_rope() -> None:
    """The default form of RoPE refused where it is spelled out, or theta not found in its place."""
    theta = FILE["rope_parameters"]["rope_theta"]
    spelled_out = {"rope_type": "default", "type": "default", "partial_rotary_factor": 1.0}
    assert read(rope_parameters=spelled_out | {"rope_theta": theta}) == read()
    assert read(partial_rotary_factor=1.0, rope_scaling=None) == read()
    assert read(rope_parameters=None, rope_theta=theta) == read()
    assert read(rope_theta=theta) == read()
    assert isinstance(read(rope_theta=int(theta)).rope_theta, float)
    refused("lacks rope_parameters.rope_theta", rope_parameters={"rope_type": "default"})
    refused("lacks rope_parameters.rope_theta", rope_parameters=None)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"quant_method": "gptq"}, "quant_method"),
        ({"quant_method": None}, "quant_method"),
        ({"fmt": "e5m2"}, "fmt"),
        ({"activation_scheme": "static"}, "activation_scheme"),
        ({"weight_block_size": [128, 64]}, "weight_block_size"),
        ({"weight_block_size": None}, "weight_block_size"),
        ({"weight_block_size": 128}, "weight_block_size"),
        ({"weight_block_size": [[128, 128]]}, "weight_block_size"),
    ],
)
def test_unsupported_quantisation(changes: dict[str, Any], name: str) -> None:
    """Weights in another format that are read as block-FP8."""
    refused(f"quantization_config.{name}", quantization_config=FP8 | changes)


def test_quantisation() -> None:
    """Block-FP8 weights that are not recognised; the list of exceptions has no say."""
    assert not read().fp8_weights
    assert not read(quantization_config=None).fp8_weights
    assert read(quantization_config=FP8).fp8_weights
    assert read(quantization_config=FP8 | {"fmt": None}).fp8_weights
    assert read(quantization_config=FP8 | {"modules_to_not_convert": ["lm_head"]}).fp8_weights
    without_format = {name: value for name, value in FP8.items() if name != "fmt"}
    assert read(quantization_config=without_format) == read(quantization_config=FP8)
    assert read(quantization_config=FP8).replace(fp8_weights=False) == read()


def test_dtype() -> None:
    """The dtype under its older name, or a dtype that cannot be computed."""
    assert read(dtype=None, torch_dtype="float32").weight_dtype == "float32"
    assert read(dtype="float32", torch_dtype="float32").compute_dtype == "float32"
    assert read(dtype=None).weight_dtype == "bfloat16"
    refused("dtype", "float16", dtype="float16")
    refused("dtype", "float16", dtype=None, torch_dtype="float16")


def test_defaults() -> None:
    """Keys that may be absent and change what is read then."""
    optional = {"rms_norm_eps", "num_nextn_predict_layers", "index_share_for_mtp_iteration"}
    optional |= {"eos_token_id", "mlp_layer_types", "qk_head_dim", "num_key_value_heads"}
    config = GLMConfig.from_hf({name: FILE[name] for name in FILE.keys() - optional})
    assert config == read().replace(
        num_nextn_predict_layers=0, index_share_for_mtp_iteration=False, eos_token_ids=()
    )
    assert read(**dict.fromkeys(optional)) == config
    assert read(first_k_dense_replace=None) == read()
    assert read(mlp_layer_types=None, first_k_dense_replace=99).num_dense_layers == NUM_LAYERS
    refused(
        "lacks",
        "mlp_layer_types",
        "first_k_dense_replace",
        mlp_layer_types=None,
        first_k_dense_replace=None,
    )
    assert read(eos_token_id=7).eos_token_ids == (7,)
    assert read(rms_norm_eps=1e-3).latent_norm_eps == 1e-3


@pytest.mark.parametrize("name", [*SIZES, "routed_scaling_factor"])
def test_missing_fields(name: str) -> None:
    """A size that has no default and is given one."""
    refused(f"lacks {name}", **{name: None})
    with pytest.raises(ValueError, match=f"lacks {name}"):
        GLMConfig.from_hf({key: value for key, value in FILE.items() if key != name})


NOT_A_SIZE = ["8", "x", "", True, False, 8.0, 8.5, 0, -1, math.nan, math.inf, 2**31, 10**400]
NOT_A_SIZE += [[], [8], [[]], {}, {"a": 8}]
NOT_A_NUMBER = ["1.0", "", True, False, 0, 0.0, -1.0, math.nan, math.inf, -math.inf, 10**400]
NOT_A_NUMBER += [[], [1.0], {}]
NOT_A_FLAG = ["true", "", 0, 1, 1.0, math.nan, [], [True], {}]
NOT_A_COUNT = ["0", "", True, False, 0.0, 1.0, -1, math.nan, math.inf, [], {}, 10**400]
NOT_A_SCHEDULE = ["full", "FFFSSX", "", 6, True, 1.5, math.nan, [], {}, [1] * 6, [["full"]] * 6]
NOT_A_SCHEDULE += [[None] * 6, ["Full"] * 6, {str(key): "full" for key in range(6)}]
NOT_AN_ID = ["1", "", True, 1.0, math.nan, {}, ["1"], [True], [None], [[1]], [1.0], [math.inf]]
NOT_AN_OBJECT = ["fp8", "", 1, 0, True, False, 1.5, math.nan, [], ["fp8"], [[]]]
NOT_A_DTYPE = ["float64", "bf16", "", 16, True, 1.0, math.nan, [], ["float32"], {}]
WRONG = {
    **dict.fromkeys(SIZES, NOT_A_SIZE),
    **dict.fromkeys(NUMBERS, NOT_A_NUMBER),
    **dict.fromkeys(("qk_head_dim", "num_key_value_heads"), NOT_A_SIZE),
    **dict.fromkeys(("index_topk_freq", "index_skip_topk_offset"), NOT_A_COUNT[:-1]),
    **dict.fromkeys(("indexer_types", "index_topk_pattern"), NOT_A_SCHEDULE),
    **dict.fromkeys(("rope_parameters", "quantization_config"), NOT_AN_OBJECT),
    **dict.fromkeys(("dtype", "torch_dtype"), NOT_A_DTYPE),
    "mlp_layer_types": [*NOT_A_SCHEDULE, ["full"] * 6],
    "first_k_dense_replace": NOT_A_COUNT[:-1],
    "num_nextn_predict_layers": NOT_A_COUNT,
    "index_share_for_mtp_iteration": NOT_A_FLAG,
    "eos_token_id": NOT_AN_ID,
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_types(name: str) -> None:
    """A value of a wrong type or range that is taken, or that fails deep inside."""
    for value in WRONG[name]:
        refused(name, **{name: value})
    if name in NUMBERS:
        for value in NOT_A_NUMBER:
            refused("rope_theta", rope_parameters={"rope_theta": value}, rope_theta=value)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    # Values close to right ones.
    | st.sampled_from(["full", "shared", "dense", "F", "S", "default", "fp8", "float32", 4, 128]),
    lambda inner: st.lists(inner, max_size=7) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


@pytest.mark.parametrize("name", [*SIZES, *NUMBERS, *FIXED, *OTHERS])
@settings(max_examples=15)
@given(value=JSON)
def test_any_json(name: str, value: Any) -> None:
    """A value that raises anything but a ValueError that names its field."""
    try:
        config = read(**{name: value})
    except ValueError as error:
        assert name in str(error)
    else:
        assert config == config.replace() and hash(config) == hash(config.replace())


@settings(max_examples=100)
@given(changes=st.dictionaries(st.sampled_from([*SIZES, *NUMBERS, *FIXED, *OTHERS]), JSON))
def test_any_json_in_several_fields(changes: dict[str, Any]) -> None:
    """A check that relies on another field's having been checked."""
    try:
        read(**changes)
    except ValueError as error:
        assert any(name in str(error) for name in changes)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *((name, 0) for name in SIZES),
        *((name, True) for name in SIZES),
        *((name, "8") for name in SIZES),
        *((name, 0.0) for name in (*NUMBERS, "latent_norm_eps")),
        *((name, math.nan) for name in (*NUMBERS, "latent_norm_eps")),
        ("indexer_types", SCHEDULE),
        ("indexer_types", ("full",) * 5),
        ("indexer_types", ("shared",) * 6),
        ("indexer_types", ("full", None) * 3),
        ("mlp_layer_types", "dense"),
        ("mlp_layer_types", ("full",) * 6),
        ("num_nextn_predict_layers", True),
        ("num_nextn_predict_layers", 2),
        ("num_nextn_predict_layers", "1"),
        ("index_share_for_mtp_iteration", 1),
        ("fp8_weights", None),
        ("eos_token_ids", [1]),
        ("eos_token_ids", ("1",)),
        ("weight_dtype", "float16"),
        ("compute_dtype", "float16"),
        ("compute_dtype", ["float32"]),
        ("activation_quantization", "int8"),
    ],
)
def test_checks_of_fields(field: str, value: Any) -> None:
    """A config made without a file that escapes the checks which a file must pass."""
    config = copy.copy(read())
    # Around __init__, whose annotations are checked too while tests run.
    object.__setattr__(config, field, value)
    with pytest.raises(ValueError, match=field.removesuffix("s")):
        config.__post_init__()


def test_replace_checks() -> None:
    """A change that is not checked."""
    with pytest.raises(ValueError, match="index_topk must be a positive integer, got 0"):
        read().replace(index_topk=0)
    with pytest.raises(ValueError, match=r"indexer_types has 6 .* num_hidden_layers 7"):
        read().replace(num_hidden_layers=7)


def test_value() -> None:
    """A config that jit could not take as static: unequal to its twin, unhashable, or mutable."""
    config = read()
    assert config == read() and config is not read() and hash(config) == hash(read())
    other = config.replace(index_topk=7)
    assert (other.index_topk, config.index_topk) == (7, 24)
    assert other != config
    assert len({config, read(), other, other.replace(index_topk=24)}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.__setattr__("index_topk", 7)
    for field in dataclasses.fields(config):
        assert hash(getattr(config, field.name)) is not None


BROKEN = [b"", b"{", b"[1, 2]", b"null", b"1", b'"a"', b"\xff\xfe{}", b"[" * 100_000]
BROKEN += [b'{"a": 1} x', b'{"vocab_size": ' + b"9" * 5000 + b"}"]


@pytest.mark.parametrize("content", BROKEN, ids=lambda content: repr(content[:20]))
def test_broken_file(content: bytes, tmp_path: Path) -> None:
    """A file that is not JSON, or not an object, and fails without being named."""
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"config\.json"):
        GLMConfig.from_pretrained(tmp_path)


def test_missing_file(tmp_path: Path) -> None:
    """No file where one is looked for."""
    for path in (tmp_path, tmp_path / "nowhere", GOLDEN / "tiny_mtp" / "config.json"):
        with pytest.raises(FileNotFoundError, match=r"config\.json"):
            GLMConfig.from_pretrained(path)
    (tmp_path / "config.json").mkdir()
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        GLMConfig.from_pretrained(str(tmp_path))


def test_file(tmp_path: Path) -> None:
    """A file read otherwise than its fields."""
    (tmp_path / "config.json").write_text(json.dumps(FILE), encoding="utf-8")
    assert GLMConfig.from_pretrained(str(tmp_path)) == read()
