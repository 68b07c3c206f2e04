"""The lightning indexer: a light many-headed score that chooses which positions are attended to."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from glm53.model.config import GLMConfig
from glm53.model.layer_plan import Index
from glm53.model.linear import Linear, matmul, take
from glm53.model.rope import apply_rope

_KEY_NORM_EPS = 1e-6


class KeyNorm(nnx.Module):
    """Layer norm of index keys, in float32."""

    def __init__(self, config: GLMConfig) -> None:
        shape = (config.num_index_layers, config.index_head_dim)
        dtype = config.compute_dtype
        self.weight = nnx.Param(jnp.zeros(shape, dtype), logical_axes=("layers", None))
        self.bias = nnx.Param(jnp.zeros(shape, dtype), logical_axes=("layers", None))

    def bind(self, index_layer: Index) -> Callable[[jax.Array], jax.Array]:
        """A function from keys [t, index_head_dim] to normalised float32 keys."""
        weight = take(self.weight[...], index_layer).astype(jnp.float32)
        bias = take(self.bias[...], index_layer).astype(jnp.float32)

        def apply(keys: jax.Array) -> jax.Array:
            keys = keys.astype(jnp.float32)
            keys = keys - jnp.mean(keys, axis=-1, keepdims=True)
            variance = jnp.mean(keys * keys, axis=-1, keepdims=True)
            return keys * lax.rsqrt(variance + _KEY_NORM_EPS) * weight + bias

        return apply


class Indexer(nnx.Module):
    """Indexer parameters of all full layers, stacked and replicated."""

    def __init__(self, config: GLMConfig) -> None:
        stack = (config.num_index_layers,)
        heads, width = config.index_n_heads, config.index_head_dim
        hidden = config.hidden_size
        self.wq_b = Linear(config, stack, (heads * width, config.q_lora_rank), ("index", "latent"))
        self.wk = Linear(config, stack, (width, hidden), ("index", "hidden"))
        self.k_norm = KeyNorm(config)
        self.weights_proj = Linear(
            config, stack, (heads, hidden), ("index", "hidden"), quantizable=False
        )
        self.config = config

    def projector(self, index_layer: Index) -> Callable[..., tuple[jax.Array, ...]]:
        """A function from normalised rows [t, hidden], normalised query latents, cosines and sines
        to index queries [t, heads, width], head weights [t, heads] with all constant scales folded
        in (float32), and the index key [t, width] (float32).

        The first `qk_rope_head_dim` of the width are rotated.
        """
        config = self.config
        wq_b, wk, norm = (part.bind(index_layer) for part in (self.wq_b, self.wk, self.k_norm))
        head_matrix = self.weights_proj.matrix(index_layer).astype(jnp.float32)
        scale = (config.index_n_heads * config.index_head_dim) ** -0.5

        def rotate(values: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
            turned, plain = jnp.split(values, [config.qk_rope_head_dim], axis=-1)
            return jnp.concatenate([apply_rope(turned, cos, sin), plain], axis=-1)

        def project(
            rows: jax.Array, query_latent: jax.Array, cos: jax.Array, sin: jax.Array
        ) -> tuple[jax.Array, ...]:
            query = wq_b(query_latent).reshape(-1, config.index_n_heads, config.index_head_dim)
            head_weights = matmul(rows.astype(jnp.float32), head_matrix) * scale
            return rotate(query, cos, sin), head_weights, rotate(norm(wk(rows)), cos, sin)

        return project
