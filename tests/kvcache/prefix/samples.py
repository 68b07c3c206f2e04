"""Prefix files of a few tokens, for the tests."""

import dataclasses
import json
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvcache.prefix.description import PrefixDescription
from kvcache.prefix.file import Block, PrefixFileError, PrefixReader, write_prefix
from pallas_kernels.common.row_format import RowFormat, RowKind

Members = dict[str, bytes]


def describe(
    kind: RowKind = "fp8", key_kind: RowKind | None = None, **changes: Any
) -> PrefixDescription:
    return dataclasses.replace(
        PrefixDescription(
            model="tiny-1",
            num_layers=4,
            num_index_layers=2,
            num_mtp_layers=1,
            row_format=RowFormat(kind, 8, 4, 1e-4),
            index_row_format=RowFormat(key_kind or kind, 8, 0, 1e-6),
        ),
        **changes,
    )


def block_of(description: PrefixDescription, tokens: int, seed: int = 0) -> Block:
    """Rows and keys of any bits, NaNs among them."""
    rng = np.random.default_rng(seed)

    def bits(layers: int, row: RowFormat) -> np.ndarray:
        return rng.integers(0, 256, (tokens, layers, row.row_bytes), np.uint8).view(row.dtype)

    return (
        bits(description.num_layers, description.row_format),
        bits(description.num_index_layers, description.index_row_format),
    )


def blocks_of(description: PrefixDescription, num_tokens: int, block_tokens: int) -> list[Block]:
    starts = range(0, num_tokens, block_tokens)
    return [block_of(description, min(block_tokens, num_tokens - start), start) for start in starts]


def same(found: Iterable[Block], expected: Iterable[Block]) -> bool:
    """Whether two series of blocks agree in dtype, shape and every bit."""

    def bits(blocks: Iterable[Block]) -> list[tuple[np.dtype, tuple[int, ...], bytes]]:
        return [(part.dtype, part.shape, part.tobytes()) for block in blocks for part in block]

    return bits(found) == bits(expected)


DESCRIPTION = describe()
TOKENS = np.arange(100, 107, dtype=np.int32)
BLOCKS = blocks_of(DESCRIPTION, 7, 3)


def write_sample(path: Path) -> None:
    """Writes 7 tokens in blocks of 3."""
    write_prefix(path, DESCRIPTION, TOKENS, BLOCKS)


def rewrite(path: Path, change: Callable[[Members], None]) -> None:
    """Changes members of a file, whose sizes and checksums are right again."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    change(members)
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)


def set_field(path: Path, field: str, value: Any) -> None:
    """Changes one value of `prefix.json`, "row_format.kind" for one of the inner."""

    def change(members: Members) -> None:
        values = json.loads(members["prefix.json"])
        *outer, name = field.split(".")
        (values[outer[0]] if outer else values)[name] = value
        members["prefix.json"] = json.dumps(values).encode()

    rewrite(path, change)


def assert_refused(path: Path, match: str) -> None:
    """Opening the file fails, naming it and what is wrong."""
    with pytest.raises(PrefixFileError, match=match) as caught:
        PrefixReader(path)
    assert str(path) in str(caught.value)
