"""The `glm53` command: one module a subcommand."""

import os
import signal
import sys


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line.

    Until everything is imported, SIGINT ends the process at once: an exception could be raised in a
    callback of the imports, where Python would only print it.

    Args:
        arguments: what follows the command's name; None is the process's own.

    Returns:
        The exit code: 0, 1 where the command says so, 2 where it could not be run to its end, 130
        after SIGINT, 143 after SIGTERM, 141 where the reader of standard output has gone.
    """
    given = sys.argv[1:] if arguments is None else arguments
    before = signal.getsignal(signal.SIGINT)
    # A process in the background is to go on ignoring it.
    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _exit)
    try:
        # Here, as a module that is imported with this one would be imported without a handler.
        from serving.cli.command_line import parse
        from serving.cli.process import exit_code_of

        def run() -> int:
            options = parse(given)
            signal.signal(signal.SIGINT, before)
            return options.run(options)

        return exit_code_of(run)
    finally:
        signal.signal(signal.SIGINT, before)


def _exit(*_: object) -> None:
    os.write(2, b"glm53: interrupted\n")
    os._exit(130)
