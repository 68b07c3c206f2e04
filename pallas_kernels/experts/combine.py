"""The weighted sum of each token's expert outputs, in the order of its choices, in float32."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.common.types import Interpret, Ref

_COLUMNS = (1024, 512, 256, 128)  # of a block, the first that divides all


def combine(
    outputs: Float[Array, "pairs hidden"],
    experts: Int[Array, "tokens k"],
    weights: Float[Array, "tokens k"],
    num_experts: int,
    interpret: Interpret,
) -> Float[Array, "tokens hidden"]:
    """Sums of the outputs of routed experts, weighted, and of the shared expert's, last.

    Args:
        outputs: of the pairs with routed experts, then of those with the shared one.
        experts: routed experts of each token; `num_experts` stands for none.
        weights: weight of each.
        num_experts: number of routed experts.
        interpret: for `plgpu.kernel`.
    """
    num_tokens, _ = experts.shape
    hidden = outputs.shape[1]
    columns = next(size for size in _COLUMNS if hidden % size == 0)
    return plgpu.kernel(
        functools.partial(_block, columns, num_experts),
        out_type=jax.ShapeDtypeStruct((num_tokens, hidden), outputs.dtype),
        grid=(num_tokens, hidden // columns),
        grid_names=("token", "part"),
        kernel_name="experts_combine",
        interpret=interpret,
    )(outputs, experts, weights)


def _block(
    columns: int,
    num_experts: int,
    outputs_ref: Ref,
    experts_ref: Ref,
    weights_ref: Ref,
    sums_ref: Ref,
) -> None:
    """Body of a block: some columns of a token."""
    token, part = lax.axis_index("token"), lax.axis_index("part")
    num_tokens, per_token = experts_ref.shape
    some = pl.ds(part * columns, columns)
    total = None
    for rank in range(per_token):
        output = outputs_ref[token * per_token + rank, some].astype(jnp.float32)
        # A pair of padding has no outputs: what lies there may not even be a number.
        chosen = jnp.broadcast_to(experts_ref[token, rank] < num_experts, output.shape)
        weighted = jnp.where(chosen, output * weights_ref[token, rank], jnp.zeros_like(output))
        total = weighted if total is None else total + weighted
    shared = outputs_ref[num_tokens * per_token + token, some].astype(jnp.float32)
    total = shared if total is None else total + shared
    sums_ref[token, some] = total.astype(sums_ref.dtype)
