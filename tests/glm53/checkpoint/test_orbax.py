import asyncio
import dataclasses
import functools
import json
import math
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx

from glm53.checkpoint import CheckpointError, load_checkpoint, load_orbax, save_orbax
from glm53.checkpoint.orbax import CONFIG_FILE
from glm53.checkpoint.source import read_config
from glm53.model.config import GLMConfig
from glm53.model.params import abstract_model
from glm53.model.presets import preset
from glm53.model.sharding import make_mesh, parameter_shardings
from tests.helpers.full_disk import full_disk
from tests.helpers.peak_memory import run_script

pytestmark = pytest.mark.compiles
F32 = preset("test-small")
FP8 = preset("test-small-fp8")


@functools.cache
def make_params(config: GLMConfig, num_devices: int) -> nnx.State:
    """Random parameters, the same on any number of devices."""
    rng = np.random.default_rng(0)
    _, abstract = abstract_model(config)
    return jax.tree.map(
        lambda leaf, place: jax.device_put(
            rng.standard_normal(leaf.shape).astype(leaf.dtype), place
        ),
        abstract,
        parameter_shardings(abstract, make_mesh(num_devices)),
    )


def arrays(params: nnx.State) -> dict[tuple, np.ndarray]:
    return {path: np.asarray(leaf.get_value()) for path, leaf in nnx.to_flat_state(params)}


def check_equal(params: nnx.State, expected: nnx.State, compute_dtype: str | None = None) -> None:
    """Compares bit for bit, after a cast of what is neither FP8 nor kept in float32."""
    found, wanted = arrays(params), arrays(expected)
    assert found.keys() == wanted.keys()
    for path, value in wanted.items():
        kept = value.dtype.itemsize == 1 or path[-1] in ("scale", "e_score_correction_bias")
        if compute_dtype and not kept:
            value = value.astype(jax.numpy.dtype(compute_dtype))
        assert found[path].dtype == value.dtype, path
        assert found[path].tobytes() == value.tobytes(), path


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[GLMConfig, Path]:
    """Checkpoints, the float32 one saved from one device and the FP8 one from four."""
    paths = {}
    for config, num_devices in ((F32, 1), (FP8, 4)):
        paths[config] = tmp_path_factory.mktemp("orbax") / "new" / "checkpoint"
        save_orbax(paths[config], config, make_params(config, num_devices))
    return paths


@pytest.fixture
def copied(saved: dict[GLMConfig, Path], tmp_path: Path) -> Path:
    """A checkpoint that a test may damage."""
    return shutil.copytree(saved[F32], tmp_path / "copy")


@pytest.mark.parametrize("num_devices", [1, 2, 4])
@pytest.mark.parametrize("config", [F32, FP8], ids=["F32", "FP8"])
def test_values(config: GLMConfig, num_devices: int, saved: dict[GLMConfig, Path]) -> None:
    """A value changed by saving, or by restoring on another number of devices."""
    params = load_checkpoint(saved[config], config, make_mesh(num_devices))
    check_equal(params, make_params(config, 1))
    expected = make_params(config, num_devices)
    assert jax.tree.structure(params) == jax.tree.structure(expected)
    for leaf, other in zip(jax.tree.leaves(params), jax.tree.leaves(expected), strict=True):
        assert leaf.sharding.is_equivalent_to(other.sharding, leaf.ndim)
    narrow = {leaf.dtype.name for leaf in jax.tree.leaves(params) if leaf.dtype.itemsize == 1}
    assert narrow == ({"float8_e4m3fn"} if config.fp8_weights else set())


@pytest.mark.parametrize("config", [F32, FP8], ids=["F32", "FP8"])
@pytest.mark.parametrize("compute_dtype", ["float32", "bfloat16"])
def test_other_compute_dtype(
    config: GLMConfig, compute_dtype: str, saved: dict[GLMConfig, Path]
) -> None:
    """Parameters restored in another dtype than asked for, or FP8 and float32 ones cast too."""
    computed = config.replace(compute_dtype=compute_dtype, latent_norm_eps=1e-6)
    params = load_orbax(saved[config], computed, make_mesh(2))
    check_equal(params, make_params(config, 1), compute_dtype)


def test_config(saved: dict[GLMConfig, Path]) -> None:
    """A config that is not what was saved; the checkpoint has no other."""
    for config, path in saved.items():
        assert read_config(path) == config
        assert read_config(str(path)) == config


def test_existing_directory(saved: dict[GLMConfig, Path], tmp_path: Path) -> None:
    """A checkpoint written over what was there."""
    (tmp_path / "file").write_text("")
    for path in (saved[F32], tmp_path, tmp_path / "file"):
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(FileExistsError, match=f"{path.name} exists; choose"):
            save_orbax(path, F32, make_params(F32, 1))
        assert sorted(tmp_path.rglob("*")) == before
    check_equal(load_orbax(saved[F32], F32, make_mesh()), make_params(F32, 1))


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"vocab_size": 512}, {"vocab_size"}),
        ({"rope_theta": 1e6, "index_topk": 7}, {"rope_theta", "index_topk"}),
        ({"fp8_weights": True}, {"fp8_weights"}),
        ({"weight_dtype": "bfloat16"}, {"weight_dtype"}),
        ({"eos_token_ids": ()}, {"eos_token_ids"}),
        ({"indexer_types": ("full",) * len(F32.indexer_types)}, {"indexer_types"}),
    ],
)
def test_other_model(
    changes: dict[str, Any], names: set[str], saved: dict[GLMConfig, Path]
) -> None:
    """Another model's parameters, which may even have the same shapes."""
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(saved[F32], F32.replace(**changes), make_mesh())
    assert {problem.split()[0] for problem in caught.value.problems} == names


BROKEN = [b"", b"{", b"[]", b"null", b"{}", b"\xff\xff", b"[" * 100_000, b'{"vocab_size": 256}']


@pytest.mark.parametrize("content", BROKEN, ids=lambda content: repr(content[:20]))
def test_broken_config(content: bytes, copied: Path) -> None:
    """A config file that fails deep inside."""
    (copied / CONFIG_FILE).write_bytes(content)
    for read in (read_config, lambda path: load_checkpoint(path, F32, make_mesh())):
        with pytest.raises(CheckpointError, match=f"{CONFIG_FILE} is damaged"):
            read(copied)


@pytest.mark.parametrize(
    "field",
    ["vocab_size", "rope_theta", "indexer_types", "eos_token_ids", "fp8_weights", "compute_dtype"],
)
def test_wrong_values_in_config(field: str, tmp_path: Path) -> None:
    """A value of a wrong type or range that is taken, or fails deep inside."""
    for value in (None, "x", -1, math.nan, [[]], ["x"], {}):
        fields = dataclasses.asdict(F32) | {field: value}
        (tmp_path / CONFIG_FILE).write_text(json.dumps(fields))
        with pytest.raises(CheckpointError, match=f"{CONFIG_FILE} is damaged"):
            read_config(tmp_path)


def test_unknown_field_in_config(tmp_path: Path) -> None:
    """A config of another version of the project that is read in part."""
    (tmp_path / CONFIG_FILE).write_text(json.dumps(dataclasses.asdict(F32) | {"new_field": 1}))
    with pytest.raises(CheckpointError, match="new_field"):
        read_config(tmp_path)


def test_missing_config(copied: Path) -> None:
    """A directory without the config that is taken for a checkpoint."""
    (copied / CONFIG_FILE).unlink()
    with pytest.raises(FileNotFoundError, match="copy"):
        load_checkpoint(copied, F32, make_mesh())
    with pytest.raises(FileNotFoundError, match="copy"):
        read_config(copied)
    with pytest.raises(CheckpointError, match=f"missing file {CONFIG_FILE}"):
        load_orbax(copied, F32, make_mesh())


# Restores each directory and prints whether that was refused in the way it should be. Orbax leaves
# reads unfinished, which Python reports at any later time: so in a process of its own.
RESTORE = """
import sys
from glm53.checkpoint import CheckpointError, load_checkpoint
from glm53.checkpoint.source import read_config
from glm53.model.sharding import make_mesh

for path in sys.argv[1:]:
    try:
        load_checkpoint(path, read_config(path), make_mesh(2))
    except CheckpointError as error:
        (problem,) = error.problems
        print(int(problem.startswith("orbax cannot restore it: ") and len(problem) < 500))
    else:
        print(0)
"""


def test_damaged_arrays(saved: dict[GLMConfig, Path], tmp_path: Path) -> None:
    """Array data cut, lost, or of other shapes than the config's, restored or filled with zeros."""
    paths = [shutil.copytree(saved[F32], tmp_path / str(n)) for n in range(7)]

    def largest(path: Path) -> Path:
        return max(path.rglob("*"), key=lambda file: file.stat().st_size)

    content = largest(paths[0]).read_bytes()
    largest(paths[0]).write_bytes(content[: len(content) // 2])
    largest(paths[1]).write_bytes(b"")
    largest(paths[2]).unlink()
    shutil.rmtree(paths[3] / "params")
    changes = ({"vocab_size": 512}, {"vocab_size": 128, "eos_token_ids": ()})
    for path, change in zip(paths[4:], (*changes, {"num_nextn_predict_layers": 0}), strict=True):
        fields = dataclasses.asdict(F32.replace(**change))
        (path / CONFIG_FILE).write_text(json.dumps(fields))
    assert run_script(RESTORE, *paths, num_devices=2) == [1] * len(paths)


def test_inside_an_event_loop(saved: dict[GLMConfig, Path], tmp_path: Path) -> None:
    """A notebook or a server, where a loop that runs already forbids orbax its own."""

    async def save_and_restore() -> nnx.State:
        save_orbax(tmp_path / "new", F32, make_params(F32, 1))
        return load_orbax(tmp_path / "new", F32, make_mesh())

    check_equal(asyncio.run(save_and_restore()), make_params(F32, 1))


def test_without_experts(tmp_path: Path) -> None:
    """Stacks of no layers, which orbax refuses to write."""
    config = FP8.replace(
        mlp_layer_types=("dense",) * FP8.num_hidden_layers, num_nextn_predict_layers=0
    )
    params = make_params(config, 1)
    assert not all(value.size for value in arrays(params).values())
    save_orbax(tmp_path / "saved", config, params)
    check_equal(load_checkpoint(tmp_path / "saved", config, make_mesh(2)), params)


@pytest.mark.parametrize("room", [0, 60_000])
def test_full_disk(
    room: int,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Half a checkpoint, also of writes that go on, or pages of what orbax has to say."""
    params = make_params(F32, 1)
    caplog.clear()
    with full_disk(room), pytest.raises(OSError, match=f"'{tmp_path / 'saved'}'$"):
        save_orbax(tmp_path / "saved", F32, params)
    assert not list(tmp_path.iterdir())
    assert capfd.readouterr().err == ""
    assert not caplog.records


def test_interrupted_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save that was interrupted at its last write of arrays, and leaves what looks whole."""
    close = ocp.StandardCheckpointer.close

    def interrupt(checkpointer: ocp.StandardCheckpointer) -> None:
        close(checkpointer)
        raise KeyboardInterrupt

    monkeypatch.setattr(ocp.StandardCheckpointer, "close", interrupt)
    with pytest.raises(KeyboardInterrupt):
        save_orbax(tmp_path / "checkpoint", F32, make_params(F32, 1))
    assert not list(tmp_path.iterdir())
