"""The `glm53` command: one module a subcommand."""

import os
import signal
import sys


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line.

    Until everything is imported, SIGINT and SIGTERM end the process at once: an exception could be
    raised in a callback of the imports, where Python would only print it.

    Args:
        arguments: what follows the command's name; None is the process's own.

    Returns:
        The exit code: 0, 1 where the command says so, 2 where it could not be run to its end, 130
        after SIGINT, 143 after SIGTERM, 141 where the reader of standard output has gone.
    """
    given = sys.argv[1:] if arguments is None else arguments
    before = {number: signal.getsignal(number) for number in _LAST_WORDS}
    # A process in the background is to go on ignoring them.
    heeded = [number for number in before if before[number] is not signal.SIG_IGN]
    for number in heeded:
        signal.signal(number, _exit)
    try:
        # Here, as a module that is imported with this one would be imported without a handler.
        from serving.cli.command_line import parse
        from serving.cli.process import exit_code_of, raising_signals

        def run() -> int:
            options = parse(given)
            with raising_signals(heeded):
                return options.run(options)

        return exit_code_of(run)
    finally:
        for number in heeded:
            signal.signal(number, before[number])


_LAST_WORDS = {signal.SIGINT: b"interrupted", signal.SIGTERM: b"terminated"}


def _exit(number: int, _: object) -> None:
    os.write(2, b"glm53: " + _LAST_WORDS[signal.Signals(number)] + b"\n")
    os._exit(128 + number)
