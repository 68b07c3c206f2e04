import copy
import io
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvcache.prefix.file import PrefixFileError, PrefixReader, write_prefix
from tests.kvcache.prefix.samples import (
    BLOCKS,
    DESCRIPTION,
    TOKENS,
    Members,
    assert_refused,
    blocks_of,
    describe,
    rewrite,
    same,
    write_sample,
)

ROWS = BLOCKS[1][0]


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    write_sample(tmp_path / "whole")
    return tmp_path / "whole"


def test_truncated(whole: Path) -> None:
    """A file cut anywhere is read as far as it goes, or fails with another error."""
    data = whole.read_bytes()
    lengths = {*range(0, len(data), 19), *range(len(data) - 150, len(data)), *range(10)}
    for length in sorted(lengths):
        whole.write_bytes(data[:length])
        assert_refused(whole, "is torn" if length >= 4 else "is not a prefix file")
    whole.write_bytes(data + b"\0")
    assert_refused(whole, "is torn")


def test_any_byte_changed(tmp_path: Path) -> None:
    """Damage that changes what is read unseen, or that fails with another error."""
    path = tmp_path / "prefix"
    write_prefix(path, DESCRIPTION, TOKENS[:3], BLOCKS[:1])
    data = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        offsets = {*range(0, len(data), 4), *range(archive.start_dir, len(data))}
    seen = 0
    for offset in sorted(offsets):
        flip = (0x01, 0xFF, 0x80, 0x10)[offset % 5 % 4]
        data[offset] ^= flip
        path.write_bytes(data)
        data[offset] ^= flip
        try:
            with PrefixReader(path) as reader:
                assert same(reader.blocks(), BLOCKS[:1]), offset
                assert reader.token_ids.tolist() == TOKENS[:3].tolist()
                assert reader.description == DESCRIPTION
        except PrefixFileError as error:
            assert str(path) in str(error)
            seen += 1
    # The rest is what nobody reads, as the times of members.
    assert seen > len(offsets) * 0.7


@pytest.mark.parametrize("part", ["rows", "keys"])
def test_damaged_block(tmp_path: Path, part: str) -> None:
    """Damage keeps the blocks before it from being read, or is not said where."""
    path = tmp_path / "prefix"
    description = describe(num_layers=300, num_index_layers=300)
    blocks = blocks_of(description, 7, 3)
    write_prefix(path, description, TOKENS, blocks)
    with zipfile.ZipFile(path) as archive:
        info = archive.getinfo(f"{part}/00000001.npy")
    data = bytearray(path.read_bytes())
    data[info.header_offset + 9000] ^= 4
    path.write_bytes(data)
    with PrefixReader(path) as reader:
        found = reader.blocks()
        assert same([next(found)], blocks[:1])
        with pytest.raises(PrefixFileError, match=f"is damaged in {part}/00000001.npy: Bad CRC"):
            next(found)


def test_damaged_tokens(whole: Path) -> None:
    """Rows are imported under other tokens than their own."""
    data = whole.read_bytes()
    assert data.count(TOKENS.tobytes()) == 1
    whole.write_bytes(data.replace(TOKENS.tobytes(), TOKENS[::-1].tobytes()))
    assert_refused(whole, "is damaged in tokens.npy: Bad CRC")


def remove(name: str) -> Callable[[Members], None]:
    return lambda members: members.__delitem__(name)


def put(name: str, data: bytes) -> Callable[[Members], None]:
    return lambda members: members.__setitem__(name, data)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (remove("tokens.npy"), "it has no tokens.npy"),
        (remove("rows/00000001.npy"), "it has no rows/00000001.npy"),
        (remove("keys/00000002.npy"), "it has no keys/00000002.npy"),
        (remove("prefix.json"), "is not a prefix file"),
        (put("rows/00000003.npy", b"more"), "foreign or doubled.*rows/00000003"),
        (put("readme", b"more"), "foreign or doubled.*readme"),
        (put("keys/00000001.npy", b"short"), "keys/00000001.npy has 5 bytes"),
        (put("tokens.npy", bytes(9999)), "tokens.npy has 9999 bytes"),
        (put("prefix.json", b""), "prefix.json has 0 bytes"),
        (put("prefix.json", b" " * 20_000), "prefix.json has 20000 bytes"),
        (put("prefix.json", b"{"), "prefix.json: Expecting"),
        (put("prefix.json", b"[" * 16_000), "prefix.json: it is nested too deep"),
        (put("prefix.json", b"[1]"), "prefix.json: it has no format_version"),
        (put("prefix.json", b"\xff{}"), "prefix.json: .*decode"),
        (put("prefix.json", b'{"format_version": 1}'), "must have the fields"),
    ],
)
def test_members(whole: Path, change: Callable[[Members], None], match: str) -> None:
    """A file whose members are not those its description tells of is read in part."""
    rewrite(whole, change)
    assert_refused(whole, match)


def test_doubled_member(whole: Path) -> None:
    """Which of two members of a name is read is left to chance."""
    with zipfile.ZipFile(whole, "a") as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr("rows/00000001.npy", archive.read("rows/00000001.npy"))
    assert_refused(whole, "foreign or doubled")


@pytest.mark.parametrize("name", ["tokens.npy", "rows/00000001.npy", "prefix.json"])
@pytest.mark.parametrize("compression", [zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA])
def test_compressed_member(whole: Path, name: str, compression: int) -> None:
    """A small file that unpacks to a vast one is unpacked."""
    with zipfile.ZipFile(whole) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(whole, "w") as archive:
        for other, data in members.items():
            archive.writestr(other, data, compression if other == name else zipfile.ZIP_STORED)
    assert_refused(whole, f"{name} is compressed")


def npy(values: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, values, allow_pickle=values.dtype.hasobject)
    return file.getvalue()


@pytest.mark.parametrize(
    "data",
    [
        npy(ROWS.view(np.float32)),
        npy(ROWS.view(">i4")),
        npy(ROWS.swapaxes(0, 1).copy()),
        npy(np.asfortranarray(ROWS)),
        npy(ROWS.view(np.int16)),
        npy(np.array([[1, "a"]], object)).ljust(len(npy(ROWS))),
        npy(ROWS).replace(b"NUMPY\x01", b"NUMPY\x02"),
        npy(ROWS).replace(b"\x93NUMPY", b"\x93NUMPX"),
        npy(ROWS).replace(b"NUMPY\x01\x00\x76", b"NUMPY\x01\x00\x36"),
        npy(ROWS) + bytes(4),
        npy(ROWS)[:-4],
    ],
    ids=[
        "dtype",
        "byte order",
        "shape",
        "memory order",
        "item size",
        "pickle",
        "NPY version",
        "magic",
        "header length",
        "long",
        "short",
    ],
)
def test_array_header(whole: Path, data: bytes) -> None:
    """An array is read in another dtype, shape or order than it was written."""
    assert data != npy(ROWS)
    rewrite(whole, put("rows/00000001.npy", data))
    assert_refused(whole, r"rows/00000001.npy is no int32 \(3, 4, 5\)")


def test_padding_of_an_array_header(whole: Path) -> None:
    """A file is refused because another release of NumPy pads its headers otherwise."""
    data = npy(ROWS)
    text = data[10:128].rstrip().ljust(181) + b"\n"
    padded = data[:8] + len(text).to_bytes(2, "little") + text + data[128:]
    assert np.array_equal(np.load(io.BytesIO(padded)), ROWS)
    rewrite(whole, put("rows/00000001.npy", padded))
    with PrefixReader(whole) as reader:
        assert same(reader.blocks(), BLOCKS)


def test_overlapping_members(tmp_path: Path) -> None:
    """A small file whose blocks are all the same bytes is read as a vast one."""
    path = tmp_path / "prefix"
    description = describe(num_layers=500)
    write_prefix(path, description, TOKENS[:2], blocks_of(description, 2, 1))

    def share(name: str) -> None:
        """Puts a member that is nowhere but in the first block's."""
        info = copy.copy(archive.getinfo("rows/00000000.npy"))
        info.filename = name
        archive.filelist.append(info)

    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    del members["rows/00000001.npy"]
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
        share("rows/00000001.npy")
    assert_refused(path, "its members overlap")


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"", "is not a prefix file"),
        (b"not a ZIP archive", "is not a prefix file"),
        (b"PK\x03\x04", "is torn"),
        (b"PK\x05\x06" + bytes(18), "is not a prefix file"),
    ],
)
def test_other_files(tmp_path: Path, data: bytes, match: str) -> None:
    """Any file is taken for a prefix file, or fails with an error that does not say it is none."""
    path = tmp_path / "prefix"
    path.write_bytes(data)
    assert_refused(path, match)


def test_other_archive(tmp_path: Path) -> None:
    """A file of arrays of another program is taken for a prefix file."""
    path = tmp_path / "prefix.npz"
    np.savez(path, tokens=TOKENS)
    assert_refused(path, "is not a prefix file: it has no prefix.json")


def test_no_file(tmp_path: Path) -> None:
    """A missing file is called a damaged one."""
    with pytest.raises(FileNotFoundError):
        PrefixReader(tmp_path / "prefix")


def write_64_bit_sample(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes from 1 kB on as from 2 GiB on."""
    with monkeypatch.context() as context:
        context.setattr(zipfile, "ZIP64_LIMIT", 1000)
        write_sample(path)


def test_64_bit_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefix of more than 2 GiB cannot be read again, or is when it is torn."""
    path = tmp_path / "prefix"
    write_64_bit_sample(path, monkeypatch)
    data = path.read_bytes()
    assert data[-42:-38] == b"PK\x06\x07"
    with PrefixReader(path) as reader:
        assert same(reader.blocks(), BLOCKS)
    path.write_bytes(data[:-1])
    assert_refused(path, "is torn")


@pytest.mark.parametrize("offset", [-10, -58])
def test_vast_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offset: int) -> None:
    """A directory as long as a vast file is read into memory, by its 32-bit or 64-bit size."""
    path = tmp_path / "prefix"
    write_64_bit_sample(path, monkeypatch)
    data = bytearray(path.read_bytes())
    data[len(data) + offset : len(data) + offset + 4] = (1 << 28).to_bytes(4, "little")
    path.write_bytes(data)
    assert_refused(path, "its directory claims 268435456 bytes")
