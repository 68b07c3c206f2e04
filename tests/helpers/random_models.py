"""Small models of random parameters, and random tokens for them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from glm53.model.config import GLMConfig
from glm53.model.params import abstract_model
from glm53.model.presets import preset
from glm53.model.sharding import make_mesh, parameter_shardings


@functools.cache
def micro_config() -> GLMConfig:
    """Two index groups of two layers, which are scanned, and ten selected positions."""
    return preset("test-small").replace(
        compute_dtype="float32",
        num_hidden_layers=4,
        indexer_types=("full", "shared") * 2,
        mlp_layer_types=("dense", "sparse") * 2,
        num_nextn_predict_layers=0,
        n_routed_experts=4,
        index_topk=10,
    )


@functools.cache
def preset_params(config: GLMConfig, num_devices: int) -> nnx.State:
    """Random parameters of a sensible size, the same on every mesh.

    Norm weights are near 1, matrices have variance 1 / inputs, FP8 scales undo the width of e4m3.
    """
    _, abstract = abstract_model(config)
    leaves, structure = jax.tree.flatten_with_path(abstract)
    drawn = [
        _draw(np.random.default_rng([0, number]), jax.tree_util.keystr(path), leaf)
        for number, (path, leaf) in enumerate(leaves)
    ]
    shardings = parameter_shardings(abstract, make_mesh(num_devices))
    return jax.device_put(jax.tree.unflatten(structure, drawn), shardings)


def _draw(rng: np.random.Generator, path: str, leaf: jax.ShapeDtypeStruct) -> np.ndarray:
    noise = rng.standard_normal(leaf.shape, np.float32)
    if "scale" in path:
        return np.abs(noise) * np.float32(1e-3) + np.float32(1e-4)
    if "norm" in path and "weight" in path:
        return (1 + np.float32(0.1) * noise).astype(leaf.dtype)
    if "bias" in path:
        return (np.float32(0.1) * noise).astype(leaf.dtype)
    gain = 64.0 if leaf.dtype == jnp.float8_e4m3fn else leaf.shape[-1] ** -0.5
    return (noise * np.float32(gain)).astype(leaf.dtype)


def random_tokens(config: GLMConfig, count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, config.vocab_size, count)
