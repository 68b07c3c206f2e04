"""The `glm53` command: one module a subcommand."""

import argparse
import logging
import sys
from collections.abc import Sequence

from serving.cli import batch, convert, generate, info


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code: 0, 2 where the input is refused, or what
    the command gives; 130 after an interruption."""
    parser = argparse.ArgumentParser(prog="glm53", description="GLM-5.3 inference in JAX.")
    commands = parser.add_subparsers(required=True, metavar="command")
    for module in (generate, batch, convert, info):
        module.add_command(commands)
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        return options.run(options)
    except (ValueError, OSError) as error:
        print(f"glm53: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("glm53: interrupted", file=sys.stderr)
        return 130
