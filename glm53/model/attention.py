"""Multi-head latent attention in absorbed form: heads score and average the cached latents.

DeepSeek-V2 (arXiv:2405.04434), section 2.1: queries take in the up-projection of keys (W_UK), and
the output projection follows that of values (W_UV), so that only latents and rotated keys are
cached.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from glm53.model.config import GLMConfig
from glm53.model.layer_plan import Index
from glm53.model.linear import Linear, RMSNorm
from glm53.model.rope import apply_rope
from pallas_kernels.common.row_format import RowFormat
from pallas_kernels.matmul import bind_together
from pallas_kernels.per_head_matmul import HeadRows, HeadsFunction
from pallas_kernels.per_head_matmul import bind as bind_heads
from pallas_kernels.sparse_attention import merge_attention, prepare_query


class Projected(NamedTuple):
    """Projections of token rows.

    Attributes:
        query_latent: [tokens, q_lora_rank], normalised; the indexer reads it too.
        query: [tokens, heads, kv_lora_rank + rope], absorbed queries of the local heads, as
            `prepare_query` gives them.
        kv_latent: [tokens, kv_lora_rank], normalised.
        k_pe: [tokens, rope], the rotated key.
    """

    query_latent: Float[Array, "tokens q_lora_rank"]
    query: Float[Array, "tokens heads width"]
    kv_latent: Float[Array, "tokens kv_lora_rank"]
    k_pe: Float[Array, "tokens rope"]


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

    def _absorbed(self, layer: Index, *, keys: bool) -> HeadsFunction:
        """Each local head's product with W_UK, from keys to latents, or W_UV, from latents to
        values."""
        nope, value = self.config.qk_nope_head_dim, self.config.v_head_dim
        taken = HeadRows(nope + value, 0, nope) if keys else HeadRows(nope + value, nope, value)
        return bind_heads(self.kv_b_proj.stack, layer, taken=taken, transpose=keys)

    def projector(
        self, layer: Index, row_format: RowFormat, *, many_rows: bool
    ) -> Callable[[Array, Array, Array], Projected]:
        """A function from normalised rows [tokens, hidden], cosines and sines to `Projected`.

        Args:
            layer: the layer.
            row_format: format of the rows that queries will meet.
            many_rows: see `bind_together`.
        """
        config = self.config
        project_down = bind_together(
            [self.q_a_proj.stack, self.kv_a_proj_with_mqa.stack],
            [(layer,), (layer,)],
            many_rows=many_rows,
        )
        q_norm, kv_norm = self.q_a_layernorm.bind(layer), self.kv_a_layernorm.bind(layer)
        q_b = self.q_b_proj.bind(layer, many_rows=many_rows)
        to_latent = self._absorbed(layer, keys=True)

        def project(rows: Array, cos: Array, sin: Array) -> Projected:
            query_latent, kv = project_down(rows)
            query_latent = q_norm(query_latent)
            query = q_b(query_latent).reshape(rows.shape[0], -1, config.qk_head_dim)
            q_nope, q_pe = jnp.split(query, [config.qk_nope_head_dim], axis=-1)
            q_latent, q_pe = to_latent(q_nope), apply_rope(q_pe, cos, sin)
            kv_latent, k_pe = jnp.split(kv, [config.kv_lora_rank], axis=-1)
            return Projected(
                query_latent,
                prepare_query(q_latent, q_pe, row_format),
                kv_norm(kv_latent),
                apply_rope(k_pe, cos, sin),
            )

        return project

    def output(
        self, layer: Index, row_format: RowFormat, *, many_rows: bool
    ) -> Callable[[Array], Array]:
        """A function from attention to each device's rows [devices, tokens, heads, width] to this
        device's part of the output [tokens, hidden].

        Args:
            layer: the layer.
            row_format: format of the rows.
            many_rows: see `bind_together`.
        """
        o_proj = self.o_proj.bind(layer, many_rows=many_rows)
        to_value = self._absorbed(layer, keys=False)
        dtype = self.config.compute_dtype

        def project(attended: Array) -> Array:
            latent = merge_attention(attended, row_format).astype(dtype)
            values = to_value(latent)
            return o_proj(values.reshape(values.shape[0], -1))

        return project
