"""Arguments that several subcommands share."""

import argparse
from typing import Any

from serving.engine_options import BUILT_IN_MODEL

_ENGINE_OPTIONS = (
    "dtype",
    "kv_cache_dtype",
    "max_model_len",
    "max_num_seqs",
    "tensor_parallel_size",
)


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Adds `--model`, and the arguments that `engine_options` reads."""
    parser.add_argument(
        "--model", default=BUILT_IN_MODEL, help="checkpoint directory, or the built-in 'tiny'"
    )
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16"))
    parser.add_argument(
        "--kv-cache-dtype", default="auto", choices=("auto", "float32", "bfloat16", "fp8")
    )
    parser.add_argument("--max-model-len", type=int, help="longest prompt and output, in tokens")
    parser.add_argument(
        "--max-num-seqs", type=int, default=256, help="most sequences that decode together"
    )
    parser.add_argument("--tensor-parallel-size", type=int, default=1, help="devices to shard over")


def engine_options(options: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments for `LLM`."""
    return {name: getattr(options, name) for name in _ENGINE_OPTIONS}
