"""`glm53 convert`: write a checkpoint in the other format."""

import argparse

from glm53.checkpoint import convert_checkpoint
from serving.cli.process import print_output, starting
from serving.options.engine_options import model_path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the subcommand's arguments."""
    parser.description = (
        "Writes a checkpoint in the other format: safetensors as orbax, or orbax as safetensors. "
        "Every value keeps its bits; the config, the tokenizer and the chat template go along."
    )
    parser.add_argument("source", help="checkpoint directory of either format, or 'tiny'")
    parser.add_argument("destination", help="directory to make, which must not exist")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    with starting("converting"):
        done = convert_checkpoint(model_path(options.source), options.destination, use_tqdm=True)
    print_output(
        f"wrote {done.format} checkpoint {options.destination}: "
        f"{done.num_tensors:,} tensors, {done.num_bytes:,} bytes"
    )
    return 0
