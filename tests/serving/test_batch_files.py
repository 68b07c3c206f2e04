"""Batch files: encodings of the input, and rows of an output that is full."""

import codecs
import errno
import functools
import io
import json
import logging
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm53 import LLM, RequestOutput
from serving.batch import BatchCounts, count_requests, run_batch
from serving.cli import main
from tests.helpers.fake_llm import FakeLLM, answer, line, one_by_one
from tests.helpers.terminal import terminal

BOM = codecs.BOM_UTF8
LINES = [line("a", prompt="x"), line("b" * 50, prompt="x"), b"nope\n", line("c", prompt="x")]


def use(monkeypatch: pytest.MonkeyPatch, make: Callable[..., LLM]) -> None:
    monkeypatch.setattr("serving.cli.options.LLM", make)


# --- encodings ---


@pytest.mark.parametrize(
    ("data", "wanted"),
    [
        (BOM + line("a", prompt="x"), ["a"]),
        (BOM + line("a", prompt="x") + BOM + line("b", prompt="x").rstrip(), ["a", "b"]),
        (BOM + line("a", prompt="x").replace(b"\n", b"\r\n"), ["a"]),
        (BOM + b"\n" + line("a", prompt="x"), ["a"]),
        (BOM, []),
    ],
)
def test_byte_order_marks(data: bytes, wanted: list[str]) -> None:
    """A mark at the start of a file, also of one that another was joined to, costs no line."""
    target = io.BytesIO()
    counts = run_batch(FakeLLM(one_by_one), io.BytesIO(data), target, ["tiny"], lambda _: None)
    rows = [json.loads(row) for row in target.getvalue().splitlines()]
    assert [row["custom_id"] for row in rows] == wanted
    assert counts.failed == 0
    assert count_requests(io.BytesIO(data)) == len(wanted)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-be"])
def test_other_encodings(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
    encoding: str,
) -> None:
    """The whole input is refused, once, before the model is loaded and the output emptied."""
    use(monkeypatch, lambda *_, **__: pytest.fail("the model was loaded"))
    source, target = tmp_path / "in", tmp_path / "out"
    source.write_bytes(line("a", prompt="x").decode().encode(encoding))
    target.write_text("old")
    assert main(["batch", str(source), str(target)]) == 2
    message = "glm53: the input is in UTF-16 or UTF-32: convert it to UTF-8\n"
    assert capsys.readouterr() == ("", message)
    assert target.read_text() == "old"


def test_input_that_cannot_be_read() -> None:
    """A fault of the system that does not say where it is."""

    class Broken(io.BytesIO):
        def readline(self, size: int | None = -1, /) -> bytes:
            if self.tell():
                raise OSError(errno.EIO, "Input/output error")
            return super().readline(size)

    with pytest.raises(OSError, match=r"^line 2 could not be read: Input/output error$"):
        count_requests(Broken(b"".join(LINES)))


# --- outputs that are full ---


class FullDisk(io.BytesIO):
    """A file that writes some bytes at a time, and fails at its limit."""

    def __init__(self, limit: int, at_once: int, error: BaseException) -> None:
        super().__init__()
        self._limit, self._at_once, self._error = limit, at_once, error

    def write(self, data: Any, /) -> int:
        room = min(self._limit - self.tell(), self._at_once)
        if not room:
            raise self._error
        return super().write(data[:room])


@functools.cache
def fake_llm() -> FakeLLM:
    return FakeLLM(one_by_one)


def written(target: io.BytesIO) -> list[bytes]:
    run_batch(fake_llm(), io.BytesIO(b"".join(LINES)), target, ["tiny"], lambda _: None)
    return target.getvalue().splitlines(keepends=True)


@functools.cache
def whole() -> list[int]:
    """Sizes of the rows of a file that takes them all."""
    return [len(row) for row in written(io.BytesIO())]


FAULTS = [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()]


@given(st.data(), st.integers(1, 300), st.sampled_from(FAULTS))
def test_output_that_is_full(data: st.DataObject, at_once: int, error: BaseException) -> None:
    """Wherever writing ends, the file has all rows that fit, whole, and nothing of the next."""
    limit = data.draw(st.integers(0, sum(whole()) - 1))
    target = FullDisk(limit, at_once, error)
    with pytest.raises((OSError, KeyboardInterrupt)) as raised:
        written(target)
    rows = target.getvalue().splitlines(keepends=True)
    assert [len(row) for row in rows] == whole()[: len(rows)]
    assert sum(whole()[: len(rows) + 1]) > limit
    if isinstance(error, OSError):
        wanted = f"row {len(rows) + 1} could not be written: No space left on device"
        assert str(raised.value) == wanted


def test_few_bytes_at_a_time() -> None:
    """A file that takes only a part of what it is given loses nothing."""
    rows = written(FullDisk(1 << 20, 7, FAULTS[0]))
    assert [len(row) for row in rows] == whole()


@pytest.mark.parametrize("old_bytes", [0, 4, 90_000])
def test_file_of_limited_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, old_bytes: int
) -> None:
    """As the system does it: two lines, exit code 2, whole rows, and behind `>>` what was there."""
    use(monkeypatch, lambda *_, **__: FakeLLM(one_by_one))
    source, target = tmp_path / "in", tmp_path / "out"
    source.write_bytes(b"".join(line(f"{n}" * 30_000, prompt="x") for n in range(9)))
    old = b"o" * old_bytes
    target.write_bytes(old)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    # As a shell opens it: its position is not its end.
    with open(os.open(target, os.O_WRONLY | os.O_APPEND), "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
        try:
            code = main(["batch", str(source), "-" if old else str(target)])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert code == 2
    data = target.read_bytes()
    assert data.startswith(old)
    rows = [json.loads(row) for row in data[len(old) :].splitlines()]
    assert [row["custom_id"][0] for row in rows] == ["0", "1", "2"][
        : (100_000 - old_bytes) // 30_000
    ]
    summary, fault = capsys.readouterr().err.splitlines()
    assert summary.startswith(f"glm53: {len(rows)} of 9 rows, 0 with an error; ")
    assert fault == f"glm53: row {len(rows) + 1} could not be written: File too large"


def test_pipe_that_does_not_block() -> None:
    """A reader that is slow gets everything."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    found: list[bytes] = []
    with open(reader, "rb") as stream, open(writer, "wb", buffering=0) as target:
        thread = threading.Thread(target=lambda: found.append(stream.read()))
        source = io.BytesIO(line("a" * 300_000, prompt="x") + line("b", prompt="x"))
        thread.start()
        run_batch(FakeLLM(one_by_one), source, target, ["tiny"], lambda _: None)
        target.close()
        thread.join()
    assert [json.loads(row)["custom_id"][0] for row in found[0].splitlines()] == ["a", "b"]


# --- what the command says ---


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    source = tmp_path / "in.jsonl"
    source.write_bytes(b"".join(LINES) + b"\n \n")
    return str(source), str(tmp_path / "out.jsonl")


def test_termination(
    files: tuple[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """SIGTERM leaves whole rows, and is said, after what was done."""

    def serve(requests: Any) -> Iterator[tuple[int, RequestOutput]]:
        next(requests)
        yield answer(0)
        os.kill(os.getpid(), signal.SIGTERM)
        yield answer(1)

    use(monkeypatch, lambda *_, **__: FakeLLM(serve))
    assert main(["batch", *files]) == 143
    summary, end = capsys.readouterr().err.splitlines()
    assert summary.startswith("glm53: 1 of 4 rows, 0 with an error; 2 tokens in, 1 out; ")
    assert end == "glm53: terminated"
    (row,) = Path(files[1]).read_text().splitlines()
    assert json.loads(row)["custom_id"] == "a"


def test_signals_that_are_ignored(files: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """As under nohup, or behind `&` in a script."""
    signals = (signal.SIGINT, signal.SIGTERM)

    def serve(requests: Any) -> Iterator[tuple[int, RequestOutput]]:
        for index, _ in enumerate(requests):
            for number in signals:
                os.kill(os.getpid(), number)
            yield answer(index)

    use(monkeypatch, lambda *_, **__: FakeLLM(serve))
    before = [signal.signal(number, signal.SIG_IGN) for number in signals]
    try:
        assert main(["batch", *files]) == 1
    finally:
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, handler)
    assert len(Path(files[1]).read_bytes().splitlines()) == 4


@pytest.mark.parametrize("with_terminal", [False, True])
def test_logs(
    files: tuple[str, str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    with_terminal: bool,
) -> None:
    """Where no bar is shown, also on a terminal without columns: the start, and the rows now and
    then, of how many where that is known."""
    use(monkeypatch, lambda *_, **__: FakeLLM(one_by_one))
    monkeypatch.setattr("serving.cli.batch._SECONDS_BETWEEN_LOGS", 0.0)
    with terminal(0) as shown, monkeypatch.context() as patch:
        if with_terminal:
            patch.setattr(sys, "stderr", shown.stream)
        assert main(["batch", *files]) == 1
        assert ("of 4 rows" in shown.read()) == with_terminal
    messages = [record.message for record in caplog.records if record.levelno == logging.INFO]
    assert messages[0].startswith("loaded tiny in ")
    assert [message.split(",")[0] for message in messages[1:]] == [
        f"{done} of 4 rows" for done in range(1, 5)
    ]
    assert "1 with an error; 6 tokens in, 3 out; " in messages[-1]


class Terminal(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("known", [False, True])
def test_bar(
    files: tuple[str, str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    known: bool,
) -> None:
    """On a terminal, with a total where the input is a file; and the summary behind it."""
    use(monkeypatch, lambda *_, **__: FakeLLM(one_by_one))
    monkeypatch.setattr("serving.cli.batch._SECONDS_BETWEEN_LOGS", 0.0)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    reader, writer = os.pipe()
    os.write(writer, Path(files[0]).read_bytes())
    os.close(writer)
    with open(reader) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        assert main(["batch", files[0] if known else "-", files[1]]) == 1
    shown = terminal.getvalue()
    assert ("4/4" in shown) == known
    assert shown.splitlines()[-1].startswith(f"glm53: 4 {'of 4 ' * known}rows, 1 with an error; ")
    assert not any("with an error" in record.message for record in caplog.records)


def test_counts() -> None:
    """Tokens of all prompts and outputs of the rows with a response."""
    seen: list[BatchCounts] = []
    run_batch(
        FakeLLM(one_by_one),
        io.BytesIO(line("a", prompt=["x", "y"]) + b"nope\n" + line("b", prompt="x")),
        io.BytesIO(),
        ["tiny"],
        seen.append,
    )
    assert seen == [BatchCounts(1, 0, 4, 2), BatchCounts(1, 1, 4, 2), BatchCounts(2, 1, 6, 3)]
