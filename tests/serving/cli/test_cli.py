"""The command line: what it prints, and how it ends."""

import argparse
import gc
import importlib.metadata
import io
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from glm53 import LLM, RequestOutput, SamplingParams
from serving.cli import batch, convert, generate, info, main, process
from serving.requests.outputs import CompletionOutput


@pytest.mark.compiles
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
        (["generate", "x", "--max-tokens", "-1"], "max_tokens"),
        (["generate", "x", "--top-k", "-5"], "top_k"),
        (["generate", "x", "--stop", ""], "stop"),
        (["generate", "x", "--model", "no-such-model"], "no-such-model"),
        (["generate", "x", "--max-model-len", "200000"], "max_model_len"),
        (["generate", "x", "--kv-policy", "resident", "--host-memory-gib", "0.5"], "0.5 has no"),
        (["generate", "x", "--memory-fraction", "2", "--no-enable-prefix-caching"], "fraction"),
        (["generate", "x", "--row-cache-rows", "40000"], "row_cache_rows"),
        (["generate", "x", "--tensor-parallel-size", "64"], "size is 64, but only"),
    ],
)
def test_bad_input(capsys: pytest.CaptureFixture, arguments: list[str], message: str) -> None:
    """One line on standard error, exit code 2, no traceback."""
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--gpu-memory-utilization 0.9 x", "--gpu-memory-utilization: it is called --memory-fract"),
        ("x --max-new-tokens=5", "--max-new-tokens: it is called --max-tokens here"),
        ("x --disable-radix-cache", "--disable-radix-cache: --no-enable-prefix-caching does it"),
        ("x --trust-remote-code", "--trust-remote-code: no code of a checkpoint is run"),
        ("x --dtype half", "'half': the range of float16 is too small, use 'bfloat16'"),
        # What these are called is no argument of the command.
        ("x --min-new-tokens 5", "unrecognized arguments: --min-new-tokens\n"),
        ("x --frequency-penalty 1", "unrecognized arguments: --frequency-penalty\n"),
        ("x y", "unrecognized arguments: y\n"),
    ],
)
def test_unknown_arguments(capsys: pytest.CaptureFixture, arguments: str, message: str) -> None:
    """One error line, of the subcommand, that says what is called how there."""
    with pytest.raises(SystemExit) as ended:
        main(["generate", *arguments.split()])
    assert ended.value.code == 2
    usage, *_, line = capsys.readouterr().err.splitlines(keepends=True)
    assert usage.startswith("usage: glm53 generate")
    assert line.startswith("glm53 generate: error:")
    assert message in line


# --- what generate is asked for ---


class FakeLLM(LLM):
    """Gives pieces of text, whatever it is asked, and keeps what it was asked."""

    def __init__(self, *pieces: str) -> None:
        self._pieces = pieces
        self.asked: list[tuple[Any, SamplingParams]] = []

    def generate_iter(self, prompts: Any, sampling_params: Any = None, **_: Any) -> Any:
        self.asked.append((prompts, sampling_params))
        return self._outputs()

    def _outputs(self) -> Iterator[tuple[int, RequestOutput]]:
        text = ""
        for piece in self._pieces:
            text += piece
            part = CompletionOutput(0, text, [1], None, None, None, None)
            yield 0, RequestOutput("0", "x", [1], None, [part], finished=False)


def use(monkeypatch: pytest.MonkeyPatch, *pieces: str) -> FakeLLM:
    llm = FakeLLM(*pieces)
    monkeypatch.setattr("serving.cli.options.LLM", lambda *_, **__: llm)
    return llm


def test_sampling_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is given is passed on, and what is not is the model's to choose."""
    llm = use(monkeypatch, "a")
    given = "--top-k 5 --top-p 0.5 --temperature 0.5 --seed 3 --max-tokens 9 --stop a --stop b"
    assert main(["generate", "x", *given.split()]) == 0
    assert main(["generate", "x"]) == 0
    assert llm.asked == [
        (
            "x",
            SamplingParams(
                top_k=5, top_p=0.5, temperature=0.5, seed=3, max_tokens=9, stop=["a", "b"]
            ),
        ),
        ("x", SamplingParams(max_tokens=64)),
    ]


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"two\nlines\n", "two\nlines"),
        ("\ufeffé\n\n".encode(), "é\n"),
        (b"two\r\nlines\r\n", "two\r\nlines"),
        (b"line\n\r\n", "line\n"),
        (b"bar\r", "bar\r"),
    ],
)
@pytest.mark.parametrize("named", [["-"], []])
def test_prompt_from_standard_input(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, data: bytes, text: str, named: list[str]
) -> None:
    """All of it, less the line break that ends it."""
    llm = use(monkeypatch, "a")
    (tmp_path / "in").write_bytes(data)
    with open(tmp_path / "in") as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        assert main(["generate", *named]) == 0
    assert [prompt for prompt, _ in llm.asked] == [text]


class Terminal(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_no_prompt(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """A terminal is not waited for, and what is closed or no text is refused."""
    llm = use(monkeypatch, "a")
    (tmp_path / "in").write_bytes(b"a\xff")
    with open(tmp_path / "in") as stdin:
        for stream, message in (
            (Terminal(), "give a text, or - for standard input"),
            (None, "standard input is closed"),
            (stdin, "standard input is not UTF-8: invalid start byte at byte 1"),
        ):
            monkeypatch.setattr(sys, "stdin", stream)
            assert main(["generate"]) == 2
            assert capsys.readouterr().err == f"glm53: {message}\n"
    assert not llm.asked


@pytest.mark.parametrize("arguments", [[""], ["", "--chat"], ["-"], ["-", "--chat"]])
def test_empty_text(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, arguments: list[str]
) -> None:
    """Refused before a model is loaded, alike with and without a conversation."""
    monkeypatch.setattr("serving.cli.options.LLM", lambda *_, **__: pytest.fail("loaded"))
    with open(os.devnull) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        assert main(["generate", *arguments]) == 2
    assert capsys.readouterr().err == "glm53: the text is empty: give at least one character\n"


def test_standard_input_that_cannot_be_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """A message that does not say of what it is."""
    monkeypatch.setattr("serving.cli.options.LLM", lambda *_, **__: pytest.fail("loaded"))
    with open(tmp_path / "in", "w") as written:
        monkeypatch.setattr(sys, "stdin", written)
        assert main(["generate", "-"]) == 2
    assert capsys.readouterr().err == "glm53: standard input: Bad file descriptor\n"


def test_chat(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """The content goes to standard output, the reasoning to the other, dimmed on a terminal,
    unless the user wants no colours."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    llm = use(monkeypatch, "I thi", "nk.</thi", "nk>It is", " so.")
    assert main(["generate", "--chat", "Is it?"]) == 0
    assert llm.asked == [
        ({"messages": [{"role": "user", "content": "Is it?"}]}, SamplingParams(max_tokens=None))
    ]
    assert capsys.readouterr() == ("It is so.\n", "I think.\n")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert main(["generate", "--chat", "Is it?", "--max-tokens", "5"]) == 0
    assert llm.asked[-1][1].max_tokens == 5
    assert terminal.getvalue() == "\x1b[2mI thi\x1b[0m\x1b[2mnk.\x1b[0m\n"
    monkeypatch.setenv("NO_COLOR", "1")
    assert main(["generate", "--chat", "Is it?"]) == 0
    assert terminal.getvalue().endswith("\x1b[0m\nI think.\n")
    use(monkeypatch, "</think>", "Yes.")
    assert main(["generate", "--chat", "Is it?"]) == 0
    assert capsys.readouterr().out == "It is so.\nIt is so.\nYes.\n"


def test_answer_that_stops_in_reasoning(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Standard output gets an empty line."""
    use(monkeypatch, "I think")
    assert main(["generate", "--chat", "Is it?"]) == 0
    assert capsys.readouterr() == ("\n", "I think\n")


# --- help ---


@pytest.mark.parametrize("module", [generate, batch, convert, info])
def test_help(module: Any) -> None:
    """What the command does, and the default of each argument that may be left out, also where it
    follows from others."""
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    optional = [action for action in parser._actions if not action.required][1:]
    for action in optional:
        assert "(default: " in str(action.help) or "(if omitted, " in str(action.help)
    assert parser.description and not parser.description.startswith("Exit code")
    assert "None" not in parser.format_help()


def test_version(capsys: pytest.CaptureFixture) -> None:
    """That of the package."""
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"glm53 {importlib.metadata.version('glm53')}\n"


# --- failures ---


def raising(error: BaseException) -> Callable[..., LLM]:
    def make(*_: Any, **__: Any) -> LLM:
        raise error

    return make


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("device_pages must be"), "device_pages must be"),
        (NotImplementedError("has no kernels: use"), "has no kernels: use"),
        (ModuleNotFoundError("No module named 'orbax'"), "No module named 'orbax': install glm53"),
        (MemoryError(), "out of memory (no message): a model takes less with a lower --max-model"),
        (RuntimeError("RESOURCE_EXHAUSTED: 9 bytes\nmore"), "out of memory (RESOURCE_EXHAUSTED: 9"),
        (RuntimeError("plugin\nmore"), "loading tiny failed: RuntimeError: plugin (GLM53_LOG_LEV"),
        (AssertionError(), "loading tiny failed: AssertionError: no message (GLM53_LOG_LEVEL="),
    ],
)
def test_start_that_fails(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
    message: str,
) -> None:
    """One line, exit code 2, nothing printed, no output; the traceback if it is asked for."""
    monkeypatch.setattr("serving.cli.options.LLM", raising(error))
    source, target = tmp_path / "in", tmp_path / "out"
    source.touch()
    for arguments in (["generate", "x"], ["batch", str(source), str(target)]):
        assert main(arguments) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith(f"glm53: {message}")
        assert captured.err.count("\n") == 1
    assert not target.exists()
    assert not [record for record in caplog.records if record.exc_info]
    monkeypatch.setenv("GLM53_LOG_LEVEL", "debug")
    assert main(["generate", "x"]) == 2
    assert "in make" in caplog.text


def test_fault_of_the_program(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """After the start, what nobody expects shows its traceback."""
    llm = use(monkeypatch)
    monkeypatch.setattr(llm, "generate_iter", raising(RuntimeError("a step")))
    assert main(["generate", "x"]) == 2
    assert capsys.readouterr().err == "glm53: failed unexpectedly: RuntimeError: a step\n"
    assert "in make" in caplog.text


def test_unknown_log_level(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setenv("GLM53_LOG_LEVEL", "loud")
    assert main(["info", "tiny"]) == 2
    message = "GLM53_LOG_LEVEL must be debug, info, warning or error, got LOUD"
    assert capsys.readouterr() == ("", f"glm53: {message}\n")


def test_levels_are_the_commands_own() -> None:
    """Nothing is left of them for who calls `main` in a program."""
    before = logging.getLogger("serving").level
    assert main(["info", "tiny"]) == 0
    assert logging.getLogger("serving").level == before


# --- standard streams ---


def test_reader_that_goes_away(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """As `| head` does when it has enough: no message, and the code of SIGPIPE."""
    use(monkeypatch, "</think>a", "b")
    for arguments in (["generate", "x"], ["generate", "x", "--chat"], ["info", "tiny"]):
        reader, writer = os.pipe()
        os.close(reader)
        with open(writer, "w") as stdout, monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", stdout)
            assert main(arguments) == 141
        assert capsys.readouterr().err == ""


@pytest.mark.parametrize("arguments", [["generate", "x"], ["info", "tiny"]])
def test_output_that_is_lost(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, arguments: list[str]
) -> None:
    """A standard output that is full or closed is no success, and ends with one line."""
    use(monkeypatch, "a", "b")
    with open("/dev/full", "w") as full, open("/dev/full", "w") as unbuffered:
        unbuffered.reconfigure(write_through=True)  # As PYTHONUNBUFFERED does.
        for stream, message in (
            (full, "standard output: No space left on device"),
            (unbuffered, "standard output: No space left on device"),
            (None, "standard output is closed"),
        ):
            with monkeypatch.context() as patch:
                patch.setattr(sys, "stdout", stream)
                assert main(arguments) == 2
            assert capsys.readouterr().err == f"glm53: {message}\n"


# --- as a process ---


def run(code: str, **streams: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, **streams
    )


def test_unknown_command() -> None:
    """The usage, and exit code 2; jax is not waited for."""
    done = run(
        "import sys; from serving.cli import main\n"
        "try: main(['frobnicate'])\n"
        "finally: assert 'jax' not in sys.modules"
    )
    assert done.returncode == 2
    assert "usage: glm53" in done.stderr


def test_interrupted_imports() -> None:
    """Control-C before the command runs, also in a callback, where Python would go on."""
    done = run(
        "import signal, sys\n"
        # Tests that run in the background have inherited that it is ignored.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "class Interrupting:\n"
        # In this thread: of a signal to the process another thread may take notice, later.
        "    def __del__(self): signal.raise_signal(signal.SIGINT)\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'jax': Interrupting(); raise ImportError('went on')\n"
        "sys.meta_path.insert(0, Interrupting())\n"
        "from serving.cli import main\n"
        "sys.exit(main(['generate', 'x']))\n"
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "glm53: interrupted\n")


def test_closed_streams() -> None:
    """A file that is opened does not become standard error, which libraries print to."""
    done = run(
        "import os, sys\n"
        "os.close(0); os.close(2); sys.stderr = None\n"
        "from serving.cli.process import exit_code_of\n"
        "def command():\n"
        "    print(os.open('/dev/zero', os.O_RDONLY) > 2, file=sys.stdout)\n"
        "    raise ValueError('not on standard output')\n"
        "sys.exit(exit_code_of(command))\n"
    )
    assert (done.returncode, done.stdout) == (2, "True\n")


def test_platform_without_devices() -> None:
    """Named, with what to do."""
    done = run(
        "import os, sys; os.environ['JAX_PLATFORMS'] = 'abacus'\n"
        "from serving.cli import main\n"
        "sys.exit(main(['generate', 'x']))\n"
    )
    assert done.returncode == 2
    assert done.stderr.startswith("glm53: jax has no device with JAX_PLATFORMS=abacus (Unable")
    assert "set JAX_PLATFORMS=cpu" in done.stderr
    assert done.stderr.count("\n") == 1


def test_platform_whose_plugin_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Where jax fails in an assertion without a message."""

    def devices(*_: Any) -> None:
        raise AssertionError

    monkeypatch.setattr("jax.devices", devices)
    for arguments in (["generate", "x"], ["convert", "tiny", str(tmp_path / "out")]):
        assert main(arguments) == 2
        captured = capsys.readouterr()
        assert captured.err.startswith("glm53: jax has no device with JAX_PLATFORMS=cpu: set JAX")
    assert not list(tmp_path.iterdir())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_in_a_callback(number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal whose exception Python only prints, and which the command survives."""
    monkeypatch.setattr(process, "_RAISED_AGAIN_SECONDS", 0.05)
    before = signal.getsignal(number)

    def callback(*_: Any) -> None:
        gc.callbacks.remove(callback)
        signal.raise_signal(number)

    with pytest.raises(KeyboardInterrupt), process.raising_signals([number]):
        gc.callbacks.append(callback)
        gc.collect()
        time.sleep(60)
    assert signal.getsignal(number) is before


def test_signal_while_another_is_dealt_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clean-up after a signal that is cut short by the same one."""
    monkeypatch.setattr(process, "_RAISED_AGAIN_SECONDS", 0.01)
    cleaned = []
    with pytest.raises(KeyboardInterrupt), process.raising_signals([signal.SIGINT]):
        try:
            signal.raise_signal(signal.SIGINT)
        finally:
            time.sleep(0.1)
            cleaned.append(True)
    assert cleaned
