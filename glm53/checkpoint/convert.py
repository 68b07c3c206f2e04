"""Converts checkpoints between Hugging Face safetensors and orbax directories, bit for bit."""

import dataclasses
import json
import os
import shutil
from pathlib import Path
from typing import Any, Literal

import jax
from jax.sharding import Mesh

from glm53.checkpoint.inventory import tensor_inventory
from glm53.checkpoint.new_directory import new_directory
from glm53.checkpoint.orbax import CONFIG_FILE, check_same_model, write_orbax
from glm53.checkpoint.safetensors_writer import write_safetensors
from glm53.checkpoint.source import load_checkpoint, read_config
from glm53.jax_settings import own_jax_settings
from glm53.model.config import FP8_QUANTIZATION, MODEL_TYPE, GLMConfig
from glm53.model.sharding import find_devices
from kvcache.device.store import MESH_AXIS

_HF_CONFIG = "config.json"
_COPIED = (
    _HF_CONFIG,
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)


@dataclasses.dataclass(frozen=True)
class Conversion:
    """Result of a conversion.

    Attributes:
        format: of the destination.
        num_tensors: tensors of the checkpoint, as a Hugging Face directory counts them.
        num_bytes: bytes of their values, without compression.
    """

    format: Literal["orbax", "safetensors"]
    num_tensors: int
    num_bytes: int


@own_jax_settings()
def convert_checkpoint(
    source: str | Path, destination: str | Path, *, use_tqdm: bool = False
) -> Conversion:
    """Writes a checkpoint in the other format: safetensors as orbax, orbax as safetensors.

    Every value keeps its bits. The tokenizer, chat template, generation config and Hugging Face
    `config.json` go along; for an orbax source without one, `config.json` is written from its
    config. The work is done in the memory of the host, which holds the parameters and, while orbax
    reads or writes, a copy of their largest stack.
    The destination appears when it is complete and on the disk, and not otherwise.

    Args:
        source: a checkpoint directory of either format.
        destination: the directory to make.
        use_tqdm: show progress, if standard error is a terminal.

    Raises:
        FileExistsError: the destination exists.
        FileNotFoundError: the source is not there, or lacks its config or its weights.
        CheckpointError: the source is damaged, or of another model than its config; all problems
            are named.
        ValueError: the destination lies in the source; a config is refused; an orbax source holds
            float32 values that the bfloat16 of its `weight_dtype` does not have.
    """
    source, destination = Path(source), Path(os.path.abspath(destination))
    _check_places(source, destination)
    config = read_config(source)
    from_orbax = (source / CONFIG_FILE).is_file()
    if from_orbax and (source / _HF_CONFIG).is_file():
        check_same_model(source, GLMConfig.from_pretrained(source), config)
    specs = tensor_inventory(config)
    with new_directory(destination) as directory:
        params = load_checkpoint(source, config, _host_mesh(), use_tqdm=use_tqdm)
        for name in _COPIED:
            if (source / name).is_file():
                shutil.copyfile(source / name, directory / name)
        if from_orbax:
            write_safetensors(directory, config, params, use_tqdm=use_tqdm)
            if not (directory / _HF_CONFIG).exists():
                _write_hf_config(directory / _HF_CONFIG, config)
        else:
            write_orbax(directory, config, params)
    num_bytes = sum(spec.num_bytes for spec in specs)
    return Conversion("safetensors" if from_orbax else "orbax", len(specs), num_bytes)


def hugging_face_config(config: GLMConfig) -> dict[str, Any]:
    """The fields of a `config.json` from which `GLMConfig.from_hf` makes the same config.

    How the model is computed (`compute_dtype`, `latent_norm_eps`, `activation_quantization`) has no
    field there and is left out.
    """
    fields = dataclasses.asdict(config)
    for name in ("compute_dtype", "latent_norm_eps", "activation_quantization"):
        del fields[name]
    fields |= {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": MODEL_TYPE,
        "dtype": fields.pop("weight_dtype"),
        "eos_token_id": list(fields.pop("eos_token_ids")),
        "num_key_value_heads": config.num_attention_heads,
        "rope_parameters": {"rope_theta": fields.pop("rope_theta"), "rope_type": "default"},
    }
    if fields.pop("fp8_weights"):
        fields["quantization_config"] = FP8_QUANTIZATION
    return fields


def _write_hf_config(file: Path, config: GLMConfig) -> None:
    text = json.dumps(hugging_face_config(config), indent=2, sort_keys=True)
    file.write_text(text + "\n", encoding="utf-8")


def _check_places(source: Path, destination: Path) -> None:
    if not source.is_dir():
        raise FileNotFoundError(f"no checkpoint directory {source}")
    if destination.resolve().is_relative_to(source.resolve()):
        raise ValueError(f"destination {destination} lies in the source {source}")
    if os.path.lexists(destination):
        raise FileExistsError(f"{destination} exists; choose a new directory")


def _host_mesh() -> Mesh:
    """The CPU alone: weights need not fit in an accelerator to be converted."""
    return jax.make_mesh(
        (1,), (MESH_AXIS,), (jax.sharding.AxisType.Auto,), devices=find_devices("cpu")[:1]
    )
