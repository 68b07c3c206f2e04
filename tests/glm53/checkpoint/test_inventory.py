import functools
import itertools

import jax
import pytest
from flax import nnx
from safetensors import safe_open

from glm53.checkpoint import load_hugging_face, load_orbax
from glm53.checkpoint.inventory import TensorSpec, ignored_tensors, tensor_inventory
from glm53.model.config import GLMConfig
from glm53.model.params import abstract_model
from glm53.model.presets import preset, preset_names
from glm53.model.sharding import check_mesh, make_mesh, parameter_specs
from tests.helpers.golden import GOLDEN
from tests.helpers.peak_memory import MIB, run_script

FULL_SIZE = ("glm-5.3", "glm-5.3-bf16", "glm-5", "glm-5-fp8")
KITS = ("tiny_f32", "tiny_fp8", "tiny_mtp")


@functools.cache
def inventory(config: GLMConfig) -> tuple[TensorSpec, ...]:
    return tensor_inventory(config)


def abstract_parameters(config: GLMConfig) -> dict[tuple, jax.ShapeDtypeStruct]:
    """Shape and dtype of each parameter by its path."""
    _, abstract = abstract_model(config)
    return {path: leaf.get_value() for path, leaf in nnx.to_flat_state(abstract)}


@pytest.mark.parametrize(
    ("name", "count", "size"),
    [
        ("glm-5.3", 118_629, 755_617_140_416),
        ("glm-5.3-bf16", 59_585, 1_506_659_919_872),
        ("glm-5", 59_870, 1_507_728_316_928),
        ("glm-5-fp8", 119_028, None),
    ],
)
def test_released_models(name: str, count: int, size: int | None) -> None:
    """A list that differs from a released checkpoint's, whose count and bytes are public."""
    specs = inventory(preset(name))
    assert len({spec.name for spec in specs}) == len(specs) == count
    if size is not None:
        assert sum(spec.num_bytes for spec in specs) == size


def test_released_shapes() -> None:
    """A tensor of the right size in the wrong shape or dtype, by published shapes."""
    specs = {spec.name: (spec.dtype, spec.shape) for spec in inventory(preset("glm-5.3"))}
    attention, indexer = "model.layers.{}.self_attn.", "model.layers.{}.self_attn.indexer."
    first, last = attention.format(0), indexer.format(78)
    for name, dtype, shape in [
        ("model.embed_tokens.weight", "BF16", (154_880, 6144)),
        ("lm_head.weight", "BF16", (154_880, 6144)),
        ("model.norm.weight", "BF16", (6144,)),
        (first + "q_a_proj.weight", "F8_E4M3", (2048, 6144)),
        (first + "q_b_proj.weight", "F8_E4M3", (16_384, 2048)),
        (first + "kv_a_proj_with_mqa.weight", "F8_E4M3", (576, 6144)),
        (first + "kv_a_proj_with_mqa.weight_scale_inv", "F32", (5, 48)),
        (first + "kv_a_layernorm.weight", "BF16", (512,)),
        (first + "kv_b_proj.weight", "F8_E4M3", (28_672, 512)),
        (first + "o_proj.weight", "F8_E4M3", (6144, 16_384)),
        (last + "wq_b.weight", "F8_E4M3", (4096, 2048)),
        (last + "wk.weight", "F8_E4M3", (128, 6144)),
        (last + "wk.weight_scale_inv", "F32", (1, 48)),
        (last + "k_norm.weight", "BF16", (128,)),
        (last + "k_norm.bias", "BF16", (128,)),
        (last + "weights_proj.weight", "BF16", (32, 6144)),
        ("model.layers.2.mlp.down_proj.weight", "F8_E4M3", (6144, 12_288)),
        ("model.layers.3.mlp.gate.weight", "BF16", (256, 6144)),
        ("model.layers.3.mlp.gate.e_score_correction_bias", "F32", (256,)),
        ("model.layers.77.mlp.experts.255.down_proj.weight", "F8_E4M3", (6144, 2048)),
        ("model.layers.77.mlp.shared_experts.up_proj.weight", "F8_E4M3", (2048, 6144)),
        ("model.layers.78.eh_proj.weight", "BF16", (6144, 12_288)),
        ("model.layers.78.shared_head.norm.weight", "BF16", (6144,)),
    ]:
        assert specs[name] == (dtype, shape), name
    layers = {int(name.split(".")[2]) for name in specs if ".indexer." in name}
    assert layers == {0, 1, 2, *range(6, 75, 4), 78}
    scaled = {name.removesuffix("_scale_inv") for name in specs if name.endswith("_scale_inv")}
    assert scaled == {name for name, (dtype, _) in specs.items() if dtype == "F8_E4M3"}


@pytest.mark.parametrize("kit", KITS)
def test_golden_checkpoints(kit: str) -> None:
    """A list that differs from a checkpoint that another implementation wrote."""
    held = {}
    for file in sorted((GOLDEN / kit).glob("*.safetensors")):
        with safe_open(file, "np") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                part = tensors.get_slice(name)
                held[name] = (part.get_dtype(), tuple(part.get_shape()))
    specs = inventory(GLMConfig.from_pretrained(GOLDEN / kit))
    assert {spec.name: (spec.dtype, spec.shape) for spec in specs} == held


def test_duplicates_of_the_draft_layer() -> None:
    """A needed tensor among those that are passed over."""
    for name in ("glm-5.3", "test-small"):
        config = preset(name)
        ignored = ignored_tensors(config)
        assert not ignored & {spec.name for spec in inventory(config)}
        assert len(ignored) == 2
        assert not ignored_tensors(config.replace(num_nextn_predict_layers=0))


FOUR_LAYERS = {
    "num_hidden_layers": 4,
    "indexer_types": ("full", "shared", "full", "shared"),
    "mlp_layer_types": ("dense",) * 4,
}
COVERED = [
    *((name, {}) for name in (*FULL_SIZE, "test-small", "test-small-fp8")),
    ("test-small", {"compute_dtype": "bfloat16"}),
    ("test-small-fp8", {"compute_dtype": "float32"}),
    ("test-small", {"num_nextn_predict_layers": 0}),
    ("test-small", FOUR_LAYERS | {"mlp_layer_types": ("sparse", "dense") * 2}),
    ("test-small", FOUR_LAYERS | {"num_nextn_predict_layers": 0}),
    ("test-small-fp8", FOUR_LAYERS | {"n_shared_experts": 3}),
]


@pytest.mark.parametrize(("name", "changes"), COVERED)
def test_every_parameter_is_covered_once(name: str, changes: dict) -> None:
    """A parameter, or a place of a stack, that no tensor or more than one fills."""
    config = preset(name).replace(**changes)
    shapes = abstract_parameters(config)
    unfilled: dict[tuple, set] = {}
    for spec in inventory(config):
        target = shapes[spec.path]
        depth = len(spec.index)
        assert target.shape[depth:] == spec.shape, spec
        kept = "scale" in spec.path or "e_score_correction_bias" in spec.path
        plain = "float32" if kept else config.compute_dtype
        assert target.dtype.name == ("float8_e4m3fn" if spec.dtype == "F8_E4M3" else plain), spec
        if spec.path not in unfilled:
            unfilled[spec.path] = set(itertools.product(*map(range, target.shape[:depth])))
        unfilled[spec.path].remove(spec.index)
    assert not [path for path, places in unfilled.items() if places]
    assert all(shapes[path].size == 0 for path in shapes.keys() - unfilled.keys())


# Prints how far building grows the peak memory, in bytes, the seconds it takes, and the parameters.
BUILD = """
import time
import jax
from glm53.model.params import abstract_model
from glm53.model.presets import preset
from tests.helpers.peak_memory import peak_memory

abstract_model(preset("test-small"))
before, start = peak_memory(), time.monotonic()
_, params = abstract_model(preset("glm-5.3"))
seconds = time.monotonic() - start
leaves = jax.tree.leaves(params)
print(peak_memory() - before, seconds)
print(sum(leaf.size for leaf in leaves if leaf.dtype != "float32"))
"""


def test_abstract_model_takes_no_memory() -> None:
    """A model of 753 billion parameters that is made to know their shapes."""
    growth, seconds, num_parameters = run_script(BUILD)
    assert growth < 64 * MIB
    assert seconds < 30
    assert round(num_parameters / 1e7) == 75_333


@pytest.mark.parametrize(
    ("axis", "field", "size"),
    [
        ("heads", "num_attention_heads", 6),
        ("intermediate", "intermediate_size", 98),
        ("expert_intermediate", "moe_intermediate_size", 34),
        ("vocab", "vocab_size", 258),
    ],
)
def test_mesh_that_does_not_divide(axis: str, field: str, size: int) -> None:
    """A mesh that leaves a device with another share, and fails when arrays are placed."""
    config = preset("test-small").replace(**{field: size})
    check_mesh(config, make_mesh(2))
    with pytest.raises(ValueError, match=f"4 devices .* '{axis}' .*{field} = {size}"):
        check_mesh(config, make_mesh(4))
    with pytest.raises(ValueError, match=field):
        load_hugging_face("nowhere", config, make_mesh(4))
    with pytest.raises(ValueError, match=field):
        load_orbax("nowhere", config, make_mesh(4))


@pytest.mark.parametrize("name", preset_names())
def test_presets_divide_by_eight(name: str) -> None:
    """A preset with a sharded axis that a mesh of 8, or of fewer that divide 8, does not divide."""
    config = preset(name)
    _, abstract = abstract_model(config)
    specs = dict(nnx.to_flat_state(parameter_specs(abstract)))
    sharded = set()
    for path, leaf in nnx.to_flat_state(abstract):
        for size, axis in zip(leaf.shape, specs[path].get_value(), strict=True):
            if axis is not None:
                assert size % 8 == 0, path
                sharded.add(path[-2])
    matrices = {"embed_tokens", "lm_head", "q_b_proj", "kv_b_proj", "o_proj"}
    assert sharded == matrices | {"gate_proj", "up_proj", "down_proj"}
