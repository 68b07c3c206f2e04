"""Sparse multi-head latent attention in absorbed form: heads score and mix the cached latents."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from glm53.model.config import GLMConfig
from glm53.model.layer_plan import Index
from glm53.model.linear import Linear, RMSNorm
from glm53.model.rope import apply_rope
from pallas_kernels.sparse_attention import merge_attention


class Attention(nnx.Module):
    """Attention parameters of all layers, stacked; heads are sharded."""

    def __init__(self, config: GLMConfig) -> None:
        stack = (config.num_layers,)
        heads, hidden = config.num_attention_heads, config.hidden_size
        queries, latent = config.q_lora_rank, config.kv_lora_rank
        rope = config.qk_rope_head_dim
        per_head = config.qk_nope_head_dim + config.v_head_dim
        eps = config.latent_norm_eps
        self.q_a_proj = Linear(config, stack, (queries, hidden), ("latent", "hidden"))
        self.q_a_layernorm = RMSNorm(config, stack, queries, eps)
        self.q_b_proj = Linear(
            config, stack, (heads * config.qk_head_dim, queries), ("heads", "latent")
        )
        self.kv_a_proj_with_mqa = Linear(
            config, stack, (latent + rope, hidden), ("latent", "hidden")
        )
        self.kv_a_layernorm = RMSNorm(config, stack, latent, eps)
        self.kv_b_proj = Linear(config, stack, (heads * per_head, latent), ("heads", "latent"))
        self.o_proj = Linear(
            config, stack, (hidden, heads * config.v_head_dim), ("hidden", "heads")
        )
        self.config = config

    def _up_projections(self, layer: Index) -> tuple[jax.Array, jax.Array]:
        """Per local head, latent to key [heads, nope, latent] and to value [heads, v, latent]."""
        nope, value = self.config.qk_nope_head_dim, self.config.v_head_dim
        both = self.kv_b_proj.matrix(layer).reshape(-1, nope + value, self.config.kv_lora_rank)
        return both[:, :nope], both[:, nope:]

    def projector(self, layer: Index) -> Callable[..., tuple[jax.Array, ...]]:
        """A function from normalised rows [t, hidden], cosines and sines to

        * the normalised query latent [t, q_lora_rank], which the indexer reads too,
        * absorbed queries of the local heads [t, heads, kv_lora_rank + rope],
        * the normalised KV latent [t, kv_lora_rank] and the rotated key [t, rope].
        """
        config = self.config
        q_a, q_norm, q_b = (
            part.bind(layer) for part in (self.q_a_proj, self.q_a_layernorm, self.q_b_proj)
        )
        kv_a, kv_norm = self.kv_a_proj_with_mqa.bind(layer), self.kv_a_layernorm.bind(layer)
        key_up, _ = self._up_projections(layer)

        def project(rows: jax.Array, cos: jax.Array, sin: jax.Array) -> tuple[jax.Array, ...]:
            query_latent = q_norm(q_a(rows))
            query = q_b(query_latent).reshape(rows.shape[0], -1, config.qk_head_dim)
            plain, rotated = jnp.split(query, [config.qk_nope_head_dim], axis=-1)
            absorbed = _per_head(plain, key_up, contract=1)
            rotated = apply_rope(rotated, cos, sin)
            latent, key = jnp.split(kv_a(rows), [config.kv_lora_rank], axis=-1)
            absorbed_query = jnp.concatenate([absorbed, rotated], axis=-1)
            return query_latent, absorbed_query, kv_norm(latent), apply_rope(key, cos, sin)

        return project

    def output(self, layer: Index) -> Callable[[jax.Array, jax.Array], jax.Array]:
        """A function from each shard's mixed latents [shards, t, heads, kv_lora_rank] and their
        log-sum-exps [shards, t, heads] to this device's part of the output [t, hidden]."""
        o_proj = self.o_proj.bind(layer)
        _, value_up = self._up_projections(layer)
        dtype = self.config.compute_dtype

        def finish(mixed: jax.Array, lse: jax.Array) -> jax.Array:
            latent = merge_attention(mixed, lse).astype(dtype)
            values = _per_head(latent, value_up, contract=2)
            return o_proj(values.reshape(values.shape[0], -1))

        return finish


def _per_head(rows: jax.Array, matrices: jax.Array, contract: int) -> jax.Array:
    """Each head's rows [t, heads, a] times its matrix [heads, ., .], contracted over axis
    `contract` of the matrices."""
    product = lax.dot_general(
        rows.astype(jnp.float32),
        matrices.astype(jnp.float32),
        (((2,), (contract,)), ((1,), (0,))),
        precision=lax.Precision.HIGHEST,
    )
    return product.transpose(1, 0, 2).astype(rows.dtype)
