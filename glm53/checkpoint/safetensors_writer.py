"""Writes parameters as a Hugging Face safetensors directory.

The `safetensors` package has no NumPy dtype for e4m3, so files are written here.
"""

import json
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import jax
import numpy as np
from flax import nnx
from tqdm import tqdm

from glm53.checkpoint.inventory import DTYPE_BYTES, TensorSpec, tensor_inventory
from glm53.checkpoint.safetensors_file import DTYPES
from glm53.model.config import GLMConfig
from glm53.terminal import terminal_columns

MAX_FILE_BYTES = 5_000_000_000
"""Size of a file, its header included; a tensor that is larger has a file of its own."""

_PREFIX_BYTES = 8
_ALIGNMENT = 8


def write_safetensors(
    directory: Path, config: GLMConfig, params: nnx.State, *, use_tqdm: bool = False
) -> None:
    """Writes every tensor of the checkpoint that `config` describes, one at a time.

    What fits in one file is `model.safetensors`, without an index.

    Args:
        directory: an existing directory without such files.
        config: the model; its weight dtype is the dtype of unquantised tensors on disk.
        params: its parameters, on one CPU device, whose memory is written without a copy.
        use_tqdm: show progress, if standard error is a terminal.

    Raises:
        ValueError: a parameter holds values that its dtype on disk does not have.
        OSError: a file cannot be written.
    """
    arrays = {path: leaf.get_value() for path, leaf in nnx.to_flat_state(params)}
    shards = _split(tensor_inventory(config))
    names = _file_names(len(shards))
    hidden = not (use_tqdm and terminal_columns())
    total = sum(len(shard) for shard in shards)
    with tqdm(total=total, desc="Writing weights", unit="tensor", disable=hidden) as progress:
        for name, shard in zip(names, shards, strict=True):
            for _ in _write_file(directory / name, shard, arrays):
                progress.update()
    if len(shards) > 1:
        _write_index(directory, dict(zip(names, shards, strict=True)))


def _split(specs: Iterable[TensorSpec]) -> list[list[TensorSpec]]:
    """Tensors of each file, in the order of the inventory."""
    shards: list[list[TensorSpec]] = []
    free = 0
    for spec in specs:
        size = spec.num_bytes + _max_entry_bytes(spec)
        if not shards or size > free:
            shards.append([])
            free = MAX_FILE_BYTES - _PREFIX_BYTES - len(_header([]))
        shards[-1].append(spec)
        free -= size
    # Widest first, so that every tensor is aligned to its numbers.
    return [sorted(shard, key=lambda spec: -DTYPE_BYTES[spec.dtype]) for shard in shards]


def _file_names(count: int) -> list[str]:
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{number + 1:05}-of-{count:05}.safetensors" for number in range(count)]


def _entry(spec: TensorSpec, start: int) -> dict[str, object]:
    return {
        "dtype": spec.dtype,
        "shape": list(spec.shape),
        "data_offsets": [start, start + spec.num_bytes],
    }


def _max_entry_bytes(spec: TensorSpec) -> int:
    """Upper bound of a tensor's part of a header, wherever it lies in a file."""
    return len(json.dumps({spec.name: _entry(spec, MAX_FILE_BYTES)}))


def _header(specs: Sequence[TensorSpec]) -> bytes:
    """The header of a file, padded so that its tensors start aligned."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for spec in specs:
        entries[spec.name] = _entry(spec, start)
        start += spec.num_bytes
    text = json.dumps(entries, separators=(",", ":")).encode("utf-8")
    return text + b" " * (-len(text) % _ALIGNMENT)


def _write_file(
    file: Path, specs: Sequence[TensorSpec], arrays: Mapping[tuple, jax.Array]
) -> Iterator[TensorSpec]:
    """Writes one file and yields each tensor that is written."""
    header = _header(specs)
    with file.open("xb") as out:
        out.write(struct.pack("<Q", len(header)))
        out.write(header)
        for spec in specs:
            value = np.asarray(arrays[spec.path])[spec.index]
            out.write(_on_disk(spec, value).reshape(-1).view(np.uint8).data)
            yield spec


def _on_disk(spec: TensorSpec, value: np.ndarray) -> np.ndarray:
    """The tensor in its dtype on disk, contiguous."""
    dtype = DTYPES[spec.dtype]
    if value.dtype != dtype:
        with np.errstate(all="ignore"):
            cast = value.astype(dtype)
        if cast.astype(value.dtype).tobytes() != value.tobytes():
            raise ValueError(
                f"{spec.name} holds {value.dtype} values that its dtype on disk, {dtype} "
                "(weight_dtype of the config), does not have"
            )
        value = cast
    return np.ascontiguousarray(value)


def _write_index(directory: Path, shards: Mapping[str, Sequence[TensorSpec]]) -> None:
    files = {spec.name: name for name, shard in shards.items() for spec in shard}
    total = sum(spec.num_bytes for shard in shards.values() for spec in shard)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(files.items()))}
    text = json.dumps(index, indent=2) + "\n"
    (directory / "model.safetensors.index.json").write_text(text, encoding="utf-8")
