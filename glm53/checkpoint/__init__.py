"""Checkpoints on disk: Hugging Face safetensors directories and sharded orbax directories."""

from glm53.checkpoint.convert import Conversion, convert_checkpoint
from glm53.checkpoint.errors import CheckpointError
from glm53.checkpoint.hugging_face import load_hugging_face
from glm53.checkpoint.inventory import TensorSpec, tensor_inventory
from glm53.checkpoint.orbax import load_orbax, save_orbax
from glm53.checkpoint.source import load_checkpoint

__all__ = [
    "CheckpointError",
    "Conversion",
    "TensorSpec",
    "convert_checkpoint",
    "load_checkpoint",
    "load_hugging_face",
    "load_orbax",
    "save_orbax",
    "tensor_inventory",
]
