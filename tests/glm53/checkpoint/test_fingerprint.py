"""Identity of a model's rows: any other bit of a weight is another model, any other place of the
same weights is not."""

import copy
import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from glm53.checkpoint import load_checkpoint, save_orbax
from glm53.checkpoint.fingerprint import digest_arrays, model_fingerprint
from glm53.model.config import GLMConfig
from glm53.model.presets import preset
from glm53.model.sharding import make_mesh
from tests.helpers.golden import GOLDEN, golden_config, golden_params
from tests.helpers.random_models import preset_params

pytestmark = pytest.mark.compiles
CONFIG = preset("test-small-fp8")
UINTS = {1: np.uint8, 2: np.uint16, 4: np.uint32}


@functools.cache
def weights() -> dict[tuple, np.ndarray]:
    """Random parameters of all dtypes that are in use: float8, bfloat16 and float32."""
    found = {
        path: np.asarray(leaf.get_value())
        for path, leaf in nnx.to_flat_state(preset_params(CONFIG, 1))
    }
    assert {value.dtype.itemsize for value in found.values()} == {1, 2, 4}
    return found


def fingerprint(changed: dict[tuple, np.ndarray], num_devices: int = 1) -> str:
    """That of the parameters with some changed."""
    leaves = []
    for path, leaf in nnx.to_flat_state(preset_params(CONFIG, num_devices)):
        if path in changed:
            leaf = leaf.replace(jax.device_put(changed[path], leaf.get_value().sharding))
        leaves.append((path, leaf))
    return model_fingerprint(CONFIG, nnx.from_flat_state(leaves))


@functools.cache
def unchanged() -> str:
    return fingerprint({})


def bits_of(array: np.ndarray) -> np.ndarray:
    return array.view(UINTS[array.dtype.itemsize])


paths = st.deferred(lambda: st.sampled_from(sorted(p for p, w in weights().items() if w.size)))


@given(path=paths, data=st.data())
@settings(max_examples=150)
def test_any_bit_counts(path: tuple, data: st.DataObject) -> None:
    """A weight, or a bit of one, that the identity leaves out."""
    changed = weights()[path].copy()
    flat = bits_of(changed.reshape(-1))
    place = data.draw(st.integers(0, flat.size - 1))
    bit = data.draw(st.integers(0, 8 * flat.itemsize - 1))
    flat[place] ^= flat.dtype.type(1 << bit)
    assert fingerprint({path: changed}) != unchanged()


@given(path=paths, data=st.data())
@settings(max_examples=50)
def test_places_count(path: tuple, data: st.DataObject) -> None:
    """Weights, rows or layers that have changed places."""
    original = weights()[path]
    changed = original.copy()
    axis = data.draw(st.integers(0, original.ndim - 1))
    first, second = (data.draw(st.integers(0, original.shape[axis] - 1)) for _ in range(2))
    where: list[Any] = [slice(None)] * original.ndim
    if data.draw(st.booleans()):  # of single weights
        where = [data.draw(st.integers(0, size - 1)) for size in original.shape]
    left, right = list(where), list(where)
    left[axis], right[axis] = first, second
    changed[tuple(left)], changed[tuple(right)] = original[tuple(right)], original[tuple(left)]
    same = changed.tobytes() == original.tobytes()
    assert (fingerprint({path: changed}) == unchanged()) == same


def test_names_count() -> None:
    """Parameters of one shape that have changed places."""
    first = ("layers", "input_layernorm", "weight")
    second = ("layers", "post_attention_layernorm", "weight")
    found = weights()
    assert found[first].shape == found[second].shape
    assert fingerprint({first: found[second], second: found[first]}) != unchanged()


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.bfloat16, jnp.float32])
def test_zeros_and_nans(dtype: Any) -> None:
    """Numbers that compare equal, or to nothing, taken for each other."""
    mesh = make_mesh(1)
    values = np.zeros((6, 2), dtype)
    values[1] *= dtype(-1)
    values[2], values[3] = np.nan, -np.asarray(np.nan, dtype)
    bits_of(values)[4:] = [bits_of(values)[2] - 1, bits_of(values)[3] - 1]  # other payloads
    place = NamedSharding(mesh, PartitionSpec())
    arrays = [jax.device_put(row, place) for row in values]
    assert len({digest.tobytes() for digest in digest_arrays(arrays)}) == len(values)


def reference_digest(array: np.ndarray) -> list[int]:
    """The digest by Python's integers, one element after the other."""

    def mix(value: int) -> int:
        value = (value ^ value >> 16) * 0x85EBCA6B % 2**32
        value = (value ^ value >> 13) * 0xC2B2AE35 % 2**32
        return value ^ value >> 16

    lanes = [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344]
    sums = [0] * len(lanes)
    for place, bits in np.ndenumerate(bits_of(array)):
        for lane, key in enumerate(lanes):
            for index in place:
                key = mix(key ^ index)
            sums[lane] = (sums[lane] + mix(key ^ int(bits))) % 2**32
    return sums


def test_as_by_integers() -> None:
    """A shard that counts twice or not at all, or whose indices begin anew."""
    rng, mesh = np.random.default_rng(0), make_mesh(4)
    specs = [(), ("model",), (None, "model"), ("model", None, None), (None, None, "model")]
    shapes = [(3,), (8,), (3, 4), (4, 2, 3), (0, 5, 4)]
    arrays = [
        rng.standard_normal(shape).astype(dtype)
        for dtype in (jnp.float8_e4m3fn, jnp.bfloat16, np.float32)
        for shape in shapes
    ]
    placed = [
        jax.device_put(array, NamedSharding(mesh, PartitionSpec(*spec)))
        for array, spec in zip(arrays, specs * 3, strict=True)
    ]
    found = [digest.tolist() for digest in digest_arrays(placed)]
    assert found == [reference_digest(array) for array in arrays]


def test_on_any_mesh() -> None:
    """The number of devices taken for part of the model."""
    assert fingerprint({}, num_devices=4) == unchanged()


def test_from_any_format(tmp_path: Path) -> None:
    """The format of the checkpoint taken for part of the model."""
    config, params = golden_config("tiny_f32"), golden_params("tiny_f32", 1)
    save_orbax(tmp_path / "saved", config, params)
    restored = load_checkpoint(tmp_path / "saved", config, make_mesh(1))
    expected = model_fingerprint(config, load_checkpoint(GOLDEN / "tiny_f32", config, make_mesh(1)))
    assert model_fingerprint(config, restored) == expected


def test_without_experts() -> None:
    """Stacks of no layers."""
    config = CONFIG.replace(
        mlp_layer_types=("dense",) * CONFIG.num_hidden_layers, num_nextn_predict_layers=0
    )
    params = preset_params(config, 1)
    assert any(not leaf.size for leaf in jax.tree.leaves(params))
    assert model_fingerprint(config, params) != unchanged()


def test_which_fields_count() -> None:
    """A setting of the arithmetic that is left out, or another that counts."""
    params = nnx.from_flat_state(nnx.to_flat_state(preset_params(CONFIG, 1))[:1])

    def found(**changes: object) -> str:
        config = copy.copy(CONFIG)
        for name, value in changes.items():
            object.__setattr__(config, name, value)  # `replace` would check values.
        return model_fingerprint(config, params)

    names = [field.name for field in dataclasses.fields(GLMConfig)]
    assert {name for name in names if found(**{name: 17}) == found()} == {
        "eos_token_ids",
        "index_share_for_mtp_iteration",
        "max_position_embeddings",
        "weight_dtype",
    }
    assert found(rope_theta=8) == found(rope_theta=8.0)
