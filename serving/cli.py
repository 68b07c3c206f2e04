"""The `glm53` command."""

import argparse
import logging
import sys
from collections.abc import Sequence

from serving.llm import BUILT_IN_MODEL, LLM
from serving.sampling_params import SamplingParams


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code: 0, or 2 where the input is refused."""
    parser = _parser()
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        return options.run(options)
    except (ValueError, OSError) as error:
        print(f"glm53: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="glm53", description="GLM-5.3 inference in JAX.")
    commands = parser.add_subparsers(required=True, metavar="command")
    generate = commands.add_parser("generate", help="continue a text and print the continuation")
    generate.add_argument("text", help="the prompt")
    generate.add_argument(
        "--model", default=BUILT_IN_MODEL, help="checkpoint directory, or the built-in 'tiny'"
    )
    generate.add_argument("--max-tokens", type=int, default=64, help="most tokens to generate")
    generate.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16"))
    generate.add_argument(
        "--kv-cache-dtype", default="auto", choices=("auto", "float32", "bfloat16", "fp8")
    )
    generate.add_argument("--max-model-len", type=int, help="longest prompt and output, in tokens")
    generate.set_defaults(run=_generate)
    return parser


def _generate(options: argparse.Namespace) -> int:
    params = SamplingParams(max_tokens=options.max_tokens)
    llm = LLM(
        options.model,
        dtype=options.dtype,
        kv_cache_dtype=options.kv_cache_dtype,
        max_model_len=options.max_model_len,
    )
    (output,) = llm.generate(options.text, params)
    print(output.outputs[0].text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
