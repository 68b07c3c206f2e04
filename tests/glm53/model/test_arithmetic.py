"""Pieces of the forward pass against plain NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from glm53.model.linear import Linear
from glm53.model.mlp import ExpertDispatch
from glm53.model.presets import preset
from glm53.model.rope import apply_rope, rope_angles
from glm53.model.row_tiles import ROW_TILE
from glm53.model.sharding import make_mesh, parameter_specs
from pallas_kernels.matmul import round_to_e4m3

pytestmark = pytest.mark.compiles


@functools.partial(jax.jit, static_argnums=1)
def _dispatch(experts: jax.Array, num_experts: int) -> tuple[jax.Array | int, ...]:
    dispatch = ExpertDispatch(experts, num_experts)
    return dispatch.row, dispatch.tiles_end, dispatch.tile_expert, dispatch.num_rows


def dispatched(experts: np.ndarray, num_experts: int) -> tuple[np.ndarray, ...]:
    """Places of pairs, ends of the experts' tiles, experts of tiles, and the number of places."""
    return jax.device_get(_dispatch(experts, num_experts))


# Few sizes, since each is compiled anew.
@given(
    st.tuples(st.sampled_from([1, 3, 6]), st.sampled_from([1, 23, 60])).flatmap(
        lambda sizes: st.tuples(
            st.just(sizes[0]),
            st.lists(st.integers(0, sizes[0]), min_size=sizes[1], max_size=sizes[1]),
        )
    )
)
def test_expert_dispatch(case: tuple[int, list[int]]) -> None:
    """Each pair gets a place of its own in a tile of its expert, and only needed tiles are used."""
    num_experts, experts = case
    place, tiles_end, tile_expert, num_places = dispatched(np.array(experts, np.int32), num_experts)
    num_tiles = tiles_end[-1]
    counts = np.bincount(experts, minlength=num_experts + 1)[:num_experts]
    assert num_tiles == sum(-(-count // ROW_TILE) for count in counts)
    assert num_tiles * ROW_TILE <= num_places
    routed = [(p, e) for p, e in zip(place.tolist(), experts, strict=True) if e < num_experts]
    assert len({p for p, _ in routed}) == len(routed)
    for p, expert in routed:
        assert p < num_tiles * ROW_TILE
        assert tile_expert[p // ROW_TILE] == expert
    padding = [p for p, e in zip(place.tolist(), experts, strict=True) if e == num_experts]
    assert all(p == num_places for p in padding)


def test_expert_work_follows_the_tokens() -> None:
    """One token of a model with 256 experts takes a tile for each of its experts, no more."""
    dispatch = ExpertDispatch(jnp.asarray([3, 250, 17, 0, 99, 98, 97, 255], jnp.int32), 256)
    assert int(dispatch.tiles_end[-1]) == 8
    assert dispatch.num_rows == 8 * ROW_TILE


def test_rope_against_complex_rotation() -> None:
    """Interleaved pairs are complex numbers turned by position / theta^(2i / dim)."""
    positions, theta, dim = np.array([0, 1, 77, 130_000]), 8e6, 16
    values = np.random.default_rng(0).standard_normal((4, 3, dim)).astype(np.float32)
    cos, sin = rope_angles(jnp.asarray(positions), theta, dim)
    turned = np.asarray(apply_rope(jnp.asarray(values), cos, sin))
    angles = positions[:, None] * theta ** (-np.arange(0, dim, 2) / dim)
    pairs = (values[..., 0::2] + 1j * values[..., 1::2]) * np.exp(1j * angles)[:, None]
    # Angles are float32: at position 130,000 they are known to about 0.01.
    np.testing.assert_allclose(turned[..., 0::2], pairs.real, atol=0.03)
    np.testing.assert_allclose(turned[:3, ..., 1::2], pairs[:3].imag, atol=1e-4)


@pytest.mark.parametrize("num_devices", [1, 2, 4])
def test_fp8_blocks_that_straddle_devices(num_devices: int) -> None:
    """Dequantised matrices are the same however their rows or columns are sharded."""
    config = preset("test-small-fp8").replace(compute_dtype="float32")
    rng = np.random.default_rng(0)
    for axes, shape in ((("heads", "latent"), (328, 200)), (("hidden", "heads"), (200, 328))):
        linear = Linear(config, (3,), shape, axes)
        assert linear.scale is not None
        values = jnp.asarray(rng.standard_normal((3, *shape)) * 100, jnp.float8_e4m3fn)
        scale = jnp.asarray(rng.random(linear.scale.shape), jnp.float32)
        linear.weight.set_value(values)
        linear.scale.set_value(scale)
        graph, params = nnx.split(linear)
        sharded = jax.shard_map(
            lambda params, graph=graph: nnx.merge(graph, params).matrix(1),
            mesh=make_mesh(num_devices),
            in_specs=(parameter_specs(params),),
            out_specs=PartitionSpec(*("model" if axis == "heads" else None for axis in axes)),
            check_vma=False,
        )
        blocks = np.kron(np.asarray(scale[1]), np.ones((128, 128), np.float32))
        expected = np.asarray(values[1], np.float32) * blocks[: shape[0], : shape[1]]
        np.testing.assert_array_equal(np.asarray(jax.jit(sharded)(params)), expected)


def test_round_to_e4m3() -> None:
    """Activations round to e4m3 steps of a power-of-two scale per 128 values, zeros stay zero."""
    rng = np.random.default_rng(1)
    values = rng.standard_normal((5, 300)).astype(np.float32) * 10.0 ** rng.integers(-6, 6, (5, 1))
    values[0] = 0
    rounded = np.asarray(round_to_e4m3(jnp.asarray(values)))
    assert np.all(rounded[0] == 0)
    for start in (0, 128, 256):
        group, got = values[1:, start : start + 128], rounded[1:, start : start + 128]
        amax = np.abs(group).max(axis=1, keepdims=True)
        # Three bits of mantissa, and the smallest step of the group's scale.
        assert np.all(np.abs(got - group) <= np.maximum(np.abs(group) / 16, amax / 448 * 2**-8))
