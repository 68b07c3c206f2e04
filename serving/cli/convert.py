"""`glm53 convert`: write a checkpoint in the other format."""

import argparse

from glm53.checkpoint import convert_checkpoint
from serving.engine_options import model_path


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the subcommand."""
    parser = commands.add_parser(
        "convert", help="convert a checkpoint from safetensors to orbax, or from orbax back"
    )
    parser.add_argument("source", help="checkpoint directory of either format, or 'tiny'")
    parser.add_argument("destination", help="directory to make")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    done = convert_checkpoint(model_path(options.source), options.destination, use_tqdm=True)
    print(
        f"wrote {done.format} checkpoint {options.destination}: "
        f"{done.num_tensors:,} tensors, {done.num_bytes:,} bytes"
    )
    return 0
