"""Arguments that several subcommands share."""

import argparse
import dataclasses
import typing
from typing import Any, Literal

from serving.cli.process import starting
from serving.llm import LLM
from serving.options.engine_options import EngineOptions
from serving.options.other_names import FORMAT_NAMES

_HELP = {
    "model": "checkpoint directory, or the built-in 'tiny'",
    "dtype": "dtype of activations and unquantised weights; auto is the checkpoint's, and float32 "
    "on a CPU",
    "kv_cache_dtype": "dtype of cached rows; auto is --dtype",
    "max_model_len": "maximum length of prompt and output together, in tokens",
    "latent_norm_eps": "epsilon of the latent norms",
    "activation_quantization": "quantisation of the activations that FP8 weights multiply; auto is "
    "fp8_1x128 for FP8 weights on a GPU, else none",
    "tensor_parallel_size": "number of devices to shard over",
    "max_num_seqs": "maximum number of sequences decoded together",
    "max_num_batched_tokens": "maximum prompt tokens per step",
    "enable_prefix_caching": "reuse cached rows where a prompt begins like an earlier one",
    "device_pages": "number of pages of the KV store on the devices",
    "host_memory_gib": "host memory for pages that do not fit on the devices, in GiB",
    "kv_policy": "hybrid also reads pages in host memory, swap moves whole sequences there, "
    "resident keeps all pages on the devices",
    "row_cache_rows": "rows of a sequence's pages in host memory that each device caches",
    "memory_fraction": "fraction of each device's memory for weights and KV store",
}
_DERIVED = {
    "max_model_len": "the model's limit",
    "latent_norm_eps": "the model's rms_norm_eps",
    "max_num_batched_tokens": "8192, on a CPU 512",
    "device_pages": "all that fit",
    "host_memory_gib": "half of what is free, on a CPU 1",
    "row_cache_rows": "four selections, as far as there is room",
}
"""Defaults of the fields that are None."""


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Adds an argument for each field of `EngineOptions`."""
    kinds = typing.get_type_hints(EngineOptions)
    for field in dataclasses.fields(EngineOptions):
        default = _DERIVED[field.name] if field.default is None else "%(default)s"
        parser.add_argument(
            f"--{field.name.replace('_', '-')}",
            default=field.default,
            help=f"{_HELP[field.name]} (default: {default})",
            **_parsing(kinds[field.name]),
        )


def load_model(options: argparse.Namespace) -> LLM:
    """The model that the arguments of `add_engine_options` ask for.

    Raises:
        StartError: it could not be loaded, and the cause is none that names itself.
        ValueError, OSError, NotImplementedError, MemoryError, ImportError: likewise, and it does.
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
