"""The parameter tree of the model.

Parameters are stacked by kind (attention over all layers, indexers over the full ones, and so on)
and carry the logical axes from which their sharding follows. The modules hold no state besides:
`nnx.split` once, then pass the parameters to jitted steps.
"""

import jax.numpy as jnp
from flax import nnx

from glm53.model.attention import Attention
from glm53.model.config import GLMConfig
from glm53.model.indexer import Indexer
from glm53.model.linear import Linear, RMSNorm
from glm53.model.mlp import GatedMLP, MixtureOfExperts


class Embedding(nnx.Module):
    """Token embeddings, sharded over the vocabulary."""

    def __init__(self, config: GLMConfig) -> None:
        self.weight = nnx.Param(
            jnp.zeros((config.vocab_size, config.hidden_size), config.compute_dtype),
            logical_axes=("vocab", "hidden"),
        )


class DecoderLayers(nnx.Module):
    """All decoder layers, the MTP layer's among them as the last of its kinds."""

    def __init__(self, config: GLMConfig) -> None:
        stack, eps = (config.num_layers,), config.rms_norm_eps
        self.input_layernorm = RMSNorm(config, stack, config.hidden_size, eps)
        self.post_attention_layernorm = RMSNorm(config, stack, config.hidden_size, eps)
        self.self_attn = Attention(config)
        self.indexer = Indexer(config)
        self.dense_mlp = GatedMLP(
            config, (config.num_dense_layers,), config.intermediate_size, "intermediate"
        )
        self.moe = MixtureOfExperts(config)


class MTPHead(nnx.Module):
    """Parameters of the MTP layer besides those of a decoder layer."""

    def __init__(self, config: GLMConfig) -> None:
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.enorm = RMSNorm(config, (), hidden, eps)
        self.hnorm = RMSNorm(config, (), hidden, eps)
        self.eh_proj = Linear(
            config, (), (hidden, 2 * hidden), ("hidden", "hidden"), quantizable=False
        )
        self.shared_head_norm = RMSNorm(config, (), hidden, eps)


class GLMModel(nnx.Module):
    """The whole model; `forward` and `mtp` say how its parts are run."""

    def __init__(self, config: GLMConfig) -> None:
        self.embed_tokens = Embedding(config)
        self.layers = DecoderLayers(config)
        self.norm = RMSNorm(config, (), config.hidden_size, config.rms_norm_eps)
        self.lm_head = Linear(
            config,
            (),
            (config.vocab_size, config.hidden_size),
            ("vocab", "hidden"),
            quantizable=False,
        )
        self.mtp = MTPHead(config) if config.num_nextn_predict_layers else None


def abstract_model(config: GLMConfig) -> tuple[nnx.GraphDef, nnx.State]:
    """The model's structure and the shapes and dtypes of its parameters, without memory."""
    return nnx.split(nnx.eval_shape(lambda: GLMModel(config)))
