"""Saves and restores parameters as a sharded orbax checkpoint, with the config beside it."""

import dataclasses
import json
from pathlib import Path

import jax
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import Mesh

from glm53.checkpoint.errors import CheckpointError
from glm53.config import GLMConfig
from glm53.model import abstract_model
from glm53.sharding import check_mesh, parameter_shardings

CONFIG_FILE = "glm53_config.json"
_PARAMS = "params"
_SHOWN = 400


def save_orbax(path: str | Path, config: GLMConfig, params: nnx.State) -> None:
    """Writes parameters and config to a new directory.

    Raises:
        FileExistsError: the directory exists.
    """
    path = Path(path).absolute()
    if path.exists():
        raise FileExistsError(f"{path} exists; choose a new directory")
    path.mkdir(parents=True)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path / _PARAMS, nnx.to_pure_dict(params))
    # Written last: a directory without it is not a checkpoint.
    text = json.dumps(dataclasses.asdict(config), indent=1)
    (path / CONFIG_FILE).write_text(text, encoding="utf-8")


def read_orbax_config(path: str | Path) -> GLMConfig:
    """The config of an orbax checkpoint.

    Raises:
        CheckpointError: the file is missing or damaged.
    """
    file = Path(path) / CONFIG_FILE
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
        lists = {name: tuple(value) for name, value in fields.items() if isinstance(value, list)}
        return GLMConfig(**(fields | lists))
    except FileNotFoundError as error:
        raise CheckpointError(path, [f"missing file {CONFIG_FILE}"]) from error
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(path, [f"{CONFIG_FILE} is damaged: {error}"]) from error


def load_orbax(path: str | Path, config: GLMConfig, mesh: Mesh) -> nnx.State:
    """Restores parameters straight into their shards, in the dtypes that `config` asks for.

    Values saved in bfloat16 keep that precision in float32.

    Raises:
        CheckpointError: the checkpoint is of another model, or damaged.
        ValueError: the mesh does not divide a sharded axis.
    """
    check_mesh(config, mesh)
    path = Path(path).absolute()
    stored = read_orbax_config(path)
    _, abstract = abstract_model(config)
    _check_same_model(path, config, stored)
    shardings = parameter_shardings(abstract, mesh)
    targets = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        nnx.to_pure_dict(abstract),
        nnx.to_pure_dict(shardings),
    )
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            restored = checkpointer.restore(path / _PARAMS, targets)
    except Exception as error:  # of truncated data orbax reports a bare Exception, pages long
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:_SHOWN]
        raise CheckpointError(path, [f"orbax cannot restore it: {reason}"]) from error
    nnx.replace_by_pure_dict(abstract, restored)
    return abstract


def _check_same_model(path: Path, config: GLMConfig, stored: GLMConfig) -> None:
    """Only how the model is computed may differ from what was saved."""
    runtime = {"compute_dtype", "latent_norm_eps", "activation_quantization"}
    problems = []
    for field in dataclasses.fields(GLMConfig):
        wanted, given = getattr(config, field.name), getattr(stored, field.name)
        if field.name not in runtime and wanted != given:
            problems.append(f"{field.name} is {given!r}, expected {wanted!r}")
    if problems:
        raise CheckpointError(path, problems)
