"""Directories that appear whole or not at all."""

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """A directory to fill, which becomes `path` when the block ends.

    It lies beside `path`, under a name of its own that starts with "." and the name of `path`. An
    exception removes it. A killed process leaves it behind, where it is in the way of none.

    Args:
        path: where nothing is yet. Missing parents are made.

    Raises:
        OSError: the directory cannot be made, written to the disk, or moved to `path`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    temporary.mkdir()
    try:
        yield temporary
        sync_tree(temporary)
        temporary.rename(path)
    except BaseException as error:
        # A directory that cannot be removed must not hide why it was to be.
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, OSError) and _is_of(error, temporary):
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
    sync(path.parent)


def _is_of(error: OSError, directory: Path) -> bool:
    """Whether it is a failure in the directory, which the caller does not know."""
    names = [name for name in (error.filename, error.filename2) if name is not None]
    if not names:
        return error.errno is not None  # A failed write names no file.
    return any(Path(name).is_relative_to(directory) for name in names)


def sync_tree(path: Path) -> None:
    """Waits until all files and directories below `path`, and itself, are on the disk."""
    for folder, _, files in os.walk(path):
        for name in files:
            sync(Path(folder) / name)
        sync(Path(folder))


def sync(path: Path) -> None:
    """Waits until a file, or the names in a directory, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
