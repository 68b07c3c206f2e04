"""The smallest models of this architecture, of random weights, for tests of whole engines."""

from pathlib import Path

from benchmarks.common.small_checkpoint import small_fields, write_checkpoint

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "n_routed_experts": 2,
    "num_experts_per_tok": 1,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "first_k_dense_replace": 1,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 16,
}


def write_grouped_model(path: Path, max_position_embeddings: int) -> None:
    """A checkpoint with two index groups of two dense layers, which are scanned: steps compile in
    a third of the time of others."""
    fields = small_fields(max_position_embeddings=max_position_embeddings, **SIZES)
    fields |= {
        "vocab_size": 256,
        "num_hidden_layers": 4,
        "index_topk_freq": 2,  # full, shared, full, shared
        "index_skip_topk_offset": 1,
        "first_k_dense_replace": 4,
    }
    write_checkpoint(path, fields)
