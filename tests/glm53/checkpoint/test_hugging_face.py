import functools
import itertools
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from glm53.checkpoint import CheckpointError, load_checkpoint, load_hugging_face, tensor_inventory
from glm53.checkpoint.source import read_config
from glm53.model.config import GLMConfig
from glm53.model.linear import Linear
from glm53.model.params import abstract_model
from glm53.model.sharding import make_mesh, parameter_specs, partition_spec
from pallas_kernels.matmul.reference import dequantized
from tests.glm53.checkpoint.test_safetensors_file import HEADER, JSON, frame
from tests.helpers.golden import GOLDEN, golden_config, golden_params
from tests.helpers.peak_memory import MIB, run_script

# Three layers and an MTP layer, with partial FP8 blocks, some of which straddle two devices.
FP8 = golden_config("tiny_fp8").replace(
    num_hidden_layers=3,
    indexer_types=("full", "shared", "full"),
    mlp_layer_types=("dense", "sparse", "sparse"),
    n_routed_experts=3,
)
BF16 = FP8.replace(fp8_weights=False)
F32 = BF16.replace(weight_dtype="float32")
DTYPES = {"F32": np.float32, "BF16": ml_dtypes.bfloat16, "F8_E4M3": ml_dtypes.float8_e4m3fn}
INDEX = "model.safetensors.index.json"
NORM = "model.layers.1.input_layernorm.weight"
BIAS = "model.layers.2.mlp.gate.e_score_correction_bias"
MATRIX = "model.layers.1.mlp.experts.2.down_proj.weight"

Tensors = dict[str, np.ndarray]


@functools.cache
def drawn_tensors(config: GLMConfig) -> Tensors:
    """Random tensors of a checkpoint."""
    rng = np.random.default_rng(0)
    tensors = {}
    for spec in tensor_inventory(config):
        values = rng.standard_normal(spec.shape, np.float32) * 2.0 ** rng.integers(-4, 5)
        tensors[spec.name] = values.astype(DTYPES[spec.dtype])
    return tensors


def make_tensors(config: GLMConfig) -> Tensors:
    """Random tensors of a checkpoint, in a dictionary that may be changed."""
    return dict(drawn_tensors(config))


def write_shards(path: Path, shards: Mapping[str, Tensors], index: bool = True) -> None:
    """Writes files, and the index that lists them."""
    path.mkdir(parents=True, exist_ok=True)
    for name, tensors in shards.items():
        save_file(tensors, path / name)
    if index:
        listed = {tensor: name for name, tensors in shards.items() for tensor in tensors}
        write_index(path, listed)


def write_index(path: Path, listed: Mapping[str, str]) -> None:
    text = json.dumps({"metadata": {"total_size": 1}, "weight_map": listed})
    (path / INDEX).write_text(text, encoding="utf-8")


def split(tensors: Tensors, count: int) -> dict[str, Tensors]:
    """Deals tensors out to files one by one, so that a scale lies apart from its weight."""
    shards: dict[str, Tensors] = {}
    for n, (name, value) in enumerate(tensors.items()):
        shards.setdefault(f"model-{n % count + 1:05}-of-{count:05}.safetensors", {})[name] = value
    return shards


def write(path: Path, tensors: Tensors) -> Path:
    """Writes one file without an index."""
    write_shards(path, {"model.safetensors": tensors}, index=False)
    return path


def problems(path: Path, config: GLMConfig = BF16) -> tuple[str, ...]:
    """What loading finds wrong, which the message must tell too."""
    with pytest.raises(CheckpointError) as caught:
        load_hugging_face(path, config, make_mesh())
    found = caught.value.problems
    assert found and all(problem in str(caught.value) for problem in found[:100])
    assert str(path) in str(caught.value)
    return found


def place_of(name: str, config: GLMConfig) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """A tensor's parameter and its place in the stack, told from its name alone."""
    parts = name.replace("weight_scale_inv", "scale").split(".")
    if parts[0] == "lm_head":
        return tuple(parts), ()
    if parts[1] != "layers":
        return tuple(parts[1:]), ()
    layer, rest = int(parts[2]), parts[3:]
    full = [*(kind == "full" for kind in config.indexer_types), True]
    sparse = [*(kind == "sparse" for kind in config.mlp_layer_types), True]
    same = sum(kind == sparse[layer] for kind in sparse[:layer])
    match rest:
        case ["shared_head", *rest]:
            return ("mtp", "shared_head_norm", rest[1]), ()
        case ["eh_proj" | "enorm" | "hnorm", _]:
            return ("mtp", *rest), ()
        case ["self_attn", "indexer", *rest]:
            return ("layers", "indexer", *rest), (sum(full[:layer]),)
        case ["mlp", "experts", expert, *rest]:
            return ("layers", "moe", "experts", *rest), (same, int(expert))
        case ["mlp", *rest] if sparse[layer]:
            return ("layers", "moe", *rest), (same,)
        case ["mlp", *rest]:
            return ("layers", "dense_mlp", *rest), (same,)
        case _:
            return ("layers", *rest), (layer,)


def check_parameters(params: nnx.State, tensors: Tensors, config: GLMConfig) -> None:
    """Compares every parameter with the tensors, which are known from elsewhere."""
    _, abstract = abstract_model(config)
    assert jax.tree.structure(params) == jax.tree.structure(abstract)
    values = {path: leaf.get_value() for path, leaf in nnx.to_flat_state(params)}
    arrays = {path: np.asarray(value) for path, value in values.items()}
    for name, tensor in tensors.items():
        path, place = place_of(name, config)
        kept = path[-1] in ("scale", "e_score_correction_bias")
        if tensor.dtype != DTYPES["F8_E4M3"]:
            tensor = tensor.astype("float32" if kept else jnp.dtype(config.compute_dtype))
        assert arrays[path].dtype == tensor.dtype, name
        assert arrays[path][place].tobytes() == tensor.tobytes(), name


@pytest.mark.compiles
@pytest.mark.parametrize(
    ("config", "compute_dtype", "num_devices"),
    [
        (F32, "float32", 1),
        (F32, "bfloat16", 4),
        (BF16, "float32", 2),
        (BF16, "bfloat16", 1),
        (FP8, "float32", 2),
        (FP8, "bfloat16", 4),
    ],
    ids=lambda value: {F32: "F32", BF16: "BF16", FP8: "FP8"}.get(value),
)
def test_values(config: GLMConfig, compute_dtype: str, num_devices: int, tmp_path: Path) -> None:
    """A parameter filled with another tensor's values, or changed on the way to its shards."""
    tensors = make_tensors(config)
    write_shards(tmp_path, split(tensors, 3))
    config = config.replace(compute_dtype=compute_dtype)
    params = load_checkpoint(tmp_path, config, make_mesh(num_devices))
    check_parameters(params, tensors, config)
    _, abstract = abstract_model(config)
    specs = dict(nnx.to_flat_state(parameter_specs(abstract)))
    for path, leaf in nnx.to_flat_state(params):
        value = leaf.get_value()
        assert value.sharding.spec == specs[path].get_value()
        assert len(value.addressable_shards) == num_devices
        axes = sum(axis is not None for axis in value.sharding.spec)
        assert value.addressable_shards[0].data.size * num_devices**axes == value.size


@pytest.mark.compiles
@pytest.mark.parametrize(("files", "index"), [(1, False), (1, True), (2, True), (5, False)])
def test_files(files: int, index: bool, tmp_path: Path) -> None:
    """A checkpoint of one file, of many, or without an index, of which not all is read."""
    tensors = make_tensors(FP8)
    shards = split(tensors, files)
    scale = MATRIX + "_scale_inv"
    holders = [[name for name in (MATRIX, scale) if name in shard] for shard in shards.values()]
    assert (holders.count([MATRIX, scale]) == 0) == (files > 1), "a scale lies apart"
    write_shards(tmp_path, shards, index)
    check_parameters(load_hugging_face(str(tmp_path), FP8, make_mesh()), tensors, FP8)


@pytest.mark.compiles
@pytest.mark.parametrize(
    ("kit", "num_devices"), [("tiny_f32", 1), ("tiny_fp8", 4), ("tiny_mtp", 1)]
)
def test_golden_values(kit: str, num_devices: int) -> None:
    """A file that another program wrote, read otherwise than by the safetensors package."""
    tensors = {}
    for file in (GOLDEN / kit).glob("*.safetensors"):
        for name, entry in safetensors.deserialize(file.read_bytes()):
            values = np.frombuffer(entry["data"], DTYPES[entry["dtype"]])
            tensors[name] = values.reshape(entry["shape"])
    check_parameters(golden_params(kit, num_devices), tensors, golden_config(kit))


@pytest.mark.compiles
@pytest.mark.parametrize("num_devices", [1, 2, 4])
def test_dequantised_matrices(num_devices: int, tmp_path: Path) -> None:
    """A device that takes the scale of another block than its rows or columns lie in."""
    tensors = make_tensors(FP8)
    mesh = make_mesh(num_devices)
    params = load_hugging_face(write(tmp_path, tensors), FP8, mesh)
    graph, abstract = abstract_model(FP8)
    modules = {path: node for path, node in nnx.iter_graph(nnx.merge(graph, abstract))}
    names = [name for name in tensors if name + "_scale_inv" in tensors]
    places = {name: place_of(name, FP8) for name in names}
    linears = {path[:-1]: modules[path[:-1]] for path, _ in places.values()}
    assert all(isinstance(linear, Linear) for linear in linears.values())

    def dequantise(params: nnx.State) -> dict[str, jax.Array]:
        model = nnx.merge(graph, params)
        found = dict(nnx.iter_graph(model))
        return {
            name: dequantized(found[path[:-1]].stack, *place)
            for name, (path, place) in places.items()
        }

    matrices = jax.jit(
        jax.shard_map(
            dequantise,
            mesh=mesh,
            in_specs=(parameter_specs(abstract),),
            out_specs={
                name: partition_spec(linears[path[:-1]].axes) for name, (path, _) in places.items()
            },
            check_vma=False,
        )
    )(params)
    straddled = 0
    for name, matrix in matrices.items():
        scale = tensors[name + "_scale_inv"]
        rows, columns = (np.arange(size) // 128 for size in matrix.shape)
        expected = tensors[name].astype(np.float32) * scale[rows[:, None], columns[None, :]]
        assert matrix.dtype == jnp.float32
        np.testing.assert_array_equal(np.asarray(matrix), expected, err_msg=name)
        local = matrix.addressable_shards[0].data.shape
        cut = zip(local, matrix.shape, strict=True)
        straddled += any(part < whole and part % 128 for part, whole in cut)
    assert len(matrices) == 4 * 5 + 3 * 2 + 3 + 3 * (3 + 1) * 3
    assert bool(straddled) == (num_devices > 1)


@pytest.mark.compiles
def test_memory_dtypes(tmp_path: Path) -> None:
    """FP8 weights that are widened in memory."""
    params = load_hugging_face(write(tmp_path, make_tensors(FP8)), FP8, make_mesh(2))
    held = {path: leaf.get_value().dtype.name for path, leaf in nnx.to_flat_state(params)}
    scaled = {path[:-1] for path in held if path[-1] == "scale"}
    assert {held[*path, "weight"] for path in scaled} == {"float8_e4m3fn"}
    narrow = [path for path, dtype in held.items() if dtype == "float8_e4m3fn"]
    assert len(narrow) == len(scaled) == 5 + 2 + 3 + 3 + 3


@pytest.mark.compiles
def test_model_without_some_layers(tmp_path: Path) -> None:
    """A stack of no layers that is left out of the parameters."""
    config = F32.replace(mlp_layer_types=("dense",) * 3, num_nextn_predict_layers=0)
    tensors = make_tensors(config)
    params = load_hugging_face(write(tmp_path, tensors), config, make_mesh(2))
    check_parameters(params, tensors, config)
    experts = dict(nnx.to_flat_state(params))["layers", "moe", "experts", "up_proj", "weight"]
    assert experts.get_value().size == 0


@pytest.mark.compiles
def test_duplicates_of_the_draft_layer(tmp_path: Path) -> None:
    """A copy of the embedding and the head in the draft layer that is refused, or taken."""
    tensors = make_tensors(BF16)
    wrong = np.zeros((2, 3), np.float32)
    copies = {"embed_tokens.weight": wrong, "shared_head.head.weight": wrong}
    written = {f"model.layers.3.{name}": value for name, value in copies.items()} | tensors
    check_parameters(load_hugging_face(write(tmp_path, written), BF16, make_mesh()), tensors, BF16)
    without = BF16.replace(num_nextn_predict_layers=0)
    assert any("extra tensor model.layers.3.embed" in line for line in problems(tmp_path, without))


def test_everything_wrong_is_told_at_once(tmp_path: Path) -> None:
    """A second problem that shows only when the first is mended."""
    tensors = make_tensors(BF16)
    shards = split(tensors, 4)
    first, second, third, fourth = shards
    missing, misshapen, retyped, moved = list(shards[first])[:4]
    del shards[first][missing]
    shards[first][misshapen] = np.zeros((*tensors[misshapen].shape, 1), ml_dtypes.bfloat16)
    shards[first][retyped] = tensors[retyped].astype(np.float32)
    shards[second]["model.layers.9.extra"] = np.zeros(3, np.int8)
    shards[second][moved] = tensors[moved]
    write_shards(tmp_path, shards)
    listed = {tensor: name for name, shard in shards.items() for tensor in shard}
    listed |= {missing: first, moved: first}
    write_index(tmp_path, listed)
    (tmp_path / third).unlink()
    torn = tmp_path / fourth
    torn.write_bytes(torn.read_bytes()[:-7])
    size = torn.stat().st_size
    shape = list(tensors[misshapen].shape)
    assert set(problems(tmp_path)) == {
        f"missing tensor {missing}",
        f"{INDEX} places {missing} in {first}, which does not hold it",
        f"{misshapen} has shape {[*shape, 1]}, expected {shape}",
        f"{retyped} has dtype F32, expected BF16",
        "extra tensor model.layers.9.extra I8 [3]",
        f"{moved} is in both {first} and {second}",
        f"missing file {third}",
        f"{fourth} is truncated or torn: its tensors end at byte {size + 7}, the file at {size}",
    }


def test_lost_tensors_without_index(tmp_path: Path) -> None:
    """A file that cannot be read, and whose tensors are each told as missing beside it."""
    shards = split(make_tensors(BF16), 2)
    write_shards(tmp_path, shards, index=False)
    first, _ = shards
    (tmp_path / first).write_bytes(b"")
    assert problems(tmp_path) == (f"{first} is truncated: 0 bytes hold no header",)
    (tmp_path / first).unlink()
    assert set(problems(tmp_path)) == {f"missing tensor {name}" for name in shards[first]}
    (tmp_path / first).mkdir()
    (found,) = problems(tmp_path)
    assert first in found and "directory" in found
    (tmp_path / first).rmdir()
    (tmp_path / first).symlink_to("nowhere")
    assert problems(tmp_path) == (f"missing file {first}",)


def test_many_problems(tmp_path: Path) -> None:
    """A message that grows with the checkpoint, or that hides how much is wrong."""
    path = write(tmp_path, {"extra": np.zeros(1, np.float32)})
    found = problems(path)
    assert len(found) == len(drawn_tensors(BF16)) + 1 > 100
    with pytest.raises(CheckpointError) as caught:
        load_hugging_face(path, BF16, make_mesh())
    assert len(str(caught.value).splitlines()) == 102
    assert f"{len(found) - 100} more" in str(caught.value)


@pytest.mark.parametrize("config", [F32, BF16, FP8], ids=["F32", "BF16", "FP8"])
def test_other_dtype(config: GLMConfig, tmp_path: Path) -> None:
    """A checkpoint of one format that is read as another."""
    path = write(tmp_path, make_tensors(config))
    for other in (F32, BF16, FP8):
        if other != config:
            assert any(line.startswith("model.norm") for line in problems(path, other)) == (
                config.weight_dtype != other.weight_dtype
            )
            assert any("q_a_proj.weight has dtype" in line for line in problems(path, other))


SMALL_VALUES = [NORM, "model.norm.weight", "model.layers.3.hnorm.weight", BIAS]
SMALL_VALUES += ["model.layers.2.self_attn.indexer.k_norm.bias"]
SMALL_VALUES += ["model.layers.0.self_attn.kv_a_layernorm.weight"]
SCALES = [MATRIX + "_scale_inv", "model.layers.0.self_attn.o_proj.weight_scale_inv"]


def spoil(tensors: Tensors, names: Iterable[str]) -> set[str]:
    """Puts NaN or infinity into tensors; returns what must be told."""
    bad = itertools.cycle([math.nan, math.inf, -math.inf])
    for name in names:
        tensors[name] = tensors[name].copy()
        tensors[name].flat[-1] = next(bad)
    return {f"{name} holds 1 values that are not finite" for name in names}


@pytest.mark.compiles
@pytest.mark.parametrize("config", [F32, BF16, FP8], ids=["F32", "BF16", "FP8"])
def test_numbers_that_are_not_finite(config: GLMConfig, tmp_path: Path) -> None:
    """One bad number that spoils every token, loaded without a word."""
    tensors = make_tensors(config)
    told = spoil(tensors, SMALL_VALUES + SCALES * config.fp8_weights)
    path = write(tmp_path, tensors)
    for compute_dtype in ("float32", "bfloat16"):
        computed = config.replace(compute_dtype=compute_dtype)
        assert set(problems(path, computed)) == told


def test_no_files(tmp_path: Path) -> None:
    """No checkpoint where one is looked for."""
    file = tmp_path / "a file"
    file.write_text("")
    empty = tmp_path / "empty"
    empty.mkdir()
    for path in (empty, file, tmp_path / "nowhere"):
        with pytest.raises(FileNotFoundError, match=path.name):
            load_checkpoint(path, F32, make_mesh())
        with pytest.raises(FileNotFoundError, match=path.name):
            read_config(path)
    assert read_config(GOLDEN / "tiny_f32") == GLMConfig.from_pretrained(GOLDEN / "tiny_f32")


NAMES = [
    "../a.safetensors",
    "/etc/passwd",
    "a",
    "",
    ".",
    "..",
    "a\0.safetensors",
    5,
    None,
    ["a"],
    {},
]
DAMAGED = [
    *(json.dumps({"weight_map": {NORM: name}}).encode() for name in NAMES),
    *(json.dumps({"weight_map": listed}).encode() for listed in (None, [], {}, "a", 1, [NORM])),
    *(b"", b"{", b"[]", b"{}", b"null", b"\xff\xfe", b"[" * 100_000, b'{"weight_map": NaN}'),
]


@pytest.mark.parametrize("content", DAMAGED, ids=lambda content: repr(content[:60]))
def test_damaged_index(content: bytes, tmp_path: Path) -> None:
    """An index that fails deep inside, or leads out of the directory."""
    write(tmp_path, make_tensors(BF16))
    (tmp_path / INDEX).write_bytes(content)
    (found,) = problems(tmp_path)
    assert f"{INDEX} is damaged" in found


def test_odd_file_names(tmp_path: Path) -> None:
    """A listed name that the file system refuses."""
    names = ["x" * 300 + ".safetensors", "\ud800.safetensors", ".safetensors.safetensors"]
    write_index(tmp_path, {f"tensor {n}": name for n, name in enumerate(names)})
    assert len(problems(tmp_path)) == len(names) + len(drawn_tensors(BF16))


@settings(max_examples=40)
@given(
    index=JSON | st.fixed_dictionaries({"weight_map": JSON | st.dictionaries(st.just(NORM), JSON)}),
    header=HEADER,
)
def test_any_directory(index: Any, header: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    """An index or a header that raises anything but CheckpointError."""
    path = tmp_path_factory.mktemp("any")
    (path / INDEX).write_text(json.dumps(index))
    (path / "a.safetensors").write_bytes(frame(header))
    with pytest.raises(CheckpointError):
        load_hugging_face(path, F32, make_mesh())
    write_index(path, {NORM: "a.safetensors"})
    with pytest.raises(CheckpointError):
        load_hugging_face(path, F32, make_mesh())


def test_truncated_checkpoint(tmp_path: Path) -> None:
    """A checkpoint cut short anywhere that is loaded."""
    path = write(tmp_path, make_tensors(FP8))
    content = (path / "model.safetensors").read_bytes()
    for size in (0, 7, 8, 9, 1000, 20_000, len(content) // 2, len(content) - 1):
        (path / "model.safetensors").write_bytes(content[:size])
        (found,) = problems(path, FP8)
        assert "model.safetensors is truncated" in found


# Loads a checkpoint and prints how far the peak memory grows, and the parameters' size, in bytes.
LOAD = """
import sys
import jax
from glm53.checkpoint import load_hugging_face
from glm53.checkpoint.source import read_config
from glm53.model.sharding import make_mesh
from tests.helpers.peak_memory import peak_memory

config, mesh = read_config(sys.argv[1]), make_mesh(int(sys.argv[3]))
config = config.replace(compute_dtype=sys.argv[2])
small = "tests/data/golden/tiny_f32"
jax.block_until_ready(load_hugging_face(small, read_config(small), mesh))
before = peak_memory()
params = load_hugging_face(sys.argv[1], config, mesh)
jax.block_until_ready(params)
leaves = jax.tree.leaves(params)
print(peak_memory() - before)
print(sum(shard.data.nbytes for leaf in leaves for shard in leaf.addressable_shards))
"""
# What the compiled insertions and Python itself may take.
ALLOWANCE = 20 * MIB


@pytest.fixture(scope="module")
def large_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of 200 MiB in float32, whose stacks of experts take 60 MiB each."""
    path = tmp_path_factory.mktemp("large")
    fields = json.loads((GOLDEN / "tiny_f32" / "config.json").read_text(encoding="utf-8"))
    fields |= {"hidden_size": 512, "moe_intermediate_size": 512, "n_routed_experts": 12}
    (path / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    specs = tensor_inventory(GLMConfig.from_pretrained(path))
    write_shards(path, split({spec.name: np.ones(spec.shape, np.float32) for spec in specs}, 2))
    return path


@pytest.mark.parametrize(
    ("compute_dtype", "num_devices", "stack"),
    [("float32", 1, 60 * MIB), ("bfloat16", 4, 30 * MIB)],
)
def test_peak_memory(
    compute_dtype: str, num_devices: int, stack: int, large_checkpoint: Path
) -> None:
    """Weights that are whole in host memory beside the parameters, or stacks that are copied."""
    config = read_config(large_checkpoint)
    largest = max(spec.num_bytes for spec in tensor_inventory(config))
    # Twice the largest: the one that is read and the one that is put in its place.
    most = 2 * largest + ALLOWANCE
    assert most < stack
    growth, held = run_script(
        LOAD, large_checkpoint, compute_dtype, num_devices, num_devices=num_devices
    )
    assert growth - held < most
