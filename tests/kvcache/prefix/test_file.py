import gc
import json
import os
import tracemalloc
import weakref
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvcache.prefix import file as prefix_file
from kvcache.prefix.file import Block, PrefixReader, write_prefix
from pallas_kernels.common.row_format import ROW_KINDS, RowKind
from tests.helpers.full_disk import full_disk
from tests.kvcache.prefix.samples import (
    BLOCKS,
    DESCRIPTION,
    TOKENS,
    assert_refused,
    block_of,
    blocks_of,
    describe,
    same,
    write_sample,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "prefix"


@pytest.mark.parametrize("kind", ROW_KINDS)
@pytest.mark.parametrize("key_kind", ROW_KINDS)
@pytest.mark.parametrize(("num_tokens", "block_tokens"), [(7, 3), (6, 3), (1, 1), (5, 5)])
def test_round_trip(
    path: Path, kind: RowKind, key_kind: RowKind, num_tokens: int, block_tokens: int
) -> None:
    """A bit lost on the way, or a block that ends at another token."""
    description = describe(kind, key_kind)
    token_ids = np.arange(num_tokens, dtype=np.int32) + 150_000
    blocks = blocks_of(description, num_tokens, block_tokens)
    write_prefix(path, description, token_ids, iter(blocks))
    assert list(path.parent.iterdir()) == [path]
    with PrefixReader(path) as reader:
        assert reader.description == description
        assert (reader.num_tokens, reader.block_tokens) == (num_tokens, block_tokens)
        assert reader.token_ids.dtype == np.int32
        assert reader.token_ids.tolist() == token_ids.tolist()
        for _ in range(2):
            assert same(reader.blocks(), blocks)


def test_layout(path: Path) -> None:
    """A file that other programs cannot read by its documentation."""
    write_sample(path)
    with np.load(path, allow_pickle=False) as arrays:
        assert arrays.files == [
            "tokens",
            *(f"{part}/{block:08d}" for block in range(3) for part in ("rows", "keys")),
            "prefix.json",
        ]
        assert arrays["tokens"].tolist() == TOKENS.tolist()
        for block, (rows, keys) in enumerate(BLOCKS):
            assert np.array_equal(arrays[f"rows/{block:08d}"], rows)
            assert np.array_equal(arrays[f"keys/{block:08d}"], keys)
    with zipfile.ZipFile(path) as archive:
        assert json.loads(archive.read("prefix.json")) == {
            "format_version": 1,
            "num_tokens": 7,
            "block_tokens": 3,
            "model": "tiny-1",
            "num_layers": 4,
            "num_index_layers": 2,
            "num_mtp_layers": 1,
            "row_format": {"kind": "fp8", "latent_dim": 8, "rope_dim": 4, "least_scale": 1e-4},
            "index_row_format": {
                "kind": "fp8",
                "latent_dim": 8,
                "rope_dim": 0,
                "least_scale": 1e-6,
            },
        }


def test_layout_of_bfloat16(path: Path) -> None:
    """bfloat16 stored in a dtype that NumPy alone cannot read."""
    description = describe("bfloat16")
    rows, keys = block_of(description, 2)
    write_prefix(path, description, TOKENS[:2], [(rows, keys)])
    with np.load(path, allow_pickle=False) as arrays:
        stored = arrays["rows/00000000"]
    assert stored.dtype == np.uint16
    assert np.array_equal(stored, rows.view(np.uint16))


def test_memory_order(path: Path) -> None:
    """Rows that lie in memory in another order are stored in that order."""
    rows, keys = BLOCKS[0]
    write_prefix(path, DESCRIPTION, TOKENS[:3], [(np.asfortranarray(rows), keys[::-1])])
    with PrefixReader(path) as reader:
        assert same(reader.blocks(), [(rows, keys[::-1])])


def test_same_prefix_same_bytes(path: Path) -> None:
    """The time gets into a file, which can then not be told by its hash."""
    write_sample(path)
    before = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        assert {info.date_time for info in archive.infolist()} == {(1980, 1, 1, 0, 0, 0)}
    write_sample(path)
    assert path.read_bytes() == before


def test_without_mtp(path: Path) -> None:
    """A store without the MTP layer is given its rows, or loses another layer."""
    write_sample(path)
    trunk = [(rows[:, :3], keys[:, :1]) for rows, keys in BLOCKS]
    with PrefixReader(path) as reader:
        assert same(reader.blocks(with_mtp=False), trunk)


def test_without_the_mtp_layer_of_a_file_that_has_none(path: Path) -> None:
    """A layer of the trunk is left out for an MTP layer that is not there."""
    description = describe(num_mtp_layers=0)
    blocks = blocks_of(description, 4, 2)
    write_prefix(path, description, TOKENS[:4], blocks)
    with PrefixReader(path) as reader:
        assert same(reader.blocks(with_mtp=False), blocks)


def test_closed(path: Path) -> None:
    """Leaving the context keeps the file open."""
    write_sample(path)
    with PrefixReader(path) as reader:
        blocks = reader.blocks()
        next(blocks)
    with pytest.raises(ValueError, match="closed"):
        next(blocks)


@pytest.mark.parametrize(
    ("token_ids", "blocks", "match"),
    [
        (TOKENS[:0], [], "token_ids is empty"),
        (TOKENS.astype(np.int64), BLOCKS, "tokens.npy must be int32"),
        (TOKENS, [], "blocks hold 0 of the 7 tokens"),
        (TOKENS, BLOCKS[:2], "blocks hold 6 of the 7 tokens"),
        (TOKENS[:6], BLOCKS, "blocks hold more than the 6 tokens"),
        (TOKENS[:5], BLOCKS, r"rows/00000001.npy must be int32 \(2, 4, 5\), got int32 \(3, 4, 5\)"),
        (TOKENS[:2], BLOCKS[:1], r"rows/00000000.npy must be int32 \(2, 4, 5\)"),
        (TOKENS, BLOCKS[::-1], "rows/00000001.npy must be int32"),
        (TOKENS, [block_of(DESCRIPTION, 0), *BLOCKS], r"rows/00000000.npy must be int32 \(1"),
        (TOKENS[:6], [*BLOCKS[:2], block_of(DESCRIPTION, 0)], "blocks hold more than the 6"),
        (TOKENS, [(BLOCKS[0][0].view(np.float32), BLOCKS[0][1])], "got float32"),
        (TOKENS, [(BLOCKS[0][0][:, :2], BLOCKS[0][1])], r"got int32 \(3, 2, 5\)"),
        (TOKENS, [(BLOCKS[0][0], BLOCKS[0][1][:2])], "keys/00000000.npy must be int32"),
        (TOKENS, [(BLOCKS[0][0], BLOCKS[0][1][:, :, :2])], "keys/00000000.npy must be int32"),
    ],
)
@pytest.mark.parametrize("existing", [False, True])
def test_refused_blocks(
    path: Path, existing: bool, token_ids: np.ndarray, blocks: list[Block], match: str
) -> None:
    """Rows that are not those described get into a file, or a refusal costs the file before."""
    if existing:
        path.write_bytes(b"before")
    with pytest.raises(ValueError, match=match):
        write_prefix(path, DESCRIPTION, token_ids, iter(blocks))
    assert list(path.parent.iterdir()) == [path] * existing
    assert not existing or path.read_bytes() == b"before"


class BrokenOffError(Exception):
    pass


@pytest.mark.parametrize("count", range(4))
@pytest.mark.parametrize("existing", [False, True])
def test_broken_off(path: Path, existing: bool, count: int) -> None:
    """Half a file is left under the name or beside it, or in the place of a whole one."""

    def breaking_off() -> Iterator[Block]:
        yield from BLOCKS[:count]
        raise BrokenOffError

    if existing:
        path.write_bytes(b"before")
    with pytest.raises(BrokenOffError):
        write_prefix(path, DESCRIPTION, TOKENS, breaking_off())
    assert list(path.parent.iterdir()) == [path] * existing
    assert not existing or path.read_bytes() == b"before"


@pytest.mark.parametrize("existing", [False, True])
def test_full_disk(path: Path, existing: bool) -> None:
    """A torn file, wherever the disk ends, or an error that does not say which file."""
    write_sample(path)
    whole = path.read_bytes()
    for room in range(0, len(whole), 97):
        path.unlink(missing_ok=True)
        if existing:
            path.write_bytes(b"before")
        with full_disk(room), pytest.raises(OSError, match=f"'{path}'$"):
            write_sample(path)
        assert list(path.parent.iterdir()) == [path] * existing
        assert not existing or path.read_bytes() == b"before"


def test_stands_under_its_name_when_whole(path: Path) -> None:
    """Who looks too early finds half a file, or the new one never takes the old one's place."""
    path.write_bytes(b"before")

    def watching() -> Iterator[Block]:
        for block in BLOCKS:
            assert path.read_bytes() == b"before"
            yield block

    write_prefix(path, DESCRIPTION, TOKENS, watching())
    with PrefixReader(path) as reader:
        assert same(reader.blocks(), BLOCKS)


def test_what_stands_under_its_name(path: Path) -> None:
    """A device or a pipe that becomes a regular file, or a link that loses what it leads to."""
    os.mkfifo(path)
    with pytest.raises(OSError, match="Not a regular file"):
        write_sample(path)
    assert path.is_fifo()
    link = path.with_name("link")
    link.symlink_to("target")
    write_sample(link)
    assert link.is_symlink() and not link.with_name("target").is_symlink()
    with PrefixReader(link) as reader:
        assert same(reader.blocks(), BLOCKS)


def test_largest_array(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block is written, or read, that a reader need not be able to hold."""
    rows_bytes = BLOCKS[0][0].nbytes
    monkeypatch.setattr(prefix_file, "LARGEST_ARRAY", rows_bytes)
    write_sample(path)
    monkeypatch.setattr(prefix_file, "LARGEST_ARRAY", rows_bytes - 1)
    assert_refused(path, f"holds {rows_bytes} bytes in rows/00000000.npy")
    with pytest.raises(ValueError, match=r"rows/00000000.npy has .* use blocks of fewer tokens"):
        write_sample(path)


def test_one_block_at_a_time(path: Path) -> None:
    """A long prefix is held whole in memory by the side that writes or the side that reads."""
    description = describe(num_layers=500, num_index_layers=500)
    block_tokens, num_blocks = 8, 20
    token_ids = np.zeros(block_tokens * num_blocks, np.int32)
    block_bytes = sum(part.nbytes for part in block_of(description, block_tokens))
    made: list[weakref.ref] = []

    def one_by_one() -> Iterator[Block]:
        for _ in range(num_blocks):
            gc.collect(0)
            assert not any(reference() is not None for reference in made)
            block = block_of(description, block_tokens)
            made.extend(weakref.ref(part) for part in block)
            yield block
            del block

    write_prefix(path, description, token_ids, one_by_one())
    assert len(made) == 2 * num_blocks
    with PrefixReader(path) as reader:
        tracemalloc.start()
        try:
            assert sum(len(rows) for rows, _ in reader.blocks()) == len(token_ids)
            # The block before is let go when the next is there; one part is copied in pieces.
            assert tracemalloc.get_traced_memory()[1] < 4 * block_bytes
        finally:
            tracemalloc.stop()
