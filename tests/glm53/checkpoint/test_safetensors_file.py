"""safetensors files: read as they are, or refused with a ValueError."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm53.checkpoint.safetensors_file import SafetensorsFile


def frame(header: Any, data: bytes = b"") -> bytes:
    """A file of this header, as JSON unless it is bytes."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(start: Any, end: Any, dtype: Any = "U8", shape: Any = None) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [end - start] if shape is None else shape} | {
        "data_offsets": [start, end]
    }


WHOLE = frame({"__metadata__": {"a": "b"}, "b": entry(3, 8), "a": entry(0, 3)}, bytes(range(8)))


def open_bytes(path: Path, content: bytes) -> SafetensorsFile:
    file = path / "a.safetensors"
    file.write_bytes(content)
    return SafetensorsFile(file)


def test_whole_file(tmp_path: Path) -> None:
    """A good file that is refused or misread: metadata, padding, empty tensors, scalars."""
    file = open_bytes(tmp_path, WHOLE)
    assert (file.read("a").tolist(), file.read("b").tolist()) == ([0, 1, 2], [3, 4, 5, 6, 7])
    assert list(file.tensors) == ["b", "a"]
    header = {"x": entry(0, 4, "F32", []), "c": entry(4, 4), "b": entry(4, 8), "a": entry(4, 4)}
    padded = json.dumps(header | {"d": entry(8, 8, "F32", [2, 0])}).encode() + b" " * 9
    file = open_bytes(tmp_path, frame(padded, bytes(4) + b"\1\2\3\4"))
    assert file.read("x").shape == () and file.read("b").tolist() == [1, 2, 3, 4]
    assert (file.read("a").size, file.read("d").shape) == (0, (2, 0))
    assert not open_bytes(tmp_path, frame({})).tensors


def test_cut_anywhere(tmp_path: Path) -> None:
    """A file cut short, at any byte, or with bytes too many."""
    for size in range(len(WHOLE)):
        with pytest.raises(ValueError, match=r"a\.safetensors .*truncated"):
            open_bytes(tmp_path, WHOLE[:size])
    for rest in (b"x", bytes(64), WHOLE):
        with pytest.raises(ValueError, match="torn"):
            open_bytes(tmp_path, WHOLE + rest)


def test_cut_while_reading(tmp_path: Path) -> None:
    """A file cut short after its header was read."""
    file = open_bytes(tmp_path, WHOLE)
    file.path.write_bytes(WHOLE[:-1])
    with pytest.raises(ValueError, match=r"a\.safetensors ended while reading b"):
        file.read("b")
    assert file.read("a").tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    "entries",
    [
        {"a": entry(0, 4), "b": entry(3, 8)},
        {"a": entry(0, 3), "b": entry(4, 8)},
        {"a": entry(1, 8)},
        {"a": entry(0, 7)},
        {"a": entry(0, 9)},
        {"a": entry(0, 8), "b": entry(0, 8)},
        {"a": entry(0, 8), "b": entry(4, 4)},
        {"a": entry(-8, 0)},
        {"a": entry(0, 8, shape=[7])},
        {"a": entry(0, 8, "F32", [3])},
        {"a": entry(8, 0, shape=[8])},
        {"a": entry(0, 2**62, shape=[2**62])},
        {"a": entry(0, 0, shape=[2**64, 0])},
        {"a": entry(0, 8, shape=[8] + [1] * 100)},
    ],
)
def test_torn_ranges(entries: dict[str, Any], tmp_path: Path) -> None:
    """Tensors that overlap, leave gaps, run past the end, or have other sizes than their shape."""
    with pytest.raises(ValueError, match=r"a\.safetensors .*(torn|damaged header)"):
        open_bytes(tmp_path, frame(entries, bytes(8)))


@pytest.mark.parametrize(
    "header",
    [
        *(b"", b"x" * 20, b"[" * 100_000, b'{"a": ' * 50_000, b"\xff" * 20, b"{}" + bytes(2)),
        *([], "abc", None, 1, True, {"a": None}, {"a": []}, {"a": "b"}, {"a": {}}),
        *({"a": entry(0, 8) | {"dtype": dtype}} for dtype in ("U7", None, ["U8"], {}, 8)),
        *({"a": entry(0, 8) | {"shape": x}} for x in ("8", 8, None, {}, {"8": 1}, [8.0], ["8"])),
        *({"a": entry(0, 1) | {"shape": x}} for x in ([True], [-1, -1], [[1]], [None], {})),
        *({"a": entry(0, 8) | {"data_offsets": x}} for x in (None, [8], [0, 4, 8], [0.0, 8.0])),
        *({"a": entry(0, 8) | {"data_offsets": x}} for x in ("08", {}, ["0", "8"], [None, 8])),
        *({"a": entry(0, 1) | {"data_offsets": x}} for x in ([False, True], [[0], [1]])),
        b'{"a": {"dtype": "U8", "shape": [NaN], "data_offsets": [NaN, Infinity]}}',
        b'{"a": {"dtype": "U8", "shape": [' + b"9" * 5000 + b'], "data_offsets": [0, 8]}}',
    ],
    ids=lambda header: repr(header)[:50],
)
def test_odd_header(header: Any, tmp_path: Path) -> None:
    """A header of an odd form that fails deep inside, or is taken."""
    with pytest.raises(ValueError, match=r"a\.safetensors has a damaged header") as caught:
        open_bytes(tmp_path, frame(header, bytes(8)))
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("length", [2**31, 2**32, 2**63 - 1, 2**64 - 1])
def test_absurd_header_length(length: int, tmp_path: Path) -> None:
    """A header's claimed length that is read, or allocated, before it is checked."""
    file = tmp_path / "a.safetensors"
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", length))
        # Holes take no space on disk, so that the claim is true where a file can be that long.
        stream.truncate(min(length, 2**32) + 100)
    with pytest.raises(ValueError, match=rf"a\.safetensors .*header claims {length}"):
        SafetensorsFile(file)


TEXT = st.text(max_size=3)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 9) | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
SIZE = st.integers(0, 9) | JSON
ENTRY = JSON | st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["U8", "F32", "F8_E4M3"]) | JSON,
        "shape": st.lists(SIZE, max_size=3) | JSON,
        "data_offsets": st.lists(SIZE, min_size=2, max_size=2) | JSON,
    },
)
HEADER = st.dictionaries(st.sampled_from(["a", "b", "__metadata__"]) | TEXT, ENTRY)
EDIT = st.tuples(st.integers(0, len(WHOLE) - 1), st.integers(0, 255))


def check_refused_or_read(path: Path, content: bytes) -> None:
    """Opens and reads a file in which anything may be wrong; only ValueError may come of it."""
    try:
        file = open_bytes(path, content)
    except ValueError as error:
        assert "a.safetensors" in str(error)
        return
    sizes = [file.read(name).nbytes for name in file.tensors]
    (length,) = struct.unpack("<Q", content[:8])
    assert sum(sizes) == len(content) - 8 - length


@settings(max_examples=150)
@given(edits=st.lists(EDIT, min_size=1, max_size=4))
def test_damaged_bytes(
    edits: list[tuple[int, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Damaged bytes of a header that raise anything but ValueError."""
    content = bytearray(WHOLE)
    for place, byte in edits:
        content[place] = byte
    check_refused_or_read(tmp_path_factory.getbasetemp(), bytes(content))


@settings(max_examples=150)
@given(header=HEADER, data=st.binary(max_size=9))
def test_any_header(
    header: dict[str, Any], data: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A header that raises anything but ValueError."""
    check_refused_or_read(tmp_path_factory.getbasetemp(), frame(header, data))
