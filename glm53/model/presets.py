"""Configurations by name: the released models, and small ones for tests and experiments."""

from typing import Any

from glm53.model.config import FP8_QUANTIZATION, GLMConfig

_FP8 = {"quantization_config": FP8_QUANTIZATION}

_GLM_5: dict[str, Any] = {
    "model_type": "glm_moe_dsa",
    "dtype": "bfloat16",
    "vocab_size": 154880,
    "hidden_size": 6144,
    "num_hidden_layers": 78,
    "num_attention_heads": 64,
    "q_lora_rank": 2048,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk": 2048,
    "intermediate_size": 12288,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 3,
    "num_nextn_predict_layers": 1,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 1_000_000.0, "rope_type": "default"},
    "max_position_embeddings": 202752,
    "eos_token_id": [154820, 154827, 154829],
}

_GLM_5_2 = _GLM_5 | {
    "index_topk_freq": 4,
    "index_skip_topk_offset": 3,
    "index_share_for_mtp_iteration": True,
    "rope_parameters": {"rope_theta": 8_000_000.0, "rope_type": "default"},
    "max_position_embeddings": 1_048_576,
}

# Eight of everything that is sharded, so that meshes of 1, 2, 4 and 8 devices divide it.
_TEST_SMALL: dict[str, Any] = {
    "model_type": "glm_moe_dsa",
    "dtype": "float32",
    "vocab_size": 256,
    "hidden_size": 64,
    "num_hidden_layers": 7,
    "num_attention_heads": 8,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "index_n_heads": 16,
    "index_head_dim": 16,
    "index_topk": 24,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1,
    "index_topk_pattern": "FFSFSFS",
    "index_share_for_mtp_iteration": True,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 10_000.0, "rope_type": "default"},
    "max_position_embeddings": 4096,
    "eos_token_id": [255],
}

_PRESETS: dict[str, dict[str, Any]] = {
    "glm-5": _GLM_5,
    "glm-5-fp8": _GLM_5 | _FP8,
    "glm-5.1": _GLM_5,
    "glm-5.1-fp8": _GLM_5 | _FP8,
    "glm-5.2": _GLM_5_2,
    "glm-5.2-fp8": _GLM_5_2 | _FP8,
    "glm-5.3": _GLM_5_2 | _FP8,
    "glm-5.3-bf16": _GLM_5_2,
    "test-small": _TEST_SMALL,
    "test-small-fp8": _TEST_SMALL | _FP8 | {"dtype": "bfloat16"},
}


def preset_names() -> tuple[str, ...]:
    """Names that `preset` knows. As released, `glm-5.3` is FP8 and its BF16 form has a suffix."""
    return tuple(_PRESETS)


def preset(name: str) -> GLMConfig:
    """The configuration called `name`.

    Raises:
        ValueError: no such preset.
    """
    if name not in _PRESETS:
        raise ValueError(f"no preset {name!r}; known are {', '.join(_PRESETS)}")
    return GLMConfig.from_hf(_PRESETS[name])
