"""Arguments that several subcommands share."""

import argparse
import dataclasses
import inspect
import re
import typing
from typing import Any, Literal

from serving.cli.process import starting
from serving.llm import LLM
from serving.options.engine_options import EngineOptions
from serving.options.other_names import FORMAT_NAMES


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Adds an argument for each field of `EngineOptions`, with its documentation as help."""
    kinds, texts = typing.get_type_hints(EngineOptions), _documentation(EngineOptions)
    for field in dataclasses.fields(EngineOptions):
        # A derived default is documented as what None is. With -OO there is no documentation.
        text, _, derived = texts.get(field.name, "").partition("; None is ")
        default = derived if field.default is None else "%(default)s"
        parser.add_argument(
            f"--{field.name.replace('_', '-')}",
            default=field.default,
            help=f"{text.replace('%', '%%')} (default: {default})" if text else None,
            **_parsing(kinds[field.name]),
        )


def _documentation(options: type) -> dict[str, str]:
    """Text of each attribute in a class's docstring, without the full stop."""
    _, _, rest = inspect.cleandoc(options.__doc__ or "").partition("\nAttributes:\n")
    section, _, _ = rest.partition("\n\n")
    entries = re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", section, re.MULTILINE)
    return {name: " ".join(text.split()).removesuffix(".") for name, text in entries}


def load_model(options: argparse.Namespace) -> LLM:
    """The model that the arguments of `add_engine_options` ask for.

    Raises:
        StartError: it could not be loaded, for a cause without a message for users.
        ValueError, OSError, NotImplementedError, MemoryError, ImportError: it could not be loaded;
            the message says why.
    """
    fields = [field.name for field in dataclasses.fields(EngineOptions)]
    with starting(f"loading {options.model}"):
        return LLM(**{name: getattr(options, name) for name in fields})


def _format_name(text: str) -> str:
    """A format of numbers, or an error with its name here."""
    if text in FORMAT_NAMES:
        raise argparse.ArgumentTypeError(f"invalid choice: {text!r}: {FORMAT_NAMES[text]}")
    return text


def _parsing(kind: Any) -> dict[str, Any]:
    """Function with which argparse reads a value of a field's type."""
    if typing.get_origin(kind) is Literal:
        choices = typing.get_args(kind)
        return {"choices": choices} | ({"type": _format_name} if "float32" in choices else {})
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    kinds = typing.get_args(kind) or (kind,)
    for number in (float, int):
        if number in kinds:
            return {"type": number}
    return {}
