"""Files of a token prefix and its cached rows, which a store of any page size imports.

A file is a ZIP archive of uncompressed members, in this order:

| member              | what                                                           |
|---------------------|----------------------------------------------------------------|
| `tokens.npy`        | token ids [tokens] int32                                       |
| `rows/00000000.npy` | MLA rows of the first block of tokens [tokens, layers, width]  |
| `keys/00000000.npy` | index keys of that block [tokens, index_layers, index_width]   |
| ...                 | rows and keys of the other blocks, in position order           |
| `prefix.json`       | version, tokens, tokens of a block, and what the rows are      |

Every block but the last has the same number of tokens. Rows and keys are in the stored dtype of
their format, bfloat16 as uint16. The MTP layer, where there is one, is the last layer of both: its
row of position p + 1 is made from token p + 1, that of position 0 means nothing.

Both sides hold one block at a time. The archive's CRC-32 of each member shows damage; its
directory, written last, shows that the file is whole. Nothing that a file claims is allocated
before it has been held against the bytes that are there.
"""

import contextlib
import dataclasses
import errno
import io
import math
import os
import secrets
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

import numpy as np
from jaxtyping import Int, Int32, Shaped
from numpy.lib import format as npy

from kvcache.prefix.description import PrefixDescription, PrefixHeader

Block = tuple[
    Shaped[np.ndarray, "_ layers width"],
    Shaped[np.ndarray, "_ index_layers index_width"],
]
"""MLA rows and index keys of consecutive tokens. The last block of a list may have fewer."""

LARGEST_ARRAY = 1 << 30
"""Most bytes of an array of a file, which bounds what a reader must hold."""

_HEADER_NAME = "prefix.json"
_HEADER_LIMIT = 1 << 14
_NPY_HEADER_LIMIT = 4096
_DIRECTORY_LIMIT = 1 << 26
_READ_SIZE = 1 << 20


class PrefixFileError(ValueError):
    """A file that is no prefix file, is torn or damaged, or does not fit the store."""


@dataclasses.dataclass(frozen=True)
class _Array:
    """An array of the file: the name of its member, its shape, and its dtype in memory."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def stored_dtype(self) -> np.dtype:
        """dtype in the file; NPY has no bfloat16."""
        return np.dtype("<u2") if self.dtype.name == "bfloat16" else self.dtype.newbyteorder("<")

    @property
    def data_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def has_header(self, header: bytes) -> bool:
        """Whether this is the NPY header of the array, however it is padded."""
        file = io.BytesIO()
        descr = npy.dtype_to_descr(self.stored_dtype)
        npy.write_array_header_1_0(
            file, {"descr": descr, "fortran_order": False, "shape": self.shape}
        )
        expected = file.getvalue()
        return (
            header[:8] == expected[:8]
            and int.from_bytes(header[8:10], "little") == len(header) - 10
            and header[10:].rstrip() == expected[10:].rstrip()
        )


def _tokens_array(num_tokens: int) -> _Array:
    return _Array("tokens.npy", (num_tokens,), np.dtype(np.int32))


def _block_arrays(description: PrefixDescription, block: int, tokens: int) -> tuple[_Array, _Array]:
    """Rows and index keys of a block."""
    row, key = description.row_format, description.index_row_format
    layers, index_layers = description.num_layers, description.num_index_layers
    return (
        _Array(f"rows/{block:08d}.npy", (tokens, layers, row.width), row.dtype),
        _Array(f"keys/{block:08d}.npy", (tokens, index_layers, key.width), key.dtype),
    )


def write_prefix(
    path: Path,
    description: PrefixDescription,
    token_ids: Int[np.ndarray, " tokens"],
    blocks: Iterable[Block],
) -> None:
    """Writes a prefix file. It stands under its name only when it is whole and on the disk.

    A failure leaves nothing behind, and a file that was there before as it was. A killed process
    leaves a file beside `path` whose name starts with "." and the name of `path`.

    Args:
        path: the file, replaced if it exists; anything but a regular file is refused.
        description: what the rows are.
        token_ids: the tokens of the prefix, int32.
        blocks: rows and index keys in position order. All have as many tokens as the first, the
            last perhaps fewer. A block is let go before the next is asked for.

    Raises:
        ValueError: tokens or blocks disagree with the description or each other, or a block is
            larger than `LARGEST_ARRAY`.
        OSError: the file cannot be written.
    """
    num_tokens = len(token_ids)
    if not num_tokens:
        raise ValueError("token_ids is empty: a prefix has at least one token")
    with _replacing(path) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        _write_array(archive, _tokens_array(num_tokens), token_ids)
        block_tokens = _write_blocks(archive, description, num_tokens, blocks)
        header = PrefixHeader(description, num_tokens, block_tokens)
        with archive.open(_HEADER_NAME, "w") as member:
            member.write(header.to_json())


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[IO[bytes]]:
    """A new file, which takes the place of `path` when the block ends without an exception.

    A symbolic link stays, and what it leads to is replaced.
    """
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "Not a regular file, and so not replaced", str(path))
    if not path.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, "No such directory", str(path.parent))
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException as error:
        # A failed write names no file, and the caller does not know the temporary one.
        if isinstance(error, OSError) and error.filename in (None, str(temporary)):
            error.filename = str(path)
        # A file that cannot be removed must not hide why it was to be.
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _write_blocks(
    archive: zipfile.ZipFile,
    description: PrefixDescription,
    num_tokens: int,
    blocks: Iterable[Block],
) -> int:
    """Writes all blocks, and returns the tokens of the first."""
    block_tokens = written = 0
    for rows, keys in blocks:
        if written == num_tokens:
            raise ValueError(f"blocks hold more than the {num_tokens} tokens of token_ids")
        block_tokens = block_tokens or max(len(rows), 1)
        tokens = min(block_tokens, num_tokens - written)
        rows_array, keys_array = _block_arrays(description, written // block_tokens, tokens)
        _write_array(archive, rows_array, rows)
        _write_array(archive, keys_array, keys)
        # They would live on while the next block is made, as they would in an enumerate.
        del rows, keys
        written += tokens
    if written < num_tokens:
        raise ValueError(f"blocks hold {written} of the {num_tokens} tokens of token_ids")
    return block_tokens


def _write_array(archive: zipfile.ZipFile, array: _Array, values: np.ndarray) -> None:
    if (values.dtype, values.shape) != (array.dtype, array.shape):
        raise ValueError(
            f"{array.name} must be {array.dtype} {array.shape}, got {values.dtype} {values.shape}"
        )
    if array.data_bytes > LARGEST_ARRAY:
        raise ValueError(
            f"{array.name} has {array.data_bytes} bytes, more than {LARGEST_ARRAY}: "
            "use blocks of fewer tokens"
        )
    stored = np.ascontiguousarray(values).view(array.stored_dtype)
    with archive.open(array.name, "w") as member:
        npy.write_array(member, stored, version=(1, 0), allow_pickle=False)


class PrefixReader:
    """An open prefix file, of which all but the rows and index keys has been read and checked.

    Raises:
        PrefixFileError: it is not a prefix file, of another version, torn or damaged.
        OSError: it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with contextlib.ExitStack() as stack:
            file = stack.enter_context(path.open("rb"))
            self._size = file.seek(0, os.SEEK_END)
            self._check_end(file)
            with self._naming("its directory"):
                self._archive = stack.enter_context(zipfile.ZipFile(file))
            self._members = {info.filename: info for info in self._archive.infolist()}
            self._header = self._read_header()
            self._check_members()
            self._token_ids = self._read_array(_tokens_array(self._header.num_tokens))
            self._closing = stack.pop_all()

    def __enter__(self) -> "PrefixReader":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the file. No block can be read any more."""
        self._closing.close()

    @property
    def description(self) -> PrefixDescription:
        """Description of the rows."""
        return self._header.description

    @property
    def num_tokens(self) -> int:
        """Tokens of the prefix."""
        return self._header.num_tokens

    @property
    def block_tokens(self) -> int:
        """Tokens of each block but the last, which may be smaller."""
        return self._header.block_tokens

    @property
    def token_ids(self) -> Int32[np.ndarray, " tokens"]:
        """The tokens of the prefix."""
        return self._token_ids

    def check_fits(self, store: PrefixDescription) -> None:
        """Refuses a file whose rows a store cannot take.

        Raises:
            PrefixFileError: naming all that differs.
        """
        misfits = self.description.misfits(store)
        if misfits:
            raise self._error(f"does not fit the store: {'; '.join(misfits)}")

    def blocks(self, *, with_mtp: bool = True) -> Iterator[Block]:
        """Rows and index keys of one block after the other, in position order.

        Args:
            with_mtp: False leaves out the MTP layer of a file that has it.

        Raises:
            PrefixFileError: the next block is damaged; those before it were not.
        """
        cut = 0 if with_mtp else self.description.num_mtp_layers
        layers = self.description.num_layers - cut
        index_layers = self.description.num_index_layers - cut
        for block in range(self._header.num_blocks):
            rows, keys = _block_arrays(self.description, block, self._header.tokens_of(block))
            yield self._read_array(rows)[:, :layers], self._read_array(keys)[:, :index_layers]

    def _error(self, what: str) -> PrefixFileError:
        return PrefixFileError(f"{self._path} {what}")

    @contextlib.contextmanager
    def _naming(self, part: str) -> Iterator[None]:
        """Names the part of the file in which `zipfile` finds damage."""
        try:
            yield
        # The last is for what zipfile cannot do, which a damaged archive may ask for.
        except (zipfile.BadZipFile, EOFError, UnicodeDecodeError, NotImplementedError) as error:
            # zipfile's EOFError says nothing.
            what = str(error) or "it ends early"
            raise self._error(f"is damaged in {part}: {what}") from error

    def _check_end(self, file: IO[bytes]) -> None:
        """Refuses a file that does not end with the directory, or with a vast one.

        `zipfile` would search for the directory before the end, and read one of any size.
        """
        file.seek(0)
        if file.read(4) != b"PK\x03\x04":
            raise self._error("is not a prefix file")
        # The end record is 22 bytes; before it may stand 20 that locate a 64-bit record of 56.
        file.seek(max(self._size - 98, 0))
        tail = file.read().rjust(98, b"\0")
        if tail[76:80] != b"PK\x05\x06" or tail[96:] != b"\0\0":
            raise self._error("is torn: it does not end with a directory of its members")
        directory_bytes = int.from_bytes(tail[88:92], "little")
        if tail[56:60] == b"PK\x06\x07":
            directory_bytes = max(directory_bytes, int.from_bytes(tail[40:48], "little"))
        if directory_bytes > _DIRECTORY_LIMIT:
            raise self._error(f"is damaged: its directory claims {directory_bytes} bytes")

    def _read_header(self) -> PrefixHeader:
        if _HEADER_NAME not in self._members:
            raise self._error(f"is not a prefix file: it has no {_HEADER_NAME}")
        info = self._members[_HEADER_NAME]
        self._check_member(info, 1, _HEADER_LIMIT)
        text = self._read_member(info).tobytes()
        try:
            return PrefixHeader.from_json(text)
        except ValueError as error:
            raise self._error(f"cannot be read: {_HEADER_NAME}: {error}") from error

    def _check_members(self) -> None:
        """Holds the directory against the header."""
        infos = self._archive.infolist()
        if sum(info.file_size for info in infos) > self._size:
            raise self._error("is damaged: its members overlap")
        expected = {_HEADER_NAME}
        # Ends at the first that is missing, however many the header claims.
        for array in self._arrays():
            if array.name not in self._members:
                raise self._error(f"is damaged: it has no {array.name}")
            self._check_array(self._members[array.name], array)
            expected.add(array.name)
        if len(infos) != len(expected):
            others = [info.filename for info in infos if info.filename not in expected]
            raise self._error(f"is damaged: members are foreign or doubled: {others[:3]}")

    def _arrays(self) -> Iterator[_Array]:
        """All arrays that the header describes."""
        yield _tokens_array(self.num_tokens)
        for block in range(self._header.num_blocks):
            yield from _block_arrays(self.description, block, self._header.tokens_of(block))

    def _check_member(self, info: zipfile.ZipInfo, least: int, most: int) -> None:
        """Holds a directory entry against the file and the bytes it should have."""
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits:
            raise self._error(f"is damaged: {info.filename} is compressed or encrypted")
        size = info.file_size
        if size != info.compress_size or not least <= size <= most:
            raise self._error(
                f"is damaged: {info.filename} has {size} bytes, expected {least} to {most}"
            )
        if not 0 <= info.header_offset <= self._size - size:
            raise self._error(f"is damaged: {info.filename} lies outside it")

    def _check_array(self, info: zipfile.ZipInfo, array: _Array) -> None:
        """Holds a directory entry and the NPY header of an array against what it should be."""
        size = array.data_bytes
        if size > LARGEST_ARRAY:
            raise self._error(f"holds {size} bytes in {array.name}, more than {LARGEST_ARRAY}")
        self._check_member(info, size + 1, size + _NPY_HEADER_LIMIT)
        with self._naming(array.name), self._archive.open(info) as member:
            header = member.read(info.file_size - size)
        if not array.has_header(header):
            raise self._error(f"is damaged: {array.name} is no {array.dtype} {array.shape}")

    def _read_member(self, info: zipfile.ZipInfo) -> Shaped[np.ndarray, " bytes"]:
        """Bytes of a checked member. The last one read has `zipfile` compare the CRC-32."""
        data, done = np.empty(info.file_size, np.uint8), 0
        with self._naming(info.filename), self._archive.open(info) as member:
            while done < data.size:
                chunk = member.read(_READ_SIZE)
                if not chunk:
                    raise EOFError
                data[done : done + len(chunk)] = np.frombuffer(chunk, np.uint8)
                done += len(chunk)
        return data

    def _read_array(self, array: _Array) -> np.ndarray:
        data = self._read_member(self._members[array.name])
        return data[data.size - array.data_bytes :].view(array.dtype).reshape(array.shape)
