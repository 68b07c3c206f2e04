"""Golden checkpoints, with what independent implementations recorded of them."""

import functools
from pathlib import Path

import numpy as np
from flax import nnx

from glm53.checkpoint import load_hugging_face
from glm53.model.config import GLMConfig
from glm53.model.sharding import make_mesh

GOLDEN = Path(__file__).parents[1] / "data" / "golden"


@functools.cache
def golden_config(kit: str) -> GLMConfig:
    return GLMConfig.from_pretrained(GOLDEN / kit).replace(compute_dtype="float32")


@functools.cache
def golden_params(kit: str, num_devices: int) -> nnx.State:
    return load_hugging_face(GOLDEN / kit, golden_config(kit), make_mesh(num_devices))


@functools.cache
def golden_arrays(kit: str) -> dict[str, np.ndarray]:
    with np.load(GOLDEN / kit / "golden.npz") as arrays:
        return dict(arrays)
