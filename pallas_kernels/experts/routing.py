"""The choice of each token's experts: a block a token, which takes the best score and again."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.common import block_selection
from pallas_kernels.common.types import Interpret, Ref, Scalar

_LANES = 128


def route(
    scores: Float[Array, "tokens experts"],
    bias: Float[Array, "layers experts"],
    positions: Int[Array, " tokens"],
    layer: Scalar,
    *,
    per_token: int,
    scaling: float,
    interpret: Interpret,
) -> tuple[Int[Array, "tokens k"], Float[Array, "tokens k"]]:
    """The kernel of `operation.route`."""
    num_tokens, _ = scores.shape
    shape = (num_tokens, per_token)
    return plgpu.kernel(
        functools.partial(_block, scaling),
        out_type=(jax.ShapeDtypeStruct(shape, jnp.int32), jax.ShapeDtypeStruct(shape, jnp.float32)),
        grid=(num_tokens,),
        grid_names=("token",),
        scratch_types=[plgpu.SMEM((_LANES,), jnp.int32), plgpu.SMEM((_LANES,), jnp.float32)],
        kernel_name="experts_route",
        interpret=interpret,
    )(scores, bias, positions, jnp.asarray(layer, jnp.int32).reshape(1))


def _block(
    scaling: float,
    scores_ref: Ref,
    bias_ref: Ref,
    positions_ref: Ref,
    layer_ref: Ref,
    experts_ref: Ref,
    weights_ref: Ref,
    experts_buffer: Ref,
    weights_buffer: Ref,
) -> None:
    """Body of a block: one token."""
    token = lax.axis_index("token")
    num_experts, per_token = scores_ref.shape[1], experts_ref.shape[1]
    scores = block_selection.load(scores_ref.at[token], 0, num_experts)
    bias = block_selection.load(bias_ref.at[layer_ref[0]], 0, num_experts)
    keys = block_selection.ordered_bits(scores + bias)
    number, rank = block_selection.indices(num_experts), block_selection.indices(_LANES)
    experts = block_selection.filled(_LANES, num_experts)
    weights = jnp.zeros_like(experts, jnp.float32)
    routed, total = positions_ref[token] >= 0, jnp.float32(0)
    for turn in range(per_token):
        best = jnp.max(keys)
        expert = jnp.min(jnp.where(keys == best, number, num_experts))
        here = number == expert
        weight = jnp.sum(jnp.where(here, scores, 0.0))
        keys = jnp.where(here, block_selection.NEVER, keys)
        total = total + weight
        chosen = jnp.where(routed, expert, num_experts)
        experts = jnp.where(rank == turn, jnp.broadcast_to(chosen, rank.shape), experts)
        weights = jnp.where(rank == turn, jnp.broadcast_to(weight, rank.shape), weights)
    experts_buffer[...] = experts
    weights_buffer[...] = weights / (total + 1e-20) * scaling
    plgpu.commit_smem()
    row = pl.ds(0, per_token)
    plgpu.copy_smem_to_gmem(experts_buffer.at[row], experts_ref.at[token])
    plgpu.copy_smem_to_gmem(weights_buffer.at[row], weights_ref.at[token])
    plgpu.wait_smem_to_gmem(0)
