"""Loads a Hugging Face safetensors directory straight into sharded, stacked parameters.

Everything is checked from the headers before a byte of weight is read. Then files are read one
tensor at a time, each placed in its stack in place, so that host memory beyond the parameters
themselves holds the tensor being read and the one being placed.
"""

import functools
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from tqdm import tqdm

from glm53.checkpoint.errors import CheckpointError
from glm53.checkpoint.inventory import TensorSpec, ignored_tensors, tensor_inventory
from glm53.checkpoint.safetensors_file import SafetensorsFile
from glm53.jax_settings import own_jax_settings
from glm53.model.config import GLMConfig
from glm53.model.params import abstract_model
from glm53.model.sharding import check_mesh, parameter_shardings
from glm53.terminal import terminal_columns

_INDEX = "model.safetensors.index.json"
_FILE_NAME = re.compile(r"[^/\0]+\.safetensors")


@own_jax_settings()
def load_hugging_face(
    path: str | Path, config: GLMConfig, mesh: Mesh, *, use_tqdm: bool = False
) -> nnx.State:
    """Loads the parameters that `config` describes, sharded over `mesh`.

    Args:
        path: directory with one or several safetensors files.
        config: the model; its compute dtype is the dtype of unquantised parameters in memory.
        mesh: where to put them.
        use_tqdm: show progress, if standard error is a terminal.

    Raises:
        FileNotFoundError: no safetensors file.
        CheckpointError: tensors are missing, extra, misshapen or of a wrong type, or a file is
            truncated; all problems are named.
        ValueError: the mesh does not divide a sharded axis.
    """
    check_mesh(config, mesh)
    path = Path(path)
    specs = {spec.name: spec for spec in tensor_inventory(config)}
    files, problems, lost = _open_files(path, specs)
    problems += _check_tensors(files, specs, ignored_tensors(config))
    excused = lost.union(*(file.tensors for file in files))
    problems += [f"missing tensor {name}" for name in specs if name not in excused]
    if problems:
        raise CheckpointError(path, problems)
    return _fill(path, files, specs, config, mesh, use_tqdm)


def _open_files(
    path: Path, specs: Mapping[str, TensorSpec]
) -> tuple[list[SafetensorsFile], list[str], set[str]]:
    """The readable files, what is wrong with the others and the index, and which tensors the
    unreadable ones may hold."""
    index = path / _INDEX
    listed = _read_index(index) if index.is_file() else None
    names = listed.values() if listed else (file.name for file in path.glob("*.safetensors"))
    files, problems = {}, []
    names = sorted(set(names))
    if not names:
        raise FileNotFoundError(f"no safetensors file in {path}")
    for name in names:
        try:
            files[name] = SafetensorsFile(path / name)
        except FileNotFoundError:
            problems.append(f"missing file {name}")
        except OSError as error:
            problems.append(f"{name} cannot be read: {error.strerror}")
        except ValueError as error:
            problems.append(str(error))
    if listed is None:
        return list(files.values()), problems, set(specs) if problems else set()
    for tensor, name in listed.items():
        if name in files and tensor not in files[name].tensors:
            problems.append(f"{_INDEX} places {tensor} in {name}, which does not hold it")
    lost = {tensor for tensor, name in listed.items() if name not in files}
    return list(files.values()), problems, lost


def _read_index(file: Path) -> dict[str, str]:
    """The file of each tensor."""
    try:
        listed = json.loads(file.read_text(encoding="utf-8"))["weight_map"]
        if not isinstance(listed, dict) or not listed:
            raise ValueError("weight_map must name the file of each tensor")
        for tensor, name in listed.items():
            if not isinstance(name, str) or not _FILE_NAME.fullmatch(name):
                raise ValueError(f"{tensor} is placed in {name!r}, which is no file name")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(file.parent, [f"{_INDEX} is damaged: {error!r}"]) from error
    return listed


def _check_tensors(
    files: Iterable[SafetensorsFile], specs: Mapping[str, TensorSpec], ignored: frozenset[str]
) -> list[str]:
    problems, seen = [], {}
    for file in files:
        for name, tensor in file.tensors.items():
            if name in seen:
                problems.append(f"{name} is in both {seen[name]} and {file.path.name}")
            seen[name] = file.path.name
            spec = specs.get(name)
            if spec is None:
                if name not in ignored:
                    problems.append(f"extra tensor {name} {tensor.dtype} {list(tensor.shape)}")
                continue
            if tensor.shape != spec.shape:
                problems.append(
                    f"{name} has shape {list(tensor.shape)}, expected {list(spec.shape)}"
                )
            if tensor.dtype != spec.dtype:
                problems.append(f"{name} has dtype {tensor.dtype}, expected {spec.dtype}")
    return problems


def _fill(
    path: Path,
    files: list[SafetensorsFile],
    specs: dict[str, TensorSpec],
    config: GLMConfig,
    mesh: Mesh,
    use_tqdm: bool,
) -> nnx.State:
    _, abstract = abstract_model(config)
    shardings = dict(nnx.to_flat_state(parameter_shardings(abstract, mesh)))
    shapes = dict(nnx.to_flat_state(abstract))
    tensors = [(file, specs[name]) for file in files for name in file.tensors if name in specs]
    whole = {spec.path for _, spec in tensors if not spec.index}
    filled = _empty_stacks(
        {name: shape.get_value() for name, shape in shapes.items() if name not in whole},
        {name: sharding.get_value() for name, sharding in shardings.items()},
    )
    last = ()
    problems = []
    hidden = not (use_tqdm and terminal_columns())
    for file, spec in tqdm(tensors, desc="Loading weights", unit="tensor", disable=hidden):
        try:
            value = file.read(spec.name)
        except ValueError as error:
            raise CheckpointError(path, [str(error)]) from error
        # Steps run behind: without this wait, values that are not yet in place would pile up.
        jax.block_until_ready(last)
        problems += _check_values(spec, value)
        target = shapes[spec.path].get_value()
        sharding = shardings[spec.path].get_value()
        value = value.astype(target.dtype, copy=False)
        if not spec.index:
            last = filled[spec.path] = _place(value, sharding)
            continue
        trailing = NamedSharding(mesh, jax.P(*sharding.spec[len(spec.index) :]))
        last = filled[spec.path] = _insert(sharding, len(spec.index))(
            filled[spec.path], _place(value, trailing), np.asarray(spec.index, np.int32)
        )
    if problems:
        raise CheckpointError(path, problems)
    leaves = {name: shapes[name].replace(filled[name]) for name in shapes}
    return nnx.from_flat_state(leaves)


def _check_values(spec: TensorSpec, value: np.ndarray) -> list[str]:
    """Vectors and scales are small, and one bad number in them spoils every token."""
    if len(spec.shape) > 1 and spec.path[-1] != "scale":
        return []
    bad = int(np.sum(~np.isfinite(value.astype(np.float32))))
    return [f"{spec.name} holds {bad} values that are not finite"] if bad else []


def _place(value: np.ndarray, sharding: NamedSharding) -> jax.Array:
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])


def _empty_stacks(
    shapes: dict[tuple, jax.ShapeDtypeStruct], shardings: dict[tuple, NamedSharding]
) -> dict[tuple, jax.Array]:
    """Zeros of the given shapes, all from one program."""

    def create() -> list[jax.Array]:
        return [jnp.zeros(shape.shape, shape.dtype) for shape in shapes.values()]

    created = jax.jit(create, out_shardings=[shardings[name] for name in shapes])()
    # XLA:CPU may copy a donated array that is still being written.
    jax.block_until_ready(created)
    return dict(zip(shapes, created, strict=True))


@functools.cache
def _insert(sharding: NamedSharding, depth: int):
    """A jitted, donated insertion of one entry into a stack."""

    def insert(stack: jax.Array, value: jax.Array, index: jax.Array) -> jax.Array:
        starts = [index[axis] for axis in range(depth)] + [0] * value.ndim
        entry = value.reshape(*[1] * depth, *value.shape)
        return jax.lax.dynamic_update_slice(stack, entry, starts)

    return jax.jit(insert, donate_argnums=0, out_shardings=sharding)
