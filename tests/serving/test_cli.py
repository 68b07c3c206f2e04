"""The command line, as a process."""

import subprocess
import sys

import pytest

from serving.cli import main


def test_generate(capsys: pytest.CaptureFixture) -> None:
    """Prints the continuation alone on standard output."""
    options = ["--temperature", "0", "--max-tokens", "4"]
    # The sizes of `tiny_llm`, whose compiled steps are found in the cache.
    options += ["--max-model-len", "512", "--max-num-seqs", "4"]
    assert main(["generate", "The Congress of the", *options]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith(" Secretary of the")
    assert captured.err == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", ""], "empty"),
        (["generate", "x", "--max-tokens", "0"], "max_tokens"),
        (["generate", "x", "--model", "no-such-model"], "no-such-model"),
        (["generate", "x", "--max-model-len", "200000"], "max_model_len"),
        (["generate", "x", "--kv-policy", "resident", "--host-memory-gib", "0.5"], "0.5 has no"),
        (["generate", "x", "--memory-fraction", "2", "--no-enable-prefix-caching"], "fraction"),
        (["generate", "x", "--hot-rows", "40000"], "hot_rows"),
    ],
)
def test_bad_input(capsys: pytest.CaptureFixture, arguments: list[str], message: str) -> None:
    """One line on standard error, exit code 2, no traceback."""
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert captured.err.count("\n") == 1


def test_as_a_process() -> None:
    """An unknown command exits with 2 and the usage."""
    run = subprocess.run(
        [sys.executable, "-m", "serving.cli", "frobnicate"], capture_output=True, text=True
    )
    assert run.returncode == 2
    assert "usage: glm53" in run.stderr
