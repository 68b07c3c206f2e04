"""The parser of the command line, which imports the module of the subcommand that is used."""

import argparse
import importlib
import importlib.metadata
import re
from collections.abc import Sequence, Set

from serving.options.other_names import ENGINE_NAMES, SAMPLING_NAMES

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
    commands = parser.add_subparsers(required=True, metavar="command", dest="command")
    parsers = {name: commands.add_parser(name, help=text) for name, text in _COMMANDS.items()}
    for name, command in parsers.items():
        if name in arguments:
            importlib.import_module(f"serving.cli.{name}").add_arguments(command)
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        parsers[options.command].error(_refusal(unknown, set(vars(options))))
    return options


def _refusal(unknown: Sequence[str], known: Set[str]) -> str:
    """The message for arguments that a subcommand does not take.

    Args:
        unknown: these arguments, among them values of unknown flags.
        known: names of the subcommand's arguments.
    """
    flags = [argument.partition("=")[0] for argument in unknown if argument.startswith("--")]
    for flag in flags:
        name = flag.removeprefix("--").replace("-", "_")
        hint = SAMPLING_NAMES.get(name) or ENGINE_NAMES.get(name)
        ours = re.findall(r"(?<=it is called )\w+|\w+_\w+|LLM|SamplingParams", hint or "")
        if hint and known >= set(ours):
            for one in ours:
                hint = re.sub(rf"\b{one}\b", f"--{one.replace('_', '-')}", hint)
            hint = re.sub(r"--([\w-]+)=False", r"--no-\1", hint)
            return f"unrecognized argument {flag}: {hint}"
    return f"unrecognized arguments: {' '.join(flags or unknown)}"
