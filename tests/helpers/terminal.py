"""Pseudo-terminal of any width, and what is shown on it."""

import contextlib
import os
import pty
import termios
from collections.abc import Iterator
from typing import TextIO


class Terminal:
    """A terminal and its reader.

    Attributes:
        stream: what a program writes to.
        text: what has been read so far.
    """

    def __init__(self, reader: int, stream: TextIO) -> None:
        os.set_blocking(reader, False)
        self.stream, self.text = stream, ""
        self._reader = reader

    def read(self) -> str:
        """All that has been shown so far."""
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._reader, 1 << 16):
                self.text += data.decode()
        return self.text


@contextlib.contextmanager
def terminal(columns: int) -> Iterator[Terminal]:
    """A terminal for a block; one of no columns has no rows either."""
    reader, writer = pty.openpty()
    termios.tcsetwinsize(writer, (24 if columns else 0, columns))
    with open(reader, "rb"), open(writer, "w", buffering=1) as stream:
        yield Terminal(reader, stream)
