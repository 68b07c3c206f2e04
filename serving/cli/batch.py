"""`glm53 batch`: answer a file of requests."""

import argparse
import contextlib
import logging
import os
import stat
import sys
from pathlib import Path
from typing import BinaryIO

from tqdm import tqdm

from serving.batch import run_batch
from serving.cli.options import add_engine_options, engine_options
from serving.engine_options import model_path
from serving.llm import LLM

logger = logging.getLogger(__name__)

_STANDARD = "-"


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the subcommand."""
    parser = commands.add_parser(
        "batch",
        help="answer a file of requests in the OpenAI API's batch format",
        description="Exit code: 0 if every row has a response, 1 if some have an error, 2 if the "
        "batch could not be run to its end.",
    )
    parser.add_argument("input", help="JSON lines with requests; - is standard input")
    parser.add_argument("output", help="where a row for each goes; - is standard output")
    add_engine_options(parser)
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    with contextlib.ExitStack() as stack:
        source = stack.enter_context(_open_source(options.input))
        _check_target(source, options.output)
        if not (model_path(options.model) / "tokenizer.json").is_file():
            raise ValueError(
                f"--model {options.model}: batch needs text, and there is no tokenizer.json"
            )
        llm = LLM(**engine_options(options))
        target = stack.enter_context(_open_target(options.output))
        hidden = not sys.stderr.isatty()
        bar = stack.enter_context(tqdm(desc="Processed rows", unit=" rows", disable=hidden))
        try:
            counts = run_batch(llm, source, target, _served_names(options.model), bar.update)
        except (ValueError, OSError):
            raise
        except Exception:
            logger.exception("the engine failed; the rows written so far are whole")
            return 2
    return 1 if counts.failed else 0


def _served_names(model: str) -> list[str]:
    """What requests may call the model: the value of `--model`, and its last part."""
    return list(dict.fromkeys(name for name in (model, Path(model).name) if name))


def _open_source(name: str) -> BinaryIO:
    """Opens the input.

    Raises:
        OSError: it is not there, or cannot be read.
    """
    if name != _STANDARD:
        return open(name, "rb")
    if sys.stdin is None:
        raise OSError("standard input is closed")
    return open(sys.stdin.fileno(), "rb", closefd=False)


def _open_target(name: str) -> BinaryIO:
    """Opens the output; a file is emptied.

    Standard output is opened beside `sys.stdout`, whose own buffer, empty then, Python flushes at
    the end: a reader that has gone is an error here, and only here.

    Raises:
        OSError: it cannot be written.
    """
    if name != _STANDARD:
        return open(name, "wb")
    return open(sys.stdout.fileno(), "wb", closefd=False)


def _check_target(source: BinaryIO, name: str) -> None:
    """Refuses an output that is the input, or that could not be opened, before work starts.

    Raises:
        ValueError: it is the input, by whatever name.
        OSError: it cannot be written.
    """
    if name == _STANDARD:
        if sys.stdout is None:
            raise OSError("standard output is closed")
        found = os.fstat(sys.stdout.fileno())
    elif os.path.exists(name):
        found = os.stat(name)
        if stat.S_ISDIR(found.st_mode):
            raise IsADirectoryError(f"output {name!r} is a directory")
        if not os.access(name, os.W_OK):
            raise PermissionError(f"output {name!r} cannot be written")
    else:
        folder = Path(name).parent
        if not folder.is_dir():
            raise FileNotFoundError(f"output {name!r}: there is no directory {str(folder)!r}")
        if not os.access(folder, os.W_OK):
            raise PermissionError(f"output {name!r}: no file can be made in {str(folder)!r}")
        return
    # Terminals and /dev/null may be both.
    if stat.S_ISREG(found.st_mode) and os.path.samestat(os.fstat(source.fileno()), found):
        raise ValueError(f"output {name!r} is the input: give another file")
