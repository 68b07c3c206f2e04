"""The exact list of tensors of a checkpoint, and where each goes in the parameter tree."""

import dataclasses
import math
from collections.abc import Iterator

from glm53.model.config import FP8_BLOCK, GLMConfig
from glm53.model.layer_plan import LayerIndex, layer_indices

DTYPE_BYTES = {"F32": 4, "BF16": 2, "F8_E4M3": 1}


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """A tensor of a Hugging Face checkpoint.

    Attributes:
        name: its name on disk.
        dtype: its safetensors dtype.
        shape: its shape.
        path: the parameter that holds it.
        index: its index in that parameter's stack.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: tuple[str, ...]
    index: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Size on disk."""
        return DTYPE_BYTES[self.dtype] * math.prod(self.shape)


def tensor_inventory(config: GLMConfig) -> tuple[TensorSpec, ...]:
    """Lists all tensors of the checkpoint that `config` describes, trunk first.

    With FP8 weights each quantised matrix has a float32 scale per started block of 128 x 128.
    Which matrices are quantised is fixed by the architecture: the projections of attention, the
    indexer's `wq_b` and `wk`, all MLPs and experts.
    """
    return tuple(_tensors(config))


def ignored_tensors(config: GLMConfig) -> frozenset[str]:
    """Copies of the embedding and head that some exports repeat in the MTP layer."""
    if not config.num_nextn_predict_layers:
        return frozenset()
    prefix = f"model.layers.{config.num_hidden_layers}"
    return frozenset((f"{prefix}.embed_tokens.weight", f"{prefix}.shared_head.head.weight"))


class _Names:
    """Yields specs below one prefix on disk and one path in the parameter tree."""

    def __init__(self, config: GLMConfig, prefix: str, path: tuple[str, ...], *index: int) -> None:
        self.config, self.prefix, self.path, self.index = config, prefix, path, index
        self.dtype = {"float32": "F32", "bfloat16": "BF16"}[config.weight_dtype]

    def plain(
        self, name: str, *shape: int, dtype: str | None = None, path: str | None = None
    ) -> Iterator[TensorSpec]:
        """A tensor that is never quantised."""
        target = (*self.path, *(path or name).split("."))
        yield TensorSpec(f"{self.prefix}.{name}", dtype or self.dtype, shape, target, self.index)

    def matrix(self, name: str, outputs: int, inputs: int) -> Iterator[TensorSpec]:
        """A matrix that FP8 checkpoints quantise."""
        if not self.config.fp8_weights:
            yield from self.plain(f"{name}.weight", outputs, inputs)
            return
        yield from self.plain(f"{name}.weight", outputs, inputs, dtype="F8_E4M3")
        blocks = (-(-outputs // FP8_BLOCK), -(-inputs // FP8_BLOCK))
        yield from self.plain(
            f"{name}.weight_scale_inv", *blocks, dtype="F32", path=f"{name}.scale"
        )

    def mlp(self, width: int) -> Iterator[TensorSpec]:
        """The three matrices of a gated MLP."""
        hidden = self.config.hidden_size
        yield from self.matrix("gate_proj", width, hidden)
        yield from self.matrix("up_proj", width, hidden)
        yield from self.matrix("down_proj", hidden, width)


def _tensors(config: GLMConfig) -> Iterator[TensorSpec]:
    hidden, vocab = config.hidden_size, config.vocab_size
    model = _Names(config, "model", ())
    yield from model.plain("embed_tokens.weight", vocab, hidden)
    for index in layer_indices(config):
        yield from _layer(config, index)
    yield from model.plain("norm.weight", hidden)
    head = _Names(config, "lm_head", ("lm_head",))
    yield from head.plain("weight", vocab, hidden)
    if config.num_nextn_predict_layers:
        mtp = _Names(config, f"model.layers.{config.num_hidden_layers}", ("mtp",))
        yield from mtp.plain("eh_proj.weight", hidden, 2 * hidden)
        yield from mtp.plain("enorm.weight", hidden)
        yield from mtp.plain("hnorm.weight", hidden)
        yield from mtp.plain("shared_head.norm.weight", hidden, path="shared_head_norm.weight")


def _layer(config: GLMConfig, index: LayerIndex) -> Iterator[TensorSpec]:
    layer, index_layer = int(index.layer), int(index.index_layer)
    mlp_layer = int(index.mlp_layer)
    prefix, hidden = f"model.layers.{layer}", config.hidden_size
    norms = _Names(config, prefix, ("layers",), layer)
    yield from norms.plain("input_layernorm.weight", hidden)
    yield from norms.plain("post_attention_layernorm.weight", hidden)
    yield from _attention(config, f"{prefix}.self_attn", layer)
    if index.full:
        yield from _indexer(config, f"{prefix}.self_attn.indexer", index_layer)
    if not index.sparse:
        dense = _Names(config, f"{prefix}.mlp", ("layers", "dense_mlp"), mlp_layer)
        yield from dense.mlp(config.intermediate_size)
        return
    moe = ("layers", "moe")
    router = _Names(config, f"{prefix}.mlp.gate", (*moe, "gate"), mlp_layer)
    yield from router.plain("weight", config.n_routed_experts, hidden)
    yield from router.plain("e_score_correction_bias", config.n_routed_experts, dtype="F32")
    for expert in range(config.n_routed_experts):
        names = _Names(
            config, f"{prefix}.mlp.experts.{expert}", (*moe, "experts"), mlp_layer, expert
        )
        yield from names.mlp(config.moe_intermediate_size)
    shared = _Names(config, f"{prefix}.mlp.shared_experts", (*moe, "shared_experts"), mlp_layer)
    yield from shared.mlp(config.moe_intermediate_size * config.n_shared_experts)


def _attention(config: GLMConfig, prefix: str, layer: int) -> Iterator[TensorSpec]:
    names = _Names(config, prefix, ("layers", "self_attn"), layer)
    heads, hidden = config.num_attention_heads, config.hidden_size
    queries, latent = config.q_lora_rank, config.kv_lora_rank
    yield from names.matrix("q_a_proj", queries, hidden)
    yield from names.plain("q_a_layernorm.weight", queries)
    yield from names.matrix("q_b_proj", heads * config.qk_head_dim, queries)
    yield from names.matrix("kv_a_proj_with_mqa", latent + config.qk_rope_head_dim, hidden)
    yield from names.plain("kv_a_layernorm.weight", latent)
    yield from names.matrix(
        "kv_b_proj", heads * (config.qk_nope_head_dim + config.v_head_dim), latent
    )
    yield from names.matrix("o_proj", hidden, heads * config.v_head_dim)


def _indexer(config: GLMConfig, prefix: str, index_layer: int) -> Iterator[TensorSpec]:
    names = _Names(config, prefix, ("layers", "indexer"), index_layer)
    heads, width = config.index_n_heads, config.index_head_dim
    yield from names.matrix("wq_b", heads * width, config.q_lora_rank)
    yield from names.matrix("wk", width, config.hidden_size)
    yield from names.plain("k_norm.weight", width)
    yield from names.plain("k_norm.bias", width)
    yield from names.plain("weights_proj.weight", heads, config.hidden_size)
