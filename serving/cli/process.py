"""The process around a command: its streams, signals and logs, and what its failures come to."""

import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import BinaryIO

STANDARD = "-"
"""Name of a standard stream in place of a file."""

LOG_LEVEL_VARIABLE = "GLM53_LOG_LEVEL"

_OUT_OF_MEMORY = (
    "a model takes less with a lower --max-model-len, --max-num-seqs, --device-pages or "
    "--memory-fraction, or on more devices (--tensor-parallel-size)"
)
_PACKAGES = ("serving", "glm53", "kvcache", "pallas_kernels")
_INTERRUPTED, _TERMINATED, _NO_READER = (
    128 + number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE)
)

_RAISED_AGAIN_SECONDS = 1.0

logger = logging.getLogger(__name__)


class StartError(Exception):
    """A command could not load or start something that it needs; the message is for its user."""


class _Terminated(KeyboardInterrupt):
    """SIGTERM, which ends a command in the same way as SIGINT."""


def exit_code_of(run: Callable[[], int]) -> int:
    """Runs a command as a process that ends with a line, not with a traceback.

    What is expected to go wrong gets one line on standard error: input that is refused, files,
    memory, a start that fails. Its traceback is logged at level DEBUG. Any other exception is a
    fault of the program, and shows its traceback.

    Args:
        run: the command; its value is the exit code.

    Returns:
        That, or the code of what ended it; see `serving.cli.main`.
    """
    _occupy_standard_streams()
    try:
        with _logs(), _flushed_standard_output():
            return run()
    except _Terminated:
        return _end(_TERMINATED, "terminated")
    except KeyboardInterrupt:
        return _end(_INTERRUPTED, "interrupted")
    except BrokenPipeError:
        return _NO_READER
    except Exception as error:
        return _end(2, _message(error) or f"failed unexpectedly: {type(error).__name__}: {error}")


@contextlib.contextmanager
def raising_signals(numbers: Sequence[signal.Signals]) -> Iterator[None]:
    """Has signals raise what `exit_code_of` knows, so that what is written is whole.

    Python only prints an exception that a handler raises in a callback, such as jax's of the
    garbage collector. So it is raised again every second until it is being dealt with.

    Args:
        numbers: SIGINT, SIGTERM or both.
    """
    received: list[int] = []

    def interrupt(number: int, _: object) -> None:
        received.append(number)
        raise_last()

    def raise_last() -> None:
        signal.setitimer(signal.ITIMER_REAL, _RAISED_AGAIN_SECONDS)
        raise _Terminated if received[-1] == signal.SIGTERM else KeyboardInterrupt

    def remind(*_: object) -> None:
        if _is_ending(sys.exception()):
            signal.setitimer(signal.ITIMER_REAL, _RAISED_AGAIN_SECONDS)
        else:
            raise_last()

    before = {number: signal.getsignal(number) for number in (*numbers, signal.SIGALRM)}
    signal.signal(signal.SIGALRM, remind)
    for number in numbers:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def starting(what: str) -> Iterator[None]:
    """Makes any exception but those that name their own cause a StartError.

    Args:
        what: what is started, for the message.
    """
    try:
        yield
    except Exception as error:
        if _message(error) is not None:
            raise
        raise StartError(
            f"{what} failed: {type(error).__name__}: {_first_line(error)} "
            f"({LOG_LEVEL_VARIABLE}=debug shows where)"
        ) from error


@contextlib.contextmanager
def naming(file: str) -> Iterator[None]:
    """Has any OSError of the system name the file that it is about; its kind stays.

    Args:
        file: its role and name, as the user knows it.
    """
    try:
        yield
    except OSError as error:
        if error.strerror is None:
            raise
        raise OSError(error.errno, f"{file}: {error.strerror}") from error


def print_output(text: str = "", end: str = "\n") -> None:
    """Prints on standard output at once.

    Raises:
        OSError: it could not be written; names standard output.
    """
    with naming("standard output"):
        print(text, end=end, flush=True)


def check_standard_output() -> None:
    """Checks that there is a standard output.

    Raises:
        OSError: it is closed.
    """
    if sys.stdout is None:
        raise OSError("standard output is closed")


def colours_wanted() -> bool:
    """Whether text on a terminal may be coloured or dimmed: see https://no-color.org."""
    return not os.environ.get("NO_COLOR")


def open_standard_input() -> BinaryIO:
    """Opens standard input for bytes.

    Raises:
        OSError: it is closed.
    """
    if sys.stdin is None:
        raise OSError("standard input is closed")
    return open(sys.stdin.fileno(), "rb", closefd=False)


def _is_ending(error: BaseException | None) -> bool:
    """Whether an exception that is being handled comes from a signal."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return error is not None


def _message(error: Exception) -> str | None:
    """The line for a user, None for an unexpected exception."""
    if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):
        return f"out of memory ({_first_line(error)}): {_OUT_OF_MEMORY}"
    if isinstance(error, ImportError):
        return f"{error}: install glm53 again, with its dependencies"
    if isinstance(error, OSError) and error.strerror is not None:
        return error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
    if isinstance(error, StartError | ValueError | OSError | NotImplementedError):
        return str(error)
    return None


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0]


def _end(code: int, message: str) -> int:
    print(f"glm53: {message}", file=sys.stderr, flush=True)
    return code


@contextlib.contextmanager
def _flushed_standard_output() -> Iterator[None]:
    """Flushes what is printed, and gives up what cannot be: Python would try again as it ends."""
    try:
        try:
            yield
        finally:
            if sys.stdout is not None:
                with naming("standard output"):
                    sys.stdout.flush()
    except OSError:
        _discard_standard_output()
        raise


@contextlib.contextmanager
def _logs() -> Iterator[None]:
    """Shows what the packages log, from level INFO on if the user has not said another.

    Also logs the traceback of an exception that ends the command: at level DEBUG where its message
    tells a user the cause, and at level ERROR elsewhere.

    Raises:
        ValueError: there is no such level.
    """
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    level = os.environ.get(LOG_LEVEL_VARIABLE, "info").upper()
    if level not in logging.getLevelNamesMapping():
        raise ValueError(f"{LOG_LEVEL_VARIABLE} must be debug, info, warning or error, got {level}")
    loggers = [logging.getLogger(name) for name in _PACKAGES]
    before = [package.level for package in loggers]
    for package in loggers:
        package.setLevel(level)
    try:
        yield
    except Exception as error:
        expected = _message(error) is not None
        logger.log(logging.DEBUG if expected else logging.ERROR, "traceback:", exc_info=True)
        raise
    finally:
        for package, old in zip(loggers, before, strict=True):
            package.setLevel(old)


def _occupy_standard_streams() -> None:
    """Opens the null device where a standard stream is closed.

    Otherwise the next file that is opened, an output say, would take its number, and what libraries
    print there would be written into it.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(number)
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115 - as long as the process


def _discard_standard_output() -> None:
    """Sends what standard output does not take to the null device."""
    if sys.stdout is None:
        return
    try:
        sys.stdout.flush()
    except OSError:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
