"""Public functions of a sparse layer: the choice of each token's experts, and their sums.

Mixture of experts: DeepSeek-V3 (arXiv:2412.19437), equations 12 to 16.
"""

import functools
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.common.implementation import Implementation, run
from pallas_kernels.common.types import Scalar
from pallas_kernels.experts import mosaic_gpu, reference, routing
from pallas_kernels.experts.block_product import BLOCK
from pallas_kernels.experts.parameters import GatedStack

StepKind = Literal["decode", "prefill"]
"""Kind of a step: few rows an expert, or many."""

TILE_ROWS = {"decode": 16, "prefill": 64}
"""Rows of one expert that are computed together. Weights are read again for each tile of an expert,
and rows that are missing cost instructions, though no bytes."""

MOST_TOKENS = 32768
"""Most tokens of a call of the kernels."""

_LANES = 128


def route(
    scores: Float[Array, "tokens experts"],
    bias: Float[Array, "layers experts"],
    positions: Int[Array, " tokens"],
    layer: Scalar,
    *,
    per_token: int,
    scaling: float,
    implementation: Implementation | None = None,
) -> tuple[Int[Array, "tokens k"], Float[Array, "tokens k"]]:
    """Chooses each token's experts: those of the highest biased scores, of equal ones the lower.

    Args:
        scores: scores after the sigmoid, float32, all at least 0.
        bias: part in the choice, not in the weights.
        positions: negative for padding.
        layer: which layer's bias.
        per_token: experts of a token.
        scaling: factor of the weights.
        implementation: None takes the kernel on a GPU where it supports the shapes.

    Returns:
        Experts, best first, and the scores of each token's in proportion, which sum to `scaling`.
        Padding has the number of experts for an expert, and its weights mean nothing.

    Raises:
        ValueError: the kernel is asked for, and does not support the shapes.
    """
    sizes = {"per_token": per_token, "scaling": scaling}
    return run(
        implementation,
        functools.partial(reference.route, **sizes),
        functools.partial(routing.route, **sizes),
        _unsupported_route(scores, per_token),
        scores,
        bias,
        positions,
        layer,
    )


def run_experts(
    rows: Float[Array, "tokens hidden"],
    experts: Int[Array, "tokens k"],
    weights: Float[Array, "tokens k"],
    layer: Scalar,
    offset: Scalar,
    routed: GatedStack,
    shared: GatedStack,
    *,
    round_inputs: bool,
    kind: StepKind,
    implementation: Implementation | None = None,
) -> Float[Array, "tokens hidden"]:
    """This device's part of each token's expert outputs: the routed, weighted, and the shared.

    A row's bits depend on its inputs, its experts and weights, and the kind of step, but not on
    other rows. The kernels add products of blocks of 128 inputs in float32, in order, and round to
    bfloat16 what lies between gate and down, each expert's outputs, and the sum.
    Without `round_inputs` and with e4m3 weights, an input is read as float16, scaled by a power of
    two: less than 2**-38 of the largest of its group of 128 is lost.

    Args:
        rows: inputs.
        experts: distinct experts of each token; the number of experts stands for none. A row
            without an expert has the shared expert's outputs.
        weights: weight of each, float32.
        layer: which layer of the stacks.
        offset: intermediate value of whole experts with which this device's part begins.
        routed: routed experts.
        shared: the shared expert.
        round_inputs: rounds the inputs of each product to e4m3, with a power-of-two scale for each
            group of 128.
        kind: kind of step.
        implementation: None takes the kernels on a GPU where they support the shapes.

    Raises:
        ValueError: the kernels are asked for, and do not support the shapes.
    """
    rounding = {"round_inputs": round_inputs}
    return run(
        implementation,
        functools.partial(reference.run_experts, **rounding),
        functools.partial(mosaic_gpu.run_experts, tile_rows=TILE_ROWS[kind], **rounding),
        _unsupported_experts(rows, experts, routed, shared),
        rows,
        experts,
        weights,
        layer,
        offset,
        routed,
        shared,
    )


def _unsupported_choice(per_token: int) -> str | None:
    if per_token % 4 or _LANES % per_token:
        return f"{per_token} experts a token, not 4, 8 or another power of two up to {_LANES}"
    return None


def _unsupported_route(scores: jax.Array, per_token: int) -> str | None:
    """Why the kernel cannot choose, None if it can."""
    num_tokens, num_experts = scores.shape
    if num_tokens == 0:
        return "there are no tokens"
    if num_experts % _LANES:
        return f"{num_experts} experts, not a multiple of {_LANES}"
    return _unsupported_choice(per_token)


def _unsupported_experts(
    rows: jax.Array, experts: jax.Array, routed: GatedStack, shared: GatedStack
) -> str | None:
    """Why the kernels cannot take these shapes, None if they can."""
    num_tokens, hidden = rows.shape
    width = routed.gate.weight.shape[2]
    shared_width = shared.gate.weight.shape[1]
    dtype, scale = routed.gate.weight.dtype, routed.down.scale
    if not 0 < num_tokens <= MOST_TOKENS:
        return f"{num_tokens} tokens, not 1 to {MOST_TOKENS}"
    if rows.dtype != jnp.bfloat16:
        return f"rows of {rows.dtype}, not bfloat16"
    if dtype != (jnp.bfloat16 if scale is None else jnp.float8_e4m3fn):
        return f"weights of {dtype}, not bfloat16 or e4m3 with scales"
    if hidden % BLOCK or width % BLOCK:
        return f"hidden size {hidden} and width {width}, not multiples of {BLOCK}"
    if shared_width != width:
        return f"a shared expert {shared_width} wide beside routed ones {width} wide"
    if scale is not None and (hidden % (4 * BLOCK) or scale.shape[-1] % 4):
        blocks = f"{hidden // BLOCK} and {scale.shape[-1]} blocks"
        return f"scales of {blocks}, not multiples of 4, which are 16 bytes"
    return _unsupported_choice(experts.shape[1])
