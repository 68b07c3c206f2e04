"""Generated checkpoint: the model that the benchmarks name, always with the same bytes."""

import hashlib
import math
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from benchmarks.common.small_checkpoint import ensure_checkpoint, small_fields, write_checkpoint
from glm53.checkpoint import load_hugging_face
from glm53.checkpoint.inventory import tensor_inventory
from glm53.model.config import GLMConfig
from glm53.model.sharding import make_mesh

TINY = small_fields(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=32,
    moe_intermediate_size=16,
    num_hidden_layers=5,
    num_attention_heads=2,
    num_key_value_heads=2,
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=8,
    v_head_dim=8,
    n_routed_experts=4,
    num_experts_per_tok=2,
    index_n_heads=2,
    index_head_dim=16,
    index_topk=8,
)


def test_size_and_schedule() -> None:
    """Figures reported for another model than the one named."""
    config = GLMConfig.from_hf(small_fields(max_position_embeddings=65_600))
    assert sum(math.prod(spec.shape) for spec in tensor_inventory(config)) == 61_867_024
    assert "".join(kind[0] for kind in config.indexer_types) == "fffsssfsssfs"
    assert config.num_dense_layers == 3
    assert config.max_position_embeddings == 65_600


@pytest.mark.compiles
def test_loads(tmp_path: Path) -> None:
    """A checkpoint with tensors missing, or with weights that blow up or vanish."""
    count = write_checkpoint(tmp_path, TINY)
    config = GLMConfig.from_pretrained(tmp_path)
    assert config == GLMConfig.from_hf(TINY)
    params = load_hugging_face(tmp_path, config, make_mesh())
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == count
    tensors = load_file(tmp_path / "model.safetensors")
    assert np.std(tensors["model.embed_tokens.weight"]) == pytest.approx(1, rel=0.05)
    assert np.std(tensors["lm_head.weight"]) == pytest.approx(32**-0.5, rel=0.05)
    norm = tensors["model.norm.weight"]
    assert 0.8 <= norm.min() < 1 < norm.max() <= 1.2


def test_is_always_the_same(tmp_path: Path) -> None:
    """Weights that differ between runs or versions of NumPy, or do not differ by the seed."""
    for name, seed in (("first", 0), ("second", 0), ("other", 1)):
        write_checkpoint(tmp_path / name, TINY, seed)
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / "first" / file).read_bytes() == (tmp_path / "second" / file).read_bytes()
    weight = load_file(tmp_path / "first/model.safetensors")["lm_head.weight"]
    assert np.any(weight != load_file(tmp_path / "other/model.safetensors")["lm_head.weight"])
    digest = hashlib.sha256(weight.tobytes()).hexdigest()
    assert digest[:16] == "aba9317432df50d7"


def test_other_weights_are_refused(tmp_path: Path) -> None:
    """A config that says bfloat16 beside float32 weights."""
    with pytest.raises(ValueError, match="float32"):
        write_checkpoint(tmp_path / "new", TINY | {"dtype": "bfloat16"})
    assert not (tmp_path / "new").exists()


def test_present_checkpoint_is_kept(tmp_path: Path) -> None:
    """An existing directory that is overwritten."""
    ensure_checkpoint(tmp_path)
    assert not list(tmp_path.iterdir())
