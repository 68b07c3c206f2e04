"""`glm53 batch`: answer a file of requests."""

import argparse
import contextlib
import logging
import os
import stat
import sys
import time
from pathlib import Path
from typing import BinaryIO

from tqdm import tqdm

from glm53.terminal import terminal_columns
from serving.batch import BatchCounts, count_requests, run_batch
from serving.cli.options import add_engine_options, load_model
from serving.cli.process import STANDARD, check_standard_output, naming, open_standard_input
from serving.options.engine_options import model_path

logger = logging.getLogger(__name__)

_SECONDS_BETWEEN_LOGS = 10.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the subcommand's arguments."""
    parser.description = (
        "Answers a file of requests in the OpenAI API's batch format: each line of the input gets "
        "a row of the output, with a response or an error. Exit code: 0 if every row has a "
        "response, 1 if some have an error, 2 if the batch could not be run to its end."
    )
    parser.add_argument("input", help="requests, as JSON lines; - is standard input")
    parser.add_argument(
        "output", help="file for the rows, which is overwritten; - is standard output"
    )
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
        total = count_requests(source) if _is_file(source) else None
        start = time.monotonic()
        llm = load_model(options)
        logger.info("loaded %s in %.1f s", options.model, time.monotonic() - start)
        target = stack.enter_context(_open_target(options.output))
        progress = stack.enter_context(_Progress(total))
        counts = run_batch(llm, source, target, _served_names(options.model), progress.update)
    return 1 if counts.failed else 0


class _Progress(contextlib.AbstractContextManager):
    """Rows so far, as a bar on a terminal and as log lines elsewhere, and a line however they end.

    Args:
        total: rows that there will be; None if that is not known.
    """

    def __init__(self, total: int | None) -> None:
        self._total = total
        self._counts = BatchCounts()
        self._start = self._logged = time.monotonic()
        self._with_bar = terminal_columns() > 0
        self._bar = tqdm(
            desc="Processed rows", unit=" rows", total=total, disable=not self._with_bar
        )

    def update(self, counts: BatchCounts) -> None:
        """Shows another row."""
        self._counts = counts
        self._bar.update()
        now = time.monotonic()
        if not self._with_bar and now - self._logged >= _SECONDS_BETWEEN_LOGS:
            self._logged = now
            logger.info("%s", self._summary())

    def __exit__(self, *_: object) -> None:
        self._bar.close()
        print(f"glm53: {self._summary()}", file=sys.stderr)

    def _summary(self) -> str:
        counts, seconds = self._counts, time.monotonic() - self._start
        done = f"{counts.succeeded + counts.failed:,}"
        if self._total is not None:
            done += f" of {self._total:,}"
        return (
            f"{done} rows, {counts.failed:,} with an error; {counts.prompt_tokens:,} tokens in, "
            f"{counts.output_tokens:,} out; {seconds:.1f} s, "
            f"{counts.output_tokens / max(seconds, 1e-9):,.1f} tokens/s out"
        )


def _served_names(model: str) -> list[str]:
    """Names that requests may call the model: the value of `--model`, and its last part."""
    return list(dict.fromkeys(name for name in (model, Path(model).name) if name))


def _open_source(name: str) -> BinaryIO:
    """Opens the input.

    Raises:
        OSError: it is not there, or cannot be read.
    """
    if name == STANDARD:
        return open_standard_input()
    with naming(f"input {name!r}"):
        return open(name, "rb")


def _is_file(source: BinaryIO) -> bool:
    """Whether the input can be read twice."""
    return stat.S_ISREG(os.fstat(source.fileno()).st_mode)


def _open_target(name: str) -> BinaryIO:
    """Opens the output, unbuffered; a file is emptied.

    Standard output is opened beside `sys.stdout`, whose own buffer, empty then, Python flushes at
    the end: a reader that has gone is an error here, and only here.

    Raises:
        OSError: it cannot be written.
    """
    if name != STANDARD:
        with naming(f"output {name!r}"):
            return open(name, "wb", buffering=0)
    return open(sys.stdout.fileno(), "wb", buffering=0, closefd=False)


def _check_target(source: BinaryIO, name: str) -> None:
    """Refuses an output that is the input, or that could not be opened, before work starts.

    Raises:
        ValueError: it is the input, by whatever name.
        OSError: it cannot be written.
    """
    if name == STANDARD:
        check_standard_output()
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
