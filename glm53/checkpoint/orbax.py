"""Sharded orbax checkpoints of parameters, with the config beside them.

orbax is imported where it is used: most processes do not, and start faster without it.
"""

import contextlib
import dataclasses
import gc
import json
import logging
import os
import re
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
from flax import nnx, traverse_util
from jax.sharding import Mesh

from glm53.checkpoint.errors import CheckpointError
from glm53.checkpoint.new_directory import new_directory, sync, sync_tree
from glm53.jax_settings import own_jax_settings
from glm53.model.config import GLMConfig
from glm53.model.params import abstract_model
from glm53.model.sharding import check_mesh, parameter_shardings

CONFIG_FILE = "glm53_config.json"
_PARAMS = "params"
_SHOWN = 400
_QUIET_SECONDS = 1.0
_OS_ERROR = re.compile(r"os_error_code='(\d+)'")
# Stacks of parameters are large: they are stored in pieces, which are compressed one by one.
_CHUNK_BYTES = 1 << 26


@own_jax_settings()
def save_orbax(path: str | Path, config: GLMConfig, params: nnx.State) -> None:
    """Writes parameters and config to a new directory, which appears when it is complete.

    Raises:
        FileExistsError: the directory exists.
        OSError: it cannot be written.
    """
    path = Path(path).absolute()
    if path.exists():
        raise FileExistsError(f"{path} exists; choose a new directory")
    with new_directory(path) as directory:
        write_orbax(directory, config, params)


def write_orbax(path: Path, config: GLMConfig, params: nnx.State) -> None:
    """Writes parameters and config into an existing directory; an absolute path.

    Raises:
        OSError: something cannot be written.
    """
    import orbax.checkpoint as ocp

    # Stacks of no layers are left out: orbax refuses arrays without elements.
    flat = {name: leaf[...] for name, leaf in nnx.to_flat_state(params) if leaf[...].size}
    tree = traverse_util.unflatten_dict(flat)
    chunks = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES), tree)
    with (
        _failing_writes(path),
        ocp.StandardCheckpointer(save_concurrent_gb=_concurrent_gb(params)) as checkpointer,
    ):
        checkpointer.save(path / _PARAMS, tree, save_args=chunks)
    sync_tree(path / _PARAMS)
    # Put in place last and whole: a directory without it is not a checkpoint.
    temporary = path / f".{CONFIG_FILE}"
    temporary.write_text(json.dumps(dataclasses.asdict(config), indent=1), encoding="utf-8")
    sync(temporary)
    temporary.rename(path / CONFIG_FILE)
    sync(path)


@contextlib.contextmanager
def _failing_writes(path: Path) -> Iterator[None]:
    """Makes an OSError of what orbax raises of a failed write, when the others have ended.

    Those in flight go on without it: they would bring back a directory that is removed, and each
    reports to an event loop that is gone. All this is printed, pages long, unless it is held back.
    """
    last_report = time.monotonic()
    hook = sys.unraisablehook

    def on_unraisable(unraisable: "sys.UnraisableHookArgs") -> None:
        nonlocal last_report
        last_report = time.monotonic()
        if str(unraisable.exc_value) != "Event loop is closed":
            hook(unraisable)

    logs = [log for log in map(logging.getLogger, ("absl", "asyncio")) if not log.disabled]
    sys.unraisablehook = on_unraisable
    for log in logs:
        log.disabled = True
    try:
        yield
    except Exception as error:
        last_report = time.monotonic()
        while time.monotonic() - last_report < _QUIET_SECONDS:
            time.sleep(_QUIET_SECONDS / 10)
        code = _OS_ERROR.search(str(error))
        # Without the tasks whose exceptions were not retrieved, which say so when they go.
        traceback.clear_frames(error.__traceback__)
        gc.collect()
        if code is None:
            raise
        number = int(code[1])
        raise OSError(number, os.strerror(number), str(path)) from error
    finally:
        sys.unraisablehook = hook
        for log in logs:
            log.disabled = False


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


@own_jax_settings()
def load_orbax(path: str | Path, config: GLMConfig, mesh: Mesh) -> nnx.State:
    """Restores parameters straight into their shards, in the dtypes that `config` asks for.

    Values saved in bfloat16 keep that precision in float32.

    Raises:
        CheckpointError: the checkpoint is of another model, or damaged.
        ValueError: the mesh does not divide a sharded axis.
    """
    import orbax.checkpoint as ocp

    check_mesh(config, mesh)
    path = Path(path).absolute()
    stored = read_orbax_config(path)
    _, abstract = abstract_model(config)
    check_same_model(path, config, stored)
    shardings = parameter_shardings(abstract, mesh)
    shardings_by_name = {name: leaf.get_value() for name, leaf in nnx.to_flat_state(shardings)}
    shapes = {name: leaf.get_value() for name, leaf in nnx.to_flat_state(abstract)}
    targets = {
        name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=shardings_by_name[name])
        for name, leaf in shapes.items()
    }
    stored_targets = {name: leaf for name, leaf in targets.items() if leaf.size}
    try:
        _, on_disk = abstract_model(stored)
        limit = _concurrent_gb(on_disk)
        with ocp.StandardCheckpointer(restore_concurrent_gb=limit) as checkpointer:
            restored = checkpointer.restore(
                path / _PARAMS, traverse_util.unflatten_dict(stored_targets)
            )
    except Exception as error:  # of truncated data orbax reports a bare Exception, pages long
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:_SHOWN]
        raise CheckpointError(path, [f"orbax cannot restore it: {reason}"]) from error
    empty = {
        name: jax.device_put(np.zeros(leaf.shape, leaf.dtype), leaf.sharding)
        for name, leaf in targets.items()
        if not leaf.size
    }
    filled = traverse_util.flatten_dict(restored) | empty
    nnx.replace_by_pure_dict(abstract, traverse_util.unflatten_dict(filled))
    return abstract


def _concurrent_gb(params: nnx.State) -> int:
    """Bytes that orbax may read or write at once: the largest array as it is stored.

    orbax refuses an array beyond its limit, and holds copies of arrays up to it.
    """
    return max(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(params)) // 10**9 + 1


def check_same_model(path: Path, config: GLMConfig, stored: GLMConfig) -> None:
    """Only how the model is computed may differ from what was saved.

    Raises:
        CheckpointError: something else does; all such fields are named.
    """
    runtime = {"compute_dtype", "latent_norm_eps", "activation_quantization"}
    problems = []
    for field in dataclasses.fields(GLMConfig):
        wanted, given = getattr(config, field.name), getattr(stored, field.name)
        if field.name not in runtime and wanted != given:
            problems.append(f"{field.name} is {given!r}, expected {wanted!r}")
    if problems:
        raise CheckpointError(path, problems)
