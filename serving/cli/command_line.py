"""The parser of the command line, which imports the module of the subcommand that is used."""

import argparse
import importlib
import importlib.metadata
from collections.abc import Sequence

# Their modules import jax, which takes seconds.
_COMMANDS = {
    "generate": "continue a text, or answer a question",
    "batch": "answer a file of requests in the OpenAI API's batch format",
    "convert": "convert a checkpoint from safetensors to orbax, or from orbax back",
    "info": "show a model's sizes and what fits in memory, from its config alone",
}


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The subcommand's options, and as `run` the function that takes them.

    Raises:
        SystemExit: the arguments are refused, or ask for help or the version.
    """
    parser = argparse.ArgumentParser(prog="glm53", description="GLM-5.3 inference in JAX.")
    version = importlib.metadata.version("glm53")
    parser.add_argument("--version", action="version", version=f"glm53 {version}")
    commands = parser.add_subparsers(required=True, metavar="command")
    for name, text in _COMMANDS.items():
        command = commands.add_parser(name, help=text)
        if name in arguments:
            importlib.import_module(f"serving.cli.{name}").add_arguments(command)
    return parser.parse_args(arguments)
