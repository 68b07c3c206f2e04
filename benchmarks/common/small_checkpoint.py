"""Checkpoint that the speed benchmarks run: GLM-5.3's architecture with 62M parameters.

A Hugging Face directory of random float32 weights, which glm53 and transformers both load. Each
tensor comes from raw 64-bit draws of a generator keyed by its name, so the bytes are the same on
every machine.

usage: python benchmarks/common/small_checkpoint.py DIRECTORY
"""

import argparse
import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32
from safetensors.numpy import save_file

from glm53.checkpoint.inventory import tensor_inventory
from glm53.model.config import GLMConfig

_NORM_SPREAD = 0.2  # norm weights lie within this of 1, biases within this of 0


def small_fields(*, max_position_embeddings: int = 16384, **sizes: int) -> dict[str, Any]:
    """Returns the fields of the checkpoint's `config.json`.

    Args:
        max_position_embeddings: longest sequence, in tokens.
        sizes: fields to override.
    """
    return {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": "glm_moe_dsa",
        "dtype": "float32",
        "vocab_size": 2048,
        "hidden_size": 512,
        "intermediate_size": 1024,
        "moe_intermediate_size": 192,
        "num_hidden_layers": 12,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "q_lora_rank": 192,
        "kv_lora_rank": 128,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "v_head_dim": 64,
        "n_routed_experts": 16,
        "num_experts_per_tok": 4,
        "n_shared_experts": 1,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 3,
        "index_n_heads": 16,
        "index_head_dim": 64,
        "index_topk": 256,
        "index_topk_freq": 4,
        "index_skip_topk_offset": 3,
        "num_nextn_predict_layers": 0,
        "max_position_embeddings": max_position_embeddings,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 8_000_000.0, "rope_type": "default"},
        # The defaults of transformers are other ids.
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    } | sizes


def write_checkpoint(path: Path, fields: Mapping[str, Any], seed: int = 0) -> int:
    """Writes `config.json` and `model.safetensors`, and returns the number of parameters.

    Args:
        path: the directory, created if missing.
        fields: the config of a float32 model without FP8.
        seed: seed of the weights.

    Raises:
        ValueError: GLMConfig refuses the fields, or the weights they describe are not float32.
        OSError: the directory cannot be written.
    """
    config = GLMConfig.from_hf(fields)
    if config.weight_dtype != "float32" or config.fp8_weights:
        raise ValueError("the fields must have dtype 'float32' and no quantization_config")
    tensors = {spec.name: _draw(spec.name, spec.shape, seed) for spec in tensor_inventory(config)}
    path.mkdir(parents=True, exist_ok=True)
    # transformers refuses a file that does not name its format.
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    text = json.dumps(dict(fields), indent=1, sort_keys=True)
    (path / "config.json").write_text(f"{text}\n", encoding="utf-8")
    return sum(tensor.size for tensor in tensors.values())


def ensure_checkpoint(path: Path) -> None:
    """Writes the checkpoint unless the directory exists; an interrupted run leaves none.

    Raises:
        OSError: it cannot be written.
    """
    if path.exists():
        return
    unfinished = path.with_name(f"{path.name}.unfinished")
    write_checkpoint(unfinished, small_fields())
    unfinished.rename(path)


def _draw(name: str, shape: tuple[int, ...], seed: int) -> Float32[np.ndarray, "..."]:
    """Returns a tensor's weights: near 1 in norms, small in biases, of variance 1 in the embeddings
    and 1 / inputs elsewhere."""
    centred = _uniform(f"{seed} {name}", math.prod(shape)).reshape(shape) - np.float32(0.5)
    if "norm" in name and name.endswith(".weight"):
        return 1 + np.float32(2 * _NORM_SPREAD) * centred
    if name.endswith("bias"):
        return np.float32(2 * _NORM_SPREAD) * centred
    variance = 1.0 if "embed_tokens" in name else 1 / shape[-1]
    return np.float32(math.sqrt(12 * variance)) * centred


def _uniform(key: str, count: int) -> Float32[np.ndarray, " count"]:
    """Returns numbers in [0, 1) of 24 bits each, exact in float32."""
    digest = hashlib.sha256(key.encode()).digest()
    raw = np.random.Philox(key=int.from_bytes(digest[:16], "little")).random_raw(count)
    return (raw >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)


def main() -> None:
    """Writes the checkpoint to the directory given on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--max-position-embeddings", type=int, default=16384)
    options = parser.parse_args()
    fields = small_fields(max_position_embeddings=options.max_position_embeddings)
    count = write_checkpoint(options.directory, fields)
    print(f"{count} parameters in {options.directory}")


if __name__ == "__main__":
    main()
