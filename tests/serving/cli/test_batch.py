"""`glm53 batch`: exit codes, files and streams, and what stops it."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from glm53 import LLM, RequestOutput, SamplingParams
from serving.cli import main
from tests.helpers.fake_llm import FakeLLM, answer, error_of, line, one_by_one
from tests.helpers.golden import GOLDEN


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    source = tmp_path / "in.jsonl"
    source.write_bytes(line("a", prompt="x") + line("b", prompt="x") + line("c", prompt="x"))
    return str(source), str(tmp_path / "out.jsonl")


def use(monkeypatch: pytest.MonkeyPatch, make: Callable[..., LLM]) -> None:
    monkeypatch.setattr("serving.cli.options.LLM", make)


def test_exit_codes(
    files: tuple[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """0 if all rows are good and 1 if one is not; an old output is replaced; standard output stays
    empty, and standard error has a summary."""
    use(monkeypatch, lambda *_, **__: FakeLLM(one_by_one))
    source, target = files
    Path(target).write_text("old " * 1000)
    assert main(["batch", source, target]) == 0
    assert len(Path(target).read_bytes().splitlines()) == 3
    with open(source, "ab") as file:
        file.write(b"nope")
    assert main(["batch", source, target]) == 1
    assert len(Path(target).read_bytes().splitlines()) == 4
    captured = capsys.readouterr()
    assert captured.out == ""
    first, second = captured.err.splitlines()
    assert first.startswith("glm53: 3 of 3 rows, 0 with an error; 6 tokens in, 3 out; ")
    assert second.startswith("glm53: 4 of 4 rows, 1 with an error; 6 tokens in, 3 out; ")


def test_served_model_names(files: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The value of `--model` and its last part."""
    use(monkeypatch, lambda *_, **__: FakeLLM(one_by_one))
    source, target = files
    monkeypatch.chdir(Path(source).parent)
    Path("models/glm").mkdir(parents=True)
    Path("models/glm/tokenizer.json").touch()
    names = ["models/glm", "glm", "models", "/models/glm"]
    Path(source).write_bytes(
        b"".join(line(str(index), prompt="x", model=name) for index, name in enumerate(names))
    )
    assert main(["batch", source, target, "--model", "models/glm"]) == 1
    rows = [json.loads(row) for row in Path(target).read_text().splitlines()]
    assert [row["error"] is None for row in rows] == [True, True, False, False]
    assert {error_of(row)[0] for row in rows[2:]} == {"model_not_found"}


def failing(error: BaseException) -> Callable[..., LLM]:
    """An engine that raises after its first answer."""

    def serve(requests: Any) -> Iterator[tuple[int, RequestOutput]]:
        next(requests)
        yield answer(0)
        raise error

    return lambda *_, **__: FakeLLM(serve)


def assert_one_row(target: str) -> None:
    data = Path(target).read_bytes()
    assert data.endswith(b"\n")
    (row,) = data.splitlines()
    assert json.loads(row)["custom_id"] == "a"


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), ValueError("out of memory")])
def test_engine_failure(
    files: tuple[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
) -> None:
    """Exit code 2, the error on standard error, and the rows so far on disk."""
    use(monkeypatch, failing(error))
    assert main(["batch", *files]) == 2
    assert "out of memory" in capsys.readouterr().err + caplog.text
    assert_one_row(files[1])


def test_interruption(
    files: tuple[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Control-C leaves whole rows, and what was done is said."""
    use(monkeypatch, failing(KeyboardInterrupt()))
    assert main(["batch", *files]) == 130
    summary, end = capsys.readouterr().err.splitlines()
    assert summary.startswith("glm53: 1 of 3 rows, 0 with an error; ")
    assert end == "glm53: interrupted"
    assert_one_row(files[1])


def test_a_model_without_text(
    files: tuple[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Refused before it is loaded, and before the output is emptied."""
    use(monkeypatch, lambda *_, **__: pytest.fail("the model was loaded"))
    Path(files[1]).write_text("kept")
    assert main(["batch", *files, "--model", str(GOLDEN / "tiny_f32")]) == 2
    assert "no tokenizer.json" in capsys.readouterr().err
    assert Path(files[1]).read_text() == "kept"


def test_output_that_is_the_input(
    files: tuple[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """By the same name, another, a symbolic or a hard link: refused before the model is loaded,
    and nothing is lost."""
    use(monkeypatch, lambda *_, **__: pytest.fail("the model was loaded"))
    source = Path(files[0])
    before = source.read_bytes()
    symbolic, hard = source.with_name("symbolic"), source.with_name("hard")
    symbolic.symlink_to(source)
    os.link(source, hard)
    (source.parent / "folder").mkdir()
    other = source.parent / "folder" / ".." / source.name
    for name in (source, symbolic, hard, other):
        for arguments in ((source, name), (name, source)):
            assert main(["batch", *map(str, arguments)]) == 2
            assert "is the input" in capsys.readouterr().err
            assert source.read_bytes() == before


def test_standard_streams_that_are_the_same_file(
    files: tuple[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """`< file` and `>> file` are its input and output, too."""
    use(monkeypatch, lambda *_, **__: pytest.fail("the model was loaded"))
    before = Path(files[0]).read_bytes()
    for arguments in (["-", files[0]], [files[0], "-"], ["-", "-"]):
        with open(files[0]) as stdin, open(files[0], "a") as stdout, monkeypatch.context() as patch:
            patch.setattr(sys, "stdin", stdin)
            patch.setattr(sys, "stdout", stdout)
            assert main(["batch", *arguments]) == 2
        assert "is the input" in capsys.readouterr().err
        assert Path(files[0]).read_bytes() == before


def test_standard_streams_that_are_closed(
    files: tuple[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Python has none then."""
    use(monkeypatch, lambda *_, **__: pytest.fail("the model was loaded"))
    for name, arguments in (("stdin", ["-", files[1]]), ("stdout", [files[0], "-"])):
        with monkeypatch.context() as patch:
            patch.setattr(sys, name, None)
            assert main(["batch", *arguments]) == 2
        assert "is closed" in capsys.readouterr().err


def test_standard_input_that_ends_at_once(
    files: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty batch."""
    use(monkeypatch, lambda *_, **__: FakeLLM(one_by_one))
    with open(os.devnull) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        assert main(["batch", "-", files[1]]) == 0
    assert Path(files[1]).read_bytes() == b""


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        ("missing", "out", "missing': No such file or directory"),
        ("folder", "out", "folder': Is a directory"),
        ("in.jsonl", "folder", "is a directory"),
        ("in.jsonl", "nowhere/out", "there is no directory"),
    ],
)
def test_files_that_cannot_be_opened(
    files: tuple[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
    source: str,
    target: str,
    message: str,
) -> None:
    """Refused before the model is loaded; no output is made."""
    use(monkeypatch, lambda *_, **__: pytest.fail("the model was loaded"))
    folder = Path(files[0]).parent
    (folder / "folder").mkdir()
    assert main(["batch", str(folder / source), str(folder / target)]) == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert shown.startswith(("glm53: input '", "glm53: output '"))
    assert not (folder / "out").exists()


def test_output_outlives_a_model_that_is_refused(
    files: tuple[str, str], capsys: pytest.CaptureFixture
) -> None:
    """An old output is still what it was."""
    Path(files[1]).write_text("old")
    assert main(["batch", *files, "--model", "no-such-model"]) == 2
    assert "no-such-model" in capsys.readouterr().err
    assert Path(files[1]).read_text() == "old"


def run_process(
    stdin: bytes, stdout: BinaryIO | int = subprocess.PIPE
) -> subprocess.CompletedProcess[bytes]:
    """Runs the command on the built-in model, between standard streams.

    The sizes are `tiny_llm`'s, whose compiled steps are found in the cache.
    """
    command = [sys.executable, "-m", "serving.cli", "batch", "-", "-"]
    command += ["--max-model-len", "512", "--max-num-seqs", "4"]
    return subprocess.run(command, input=stdin, stdout=stdout, stderr=subprocess.PIPE, check=False)


@pytest.mark.compiles
def test_as_a_filter(tiny_llm: LLM) -> None:
    """Standard input to standard output; input that ends within a line ends the batch with its
    error."""
    good = line("a", prompt=[7, 8], max_tokens=1, temperature=0)
    done = run_process(good + line("b", prompt="x")[:40])
    assert done.returncode == 1, done.stderr
    rows = {row["custom_id"]: row for row in map(json.loads, done.stdout.splitlines())}
    (alone,) = tiny_llm.generate(
        {"prompt_token_ids": [7, 8]}, SamplingParams(temperature=0, max_tokens=1)
    )
    text = rows["a"]["response"]["body"]["choices"][0]["text"]
    assert text == alone.outputs[0].text
    assert "not JSON" in error_of(rows[None])[1]
    assert done.stderr.splitlines()[-1].startswith(
        b"glm53: 2 rows, 1 with an error; 2 tokens in, 1 out; "
    )


def test_reader_that_goes_away() -> None:
    """A closed pipe ends the command with a line on standard error."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb") as stdout:
        done = run_process(b"nope\n" * 3, stdout)
    assert done.returncode == 2
    *logs, summary, last = done.stderr.splitlines()
    assert summary.startswith(b"glm53: 0 rows, ")
    assert last == b"glm53: row 1 could not be written: Broken pipe"
    assert all(log.startswith(b"INFO ") for log in logs)
