"""Experts as four kernels: tiles of rows by expert, gate and up, down, and the weighted sums."""

from jaxtyping import Array, Float, Int

from pallas_kernels.common.types import Interpret, Scalar
from pallas_kernels.experts.combine import combine
from pallas_kernels.experts.down import down
from pallas_kernels.experts.gate_up import gate_up
from pallas_kernels.experts.parameters import GatedStack
from pallas_kernels.experts.tiles import make_tiles


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
    tile_rows: int,
    interpret: Interpret,
) -> Float[Array, "tokens hidden"]:
    """The kernels of `operation.run_experts`."""
    num_tokens, per_token = experts.shape
    num_experts = routed.gate.weight.shape[1]
    tiles = make_tiles(experts, num_experts, tile_rows, interpret=interpret)
    values = gate_up(
        rows,
        tiles,
        layer,
        offset,
        routed,
        shared,
        per_token=per_token,
        round_inputs=round_inputs,
        interpret=interpret,
    )
    outputs = down(
        values,
        tiles,
        layer,
        offset,
        routed.down,
        shared.down,
        num_pairs=num_tokens * (per_token + 1),
        round_inputs=round_inputs,
        interpret=interpret,
    )
    return combine(outputs, experts, weights, num_experts, interpret)
