"""The `glm53` command: one module a subcommand."""

import argparse
import logging
import sys
from collections.abc import Sequence

from serving.cli import generate


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code: 0, or 2 where the input is refused."""
    parser = argparse.ArgumentParser(prog="glm53", description="GLM-5.3 inference in JAX.")
    commands = parser.add_subparsers(required=True, metavar="command")
    for module in (generate,):
        module.add_command(commands)
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        return options.run(options)
    except (ValueError, OSError) as error:
        print(f"glm53: {error}", file=sys.stderr)
        return 2
