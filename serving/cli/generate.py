"""`glm53 generate`: continue one text."""

import argparse

from serving.cli.options import add_engine_options, engine_options
from serving.llm import LLM
from serving.sampling_params import SamplingParams

_SAMPLING = ("temperature", "top_p", "seed", "max_tokens")


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the subcommand."""
    parser = commands.add_parser("generate", help="continue a text and print the continuation")
    parser.add_argument("text", help="the prompt")
    parser.add_argument("--max-tokens", type=int, default=64, help="most tokens to generate")
    parser.add_argument("--temperature", type=float, help="0 is greedy; the model's by default")
    parser.add_argument("--top-p", type=float, help="the model's by default")
    parser.add_argument("--seed", type=int, help="makes the output repeatable")
    add_engine_options(parser)
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    params = SamplingParams(**{name: getattr(options, name) for name in _SAMPLING})
    llm = LLM(**engine_options(options))
    shown = 0
    for _, output in llm.generate_iter(options.text, params, stream=True):
        text = output.outputs[0].text
        print(text[shown:], end="\n" if output.finished else "", flush=True)
        shown = len(text)
    return 0
