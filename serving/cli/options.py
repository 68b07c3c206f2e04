"""Arguments that several subcommands share."""

import argparse
import dataclasses
import typing
from typing import Any, Literal

from serving.engine_options import EngineOptions

_HELP = {
    "model": "checkpoint directory, or the built-in 'tiny'",
    "dtype": "of activations and unquantised weights",
    "kv_cache_dtype": "of cached rows",
    "max_model_len": "longest prompt and output, in tokens",
    "latent_norm_eps": "epsilon of the latent norms",
    "activation_quantization": "of what FP8 weights multiply",
    "tensor_parallel_size": "devices to shard over",
    "max_num_seqs": "most sequences that decode together",
    "max_num_batched_tokens": "most prompt tokens of a step",
    "enable_prefix_caching": "continue from what other requests have computed",
    "device_pages": "pages of the store on the devices; all that fits by default",
    "host_memory_gib": "host memory for pages that the devices have no room for",
    "kv_policy": "what may leave the devices",
    "hot_rows": "rows of pages in host memory that a sequence keeps on each device",
    "memory_fraction": "share of each device's memory for weights and store",
}


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Adds an argument for each field of `EngineOptions`."""
    kinds = typing.get_type_hints(EngineOptions)
    for field in dataclasses.fields(EngineOptions):
        parser.add_argument(
            f"--{field.name.replace('_', '-')}",
            default=field.default,
            help=_HELP[field.name],
            **_parsing(kinds[field.name]),
        )


def engine_options(options: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments for `LLM`."""
    return {field.name: getattr(options, field.name) for field in dataclasses.fields(EngineOptions)}


def _parsing(kind: Any) -> dict[str, Any]:
    """How argparse is to read a value of a field's type."""
    if typing.get_origin(kind) is Literal:
        return {"choices": typing.get_args(kind)}
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    kinds = typing.get_args(kind) or (kind,)
    for number in (float, int):
        if number in kinds:
            return {"type": number}
    return {}
