import functools
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors import safe_open

from glm53.checkpoint import (
    CheckpointError,
    Conversion,
    convert_checkpoint,
    load_checkpoint,
    safetensors_writer,
    save_orbax,
    tensor_inventory,
)
from glm53.checkpoint.convert import hugging_face_config
from glm53.checkpoint.orbax import CONFIG_FILE
from glm53.checkpoint.safetensors_file import SafetensorsFile
from glm53.checkpoint.source import read_config
from glm53.model.config import GLMConfig
from glm53.model.params import abstract_model
from glm53.model.presets import preset, preset_names
from glm53.model.sharding import make_mesh
from tests.helpers.full_disk import full_disk
from tests.helpers.golden import GOLDEN
from tests.helpers.peak_memory import MIB, run_script

ROOT = Path(__file__).parents[3]
KITS = ("tiny_f32", "tiny_fp8", "tiny_mtp")
INDEX = "model.safetensors.index.json"
EXTRA_FILES = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)


def stored_bytes(path: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """dtype, shape and bytes of each tensor of a safetensors directory."""
    found = {}
    for file in map(SafetensorsFile, sorted(path.glob("*.safetensors"))):
        for name, entry in file.tensors.items():
            assert name not in found
            found[name] = (entry.dtype, entry.shape, file.read(name).tobytes())
    return found


def parameter_bytes(path: Path) -> dict[tuple, tuple[str, tuple[int, ...], bytes]]:
    """dtype, shape and bytes of each parameter that a checkpoint loads as."""
    params = load_checkpoint(path, read_config(path), make_mesh())
    arrays = {name: np.asarray(leaf.get_value()) for name, leaf in nnx.to_flat_state(params)}
    return {name: (x.dtype.name, x.shape, x.tobytes()) for name, x in arrays.items()}


def tree(path: Path) -> dict[str, bytes]:
    """Every file below a directory, and its content."""
    return {
        str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()
    }


@functools.cache
def orbax_form(kit: str, folder: Path) -> Path:
    """A golden checkpoint that was converted once."""
    convert_checkpoint(GOLDEN / kit, folder / kit)
    return folder / kit


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("orbax")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A safetensors checkpoint that a test may change."""
    names = shutil.ignore_patterns("golden.npz")
    return shutil.copytree(GOLDEN / "tiny_mtp", tmp_path / "source", ignore=names)


@pytest.mark.compiles
@pytest.mark.parametrize("kit", KITS)
@pytest.mark.parametrize("max_bytes", [1 << 30, 500_000])
def test_round_trip(
    kit: str, max_bytes: int, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bit, a dtype, a shape, a name or a setting that changes on the way there or back."""
    monkeypatch.setattr(safetensors_writer, "MAX_FILE_BYTES", max_bytes)
    middle, back = orbax_form(kit, folder), tmp_path / "new" / "back"
    expected = stored_bytes(GOLDEN / kit)
    size = sum(len(content) for *_, content in expected.values())
    assert convert_checkpoint(middle, back) == Conversion("safetensors", len(expected), size)
    assert stored_bytes(back) == expected
    assert parameter_bytes(GOLDEN / kit) == parameter_bytes(middle) == parameter_bytes(back)
    for path in (middle, back):
        assert read_config(path) == GLMConfig.from_pretrained(GOLDEN / kit)
        written = (path / "config.json").read_bytes()
        assert written == (GOLDEN / kit / "config.json").read_bytes()
    sizes = {file.name: file.stat().st_size for file in back.glob("*.safetensors")}
    assert max(sizes.values()) <= max_bytes
    if max_bytes > size:
        assert list(sizes) == ["model.safetensors"]
        assert not (back / INDEX).exists()
    else:
        count = len(sizes)
        assert count > 2
        assert sorted(sizes) == [
            f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)
        ]
        index = json.loads((back / INDEX).read_text())
        assert index["metadata"] == {"total_size": size}
        assert index["weight_map"].keys() == expected.keys()


@pytest.mark.compiles
@pytest.mark.parametrize("kit", KITS)
def test_report_and_format(kit: str, tmp_path: Path) -> None:
    """A wrong count in the report, or a safetensors directory that is not recognised as one."""
    specs = tensor_inventory(GLMConfig.from_pretrained(GOLDEN / kit))
    size = sum(spec.num_bytes for spec in specs)
    assert convert_checkpoint(str(GOLDEN / kit), str(tmp_path / "new")) == Conversion(
        "orbax", len(specs), size
    )
    assert sorted(file.name for file in (tmp_path / "new").iterdir()) == [
        "config.json",
        CONFIG_FILE,
        "params",
    ]


@pytest.mark.compiles
@pytest.mark.parametrize("kit", KITS)
def test_read_by_safetensors(
    kit: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files that only this project's reader accepts, or tensors that are not aligned."""
    monkeypatch.setattr(safetensors_writer, "MAX_FILE_BYTES", 1_000_000)
    convert_checkpoint(orbax_form(kit, folder), tmp_path / "back")
    expected = stored_bytes(GOLDEN / kit)
    files = sorted((tmp_path / "back").glob("*.safetensors"))
    listed = json.loads((tmp_path / "back" / INDEX).read_text())["weight_map"]
    seen = set()
    for path in files:
        for name, entry in SafetensorsFile(path).tensors.items():
            assert entry.start % {"F32": 4, "BF16": 2, "F8_E4M3": 1}[entry.dtype] == 0, name
        with safe_open(path, "np") as tensors:
            assert tensors.metadata() == {"format": "pt"}
            for name in tensors.keys():  # noqa: SIM118
                dtype, shape, content = expected[name]
                part = tensors.get_slice(name)
                assert (part.get_dtype(), tuple(part.get_shape())) == (dtype, shape)
                if dtype != "F8_E4M3":
                    assert tensors.get_tensor(name).tobytes() == content, name
                assert listed[name] == path.name
                seen.add(name)
    assert seen == expected.keys()


@pytest.mark.compiles
def test_every_bit_pattern(source: Path, tmp_path: Path) -> None:
    """Zeros with a sign, subnormal numbers, infinities and NaNs, which arithmetic would change."""
    file = source / "model.safetensors"
    entry = SafetensorsFile(file).tensors["model.embed_tokens.weight"]
    patterns = np.arange((entry.end - entry.start) // 2).astype(np.uint16)
    assert len(set(patterns.tolist())) == 1 << 16
    with file.open("r+b") as out:
        out.seek(entry.start)
        out.write(patterns.tobytes())
    convert_checkpoint(source, tmp_path / "orbax")
    convert_checkpoint(tmp_path / "orbax", tmp_path / "back")
    assert stored_bytes(tmp_path / "back") == stored_bytes(source)


@pytest.mark.compiles
def test_files_that_go_along(source: Path, tmp_path: Path) -> None:
    """A tokenizer or a setting that is lost or rewritten; weights that are copied as well."""
    for name in EXTRA_FILES:
        (source / name).write_text(f"{{ }}\r\n{name} \u00e9", encoding="utf-8", newline="")
    (source / "notes.txt").write_text("of the source alone")
    (source / "config.json").write_bytes((source / "config.json").read_bytes() + b"\n\n")
    convert_checkpoint(source, tmp_path / "orbax")
    convert_checkpoint(tmp_path / "orbax", tmp_path / "back")
    wanted = tree(source)
    del wanted["notes.txt"]
    found = tree(tmp_path / "back")
    assert found.keys() == wanted.keys()
    for name in (*EXTRA_FILES, "config.json"):
        assert found[name] == wanted[name], name
        assert (tmp_path / "orbax" / name).read_bytes() == wanted[name], name


def save_zeros(path: Path, config: GLMConfig, fill: float = 0.0) -> Path:
    _, abstract = abstract_model(config)
    params = jax.tree.map(lambda leaf: jax.numpy.full(leaf.shape, fill, leaf.dtype), abstract)
    save_orbax(path, config, params)
    return path


@pytest.mark.compiles
@pytest.mark.parametrize("name", ["test-small", "test-small-fp8"])
def test_orbax_without_hugging_face_config(name: str, tmp_path: Path) -> None:
    """A directory of `save_orbax` that converts to one without a config, or with another."""
    config = preset(name)
    convert_checkpoint(save_zeros(tmp_path / "saved", config), tmp_path / "back")
    assert GLMConfig.from_pretrained(tmp_path / "back") == config
    assert parameter_bytes(tmp_path / "back") == parameter_bytes(tmp_path / "saved")


@pytest.mark.parametrize("name", preset_names())
def test_hugging_face_config(name: str) -> None:
    """A field that is lost, or that the reader of config.json refuses."""
    for changes in ({}, {"eos_token_ids": ()}, {"num_nextn_predict_layers": 0, "rope_theta": 0.5}):
        config = preset(name).replace(**changes)
        fields = json.loads(json.dumps(hugging_face_config(config)))
        assert GLMConfig.from_hf(fields) == config


@pytest.mark.compiles
def test_wider_parameters(tmp_path: Path) -> None:
    """A BF16 model saved in float32: narrowed where that is exact, and refused where it is not."""
    config = preset("test-small").replace(weight_dtype="bfloat16", compute_dtype="float32")
    convert_checkpoint(save_zeros(tmp_path / "exact", config, 1.5), tmp_path / "back")
    stored = stored_bytes(tmp_path / "back")["model.embed_tokens.weight"]
    assert stored[0] == "BF16"
    assert set(np.frombuffer(stored[2], ml_dtypes.bfloat16).tolist()) == {1.5}
    save_zeros(tmp_path / "inexact", config, 1 + 2**-20)
    with pytest.raises(ValueError, match=r"holds float32 values .* bfloat16 \(weight_dtype"):
        convert_checkpoint(tmp_path / "inexact", tmp_path / "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "exact", "inexact"]


@pytest.mark.compiles
def test_tensor_larger_than_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit below the size of one tensor, or of every one."""
    monkeypatch.setattr(safetensors_writer, "MAX_FILE_BYTES", 1)
    convert_checkpoint(save_zeros(tmp_path / "saved", preset("test-small")), tmp_path / "back")
    count = len(list((tmp_path / "back").glob("*.safetensors")))
    assert count == len(tensor_inventory(preset("test-small")))
    assert parameter_bytes(tmp_path / "back") == parameter_bytes(tmp_path / "saved")


def remove_config(source: Path) -> None:
    (source / "config.json").unlink()


def truncate(source: Path) -> None:
    file = source / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def remove_weights(source: Path) -> None:
    (source / "model.safetensors").unlink()


def break_config(source: Path) -> None:
    (source / "config.json").write_text("{")


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (remove_config, FileNotFoundError, "config.json"),
        (truncate, CheckpointError, "truncated"),
        (remove_weights, FileNotFoundError, "no safetensors file"),
        (break_config, ValueError, "not valid JSON"),
        (shutil.rmtree, FileNotFoundError, "no checkpoint directory"),
    ],
)
def test_damaged_source(
    damage: Callable[[Path], None],
    error: type[Exception],
    message: str,
    source: Path,
    tmp_path: Path,
) -> None:
    """Something left where the checkpoint was to be, or an error without a name."""
    damage(source)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(error, match=message):
        convert_checkpoint(source, tmp_path / "new")
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.compiles
def test_damaged_orbax_source(folder: Path, tmp_path: Path) -> None:
    """The same for orbax: arrays that are gone, and a config.json of another model."""
    lost = shutil.copytree(orbax_form("tiny_f32", folder), tmp_path / "lost")
    shutil.rmtree(lost / "params")
    other = shutil.copytree(orbax_form("tiny_f32", folder), tmp_path / "other")
    fields = json.loads((other / "config.json").read_text())
    fields["rope_parameters"] = {"rope_theta": 123.0, "rope_type": "default"}
    (other / "config.json").write_text(json.dumps(fields))
    for path, message in ((lost, "orbax cannot restore it"), (other, "rope_theta is 8000000.0")):
        with pytest.raises(CheckpointError, match=message):
            convert_checkpoint(path, tmp_path / "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lost", "other"]


def refuse_to_read(*_: object, **__: object) -> Any:
    raise AssertionError("weights were read")


@pytest.mark.parametrize(
    ("destination", "error", "message"),
    [
        ("source", ValueError, "lies in the source"),
        ("source/new", ValueError, "lies in the source"),
        ("other/../source/a/b", ValueError, "lies in the source"),
        ("link/new", ValueError, "lies in the source"),
        ("empty", FileExistsError, "empty exists; choose"),
        ("file", FileExistsError, "file exists; choose"),
        ("dangling", FileExistsError, "dangling exists; choose"),
        ("file/new", OSError, "file"),
    ],
)
def test_refused_destination(
    destination: str,
    error: type[Exception],
    message: str,
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A place that is taken, or inside the source, noticed late or written over."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("kept")
    (tmp_path / "link").symlink_to(source)
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    monkeypatch.setattr("glm53.checkpoint.convert.load_checkpoint", refuse_to_read)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(error, match=message):
        convert_checkpoint(source, tmp_path / destination)
    assert sorted(tmp_path.rglob("*")) == before
    assert (tmp_path / "file").read_text() == "kept"


@pytest.mark.compiles
@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
@pytest.mark.parametrize("to_orbax", [True, False], ids=["to_orbax", "to_safetensors"])
def test_exception(
    to_orbax: bool,
    error: type[BaseException],
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An error or an interruption in the middle of writing that leaves something behind."""
    path = GOLDEN / "tiny_f32" if to_orbax else orbax_form("tiny_f32", folder)
    place = "orbax.sync" if to_orbax else "safetensors_writer._on_disk"
    seen: list[set[str]] = []

    def interrupt(*_: object) -> Any:
        seen.append({file.name for file in tmp_path.rglob("*")})
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(f"glm53.checkpoint.{place}", interrupt)
        with pytest.raises(error):
            convert_checkpoint(path, tmp_path / "new")
    (names,) = seen
    assert ("params" if to_orbax else "model.safetensors") in names
    assert not list(tmp_path.iterdir())
    convert_checkpoint(path, tmp_path / "new")
    assert parameter_bytes(tmp_path / "new") == parameter_bytes(GOLDEN / "tiny_f32")


@pytest.mark.compiles
@pytest.mark.parametrize("room", [100, 100_000])
@pytest.mark.parametrize("to_orbax", [True, False], ids=["to_orbax", "to_safetensors"])
def test_full_disk(to_orbax: bool, room: int, folder: Path, tmp_path: Path) -> None:
    """Half a checkpoint, or an error that does not say which."""
    path = GOLDEN / "tiny_f32" if to_orbax else orbax_form("tiny_f32", folder)
    with full_disk(room), pytest.raises(OSError, match=f"'{tmp_path / 'new'}'$"):
        convert_checkpoint(path, tmp_path / "new")
    assert not list(tmp_path.iterdir())


# Kills itself at the given call of a function.
KILLED = """
import importlib, os, signal, sys
from glm53.checkpoint import convert_checkpoint, safetensors_writer

source, destination, module, name, calls = sys.argv[1:]
safetensors_writer.MAX_FILE_BYTES = 500_000
module = importlib.import_module(module)
original, left = getattr(module, name), int(calls)

def count(*arguments):
    global left
    left -= 1
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)
    return original(*arguments)

setattr(module, name, count)
convert_checkpoint(source, destination)
"""


@pytest.mark.compiles
@pytest.mark.parametrize(
    ("to_orbax", "module", "name", "calls"),
    [
        (True, "glm53.checkpoint.new_directory", "sync_tree", 1),
        (False, "glm53.checkpoint.safetensors_writer", "_on_disk", 100),
    ],
)
def test_killed(
    to_orbax: bool, module: str, name: str, calls: int, folder: Path, tmp_path: Path
) -> None:
    """What a killed process leaves looks like a checkpoint, or gets into the way of the next."""
    path = GOLDEN / "tiny_f32" if to_orbax else orbax_form("tiny_f32", folder)
    done = subprocess.run(
        [sys.executable, "-c", KILLED, path, tmp_path / "new", module, name, str(calls)],
        cwd=ROOT,
        env=os.environ | {"JAX_NUM_CPU_DEVICES": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".new.")
    before = tree(left)
    assert before
    convert_checkpoint(path, tmp_path / "new")
    assert parameter_bytes(tmp_path / "new") == parameter_bytes(GOLDEN / "tiny_f32")
    assert not {name for name in tree(tmp_path / "new") if "tmp" in name or name.startswith(".")}
    assert tree(left) == before


# Prints how far writing grows the peak memory, and the bytes of the largest tensor and of all.
MEMORY = """
import sys
from pathlib import Path
import jax, jax.numpy as jnp
from glm53.checkpoint.inventory import tensor_inventory
from glm53.checkpoint.safetensors_writer import write_safetensors
from glm53.model.params import abstract_model
from glm53.model.presets import preset
from tests.helpers.peak_memory import peak_memory

config = preset("test-small").replace(
    vocab_size=16_384, hidden_size=512, moe_intermediate_size=256, fp8_weights=True
)
_, abstract = abstract_model(config)
params = jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype), abstract)
jax.block_until_ready(params)
Path("/proc/self/clear_refs").write_text("5")
before = peak_memory()
write_safetensors(Path(sys.argv[1]), config, params)
print(peak_memory() - before)
sizes = [spec.num_bytes for spec in tensor_inventory(config)]
print(max(sizes), sum(sizes))
"""


def test_memory_of_writing(tmp_path: Path) -> None:
    """A copy of the parameters, or of a stack, beside the tensor that is written."""
    growth, largest, size = run_script(MEMORY, tmp_path)
    assert largest >= 32 * MIB
    assert size > 2.5 * largest
    assert growth < largest + 8 * MIB
