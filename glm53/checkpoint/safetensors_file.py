"""A reader of safetensors files that knows FP8 and checks what it reads.

The `safetensors` package has no NumPy dtype for e4m3, so the header is read here.
"""

import json
import math
import os
import struct
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import ml_dtypes
import numpy as np
from jaxtyping import Shaped

DTYPES: dict[str, np.dtype] = {
    "F32": np.dtype(np.float32),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F64": np.dtype(np.float64),
    "F16": np.dtype(np.float16),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
_HEADER_LIMIT = 100_000_000
_MAX_AXES = 8


class StoredTensor(NamedTuple):
    """A tensor's entry in the header: dtype name, shape, and byte range in the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class SafetensorsFile:
    """One safetensors file, its header read and checked against the file's size.

    Attributes:
        tensors: entries by name, in the order of the header.

    Raises:
        ValueError: the file is truncated, torn, or not safetensors; the message says where.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            if len(prefix) < 8:
                raise ValueError(f"{path.name} is truncated: {size} bytes hold no header")
            (length,) = struct.unpack("<Q", prefix)
            if length > _HEADER_LIMIT or 8 + length > size:
                raise ValueError(
                    f"{path.name} is truncated or not safetensors: its header claims {length} "
                    f"bytes of a file of {size}"
                )
            header = file.read(length)
        try:
            entries = json.loads(header.decode("utf-8"))
            if not isinstance(entries, dict):
                raise ValueError("it is not an object")
            entries.pop("__metadata__", None)
            self.tensors = {
                name: _entry(name, entry, 8 + length) for name, entry in entries.items()
            }
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path.name} has a damaged header: {error}") from error
        self._check_ranges(8 + length, size)

    def _check_ranges(self, start: int, size: int) -> None:
        """Tensors fill the file behind the header without gaps or overlap."""
        by_place = sorted(self.tensors.items(), key=lambda item: (item[1].start, item[1].end))
        for name, tensor in by_place:
            if tensor.start != start:
                raise ValueError(
                    f"{self.path.name} is torn: {name} starts at byte {tensor.start}, not {start}"
                )
            start = tensor.end
        if start != size:
            raise ValueError(
                f"{self.path.name} is truncated or torn: its tensors end at byte {start}, "
                f"the file at {size}"
            )

    def read(self, name: str) -> Shaped[np.ndarray, "..."]:
        """Reads one tensor. Its bytes are not kept.

        Raises:
            ValueError: the file ends too early.
        """
        tensor = self.tensors[name]
        data = np.empty(tensor.end - tensor.start, np.uint8)
        with self.path.open("rb", buffering=0) as file:
            file.seek(tensor.start)
            view, done = memoryview(data), 0
            while done < data.size:
                count = file.readinto(view[done:])
                if not count:
                    raise ValueError(f"{self.path.name} ended while reading {name}")
                done += count
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), tensor.start, data.size, os.POSIX_FADV_DONTNEED)
        return data.view(DTYPES[tensor.dtype]).reshape(tensor.shape)


def _entry(name: str, entry: Any, base: int) -> StoredTensor:
    if not isinstance(entry, dict):
        raise ValueError(f"the entry of {name} is not an object")
    dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"{name} has unknown dtype {_short(dtype)}")
    if not _are_sizes(shape, most=_MAX_AXES):
        raise ValueError(f"{name} has shape {_short(shape)}")
    if not _are_sizes(offsets, most=2) or len(offsets) != 2:
        raise ValueError(f"{name} has data_offsets {_short(offsets)}")
    start, end = offsets
    if end - start != math.prod(shape) * DTYPES[dtype].itemsize:
        raise ValueError(f"{name} has {end - start} bytes for {dtype} {shape}")
    return StoredTensor(dtype, tuple(shape), base + start, base + end)


def _are_sizes(values: Any, most: int) -> TypeGuard[list[int]]:
    """Whether this is a list of at most `most` lengths that a file can have."""
    return (
        isinstance(values, list)
        and len(values) <= most
        and all(type(value) is int and 0 <= value < 2**63 for value in values)
    )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
