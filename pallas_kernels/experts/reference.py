"""Experts in plain jax.numpy.

Rows are computed in tiles of `ROW_TILE`, so that a row's bits depend on nothing but the row.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.common.product import dequantize, multiply, round_to_e4m3, take
from pallas_kernels.common.row_tiles import ROW_TILE, map_row_tiles
from pallas_kernels.common.types import Scalar
from pallas_kernels.experts.parameters import ExpertMatrices, GatedStack


def route(
    scores: Float[Array, "tokens experts"],
    bias: Float[Array, "layers experts"],
    positions: Int[Array, " tokens"],
    layer: Scalar,
    *,
    per_token: int,
    scaling: float,
) -> tuple[Int[Array, "tokens k"], Float[Array, "tokens k"]]:
    """The reference of `operation.route`."""
    layer_bias = take(bias, layer)

    def route_tile(scores: Array) -> tuple[Array, Array]:
        _, experts = lax.top_k(scores + layer_bias, per_token)
        weights = jnp.take_along_axis(scores, experts, axis=-1)
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
        return experts, weights * scaling

    experts, weights = map_row_tiles(route_tile, scores)
    return jnp.where(positions[:, None] >= 0, experts, scores.shape[1]), weights


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
) -> Float[Array, "tokens hidden"]:
    """The reference of `operation.run_experts`."""
    share = _bind(shared, (layer,), offset, round_inputs, rows.dtype)
    routed_sum = _run_routed(rows, experts, weights, layer, offset, routed, round_inputs)
    return routed_sum + map_row_tiles(share, rows)


def _run_routed(
    rows: Float[Array, "tokens hidden"],
    experts: Int[Array, "tokens k"],
    weights: Float[Array, "tokens k"],
    layer: Scalar,
    offset: Scalar,
    stack: GatedStack,
    round_inputs: bool,
) -> Float[Array, "tokens hidden"]:
    """Each token's weighted sum of the outputs of routed experts.

    Tokens are grouped by expert in row tiles, and only tiles that hold a token are computed.
    """
    num_tokens, per_token = experts.shape
    dispatch = ExpertDispatch(experts.reshape(-1), stack.gate.weight.shape[1])
    # One zero row at the end stands for the empty rows of a tile.
    padded = jnp.pad(rows, ((0, 1), (0, 0)))
    source = jnp.full((dispatch.num_rows,), num_tokens, jnp.int32)
    source = source.at[dispatch.row].set(
        jnp.arange(num_tokens * per_token, dtype=jnp.int32) // per_token, mode="drop"
    )

    def run_expert(state: tuple[Array, Array]) -> tuple[Array, Array]:
        """All tiles of the expert of a tile, whose weights are taken out of the stack once."""
        first, outputs = state
        number = dispatch.tile_expert[first]
        expert = _bind(stack, (layer, number), offset, round_inputs, rows.dtype)

        def run_tile(tile: Array, outputs: Array) -> Array:
            start = tile * ROW_TILE
            inputs = padded[lax.dynamic_slice_in_dim(source, start, ROW_TILE)]
            return lax.dynamic_update_slice_in_dim(outputs, expert(inputs), start, 0)

        end = dispatch.tiles_end[number]
        return end, lax.fori_loop(first, end, run_tile, outputs)

    # Nothing is read that no tile has written.
    outputs = lax.empty((dispatch.num_rows, rows.shape[1]), rows.dtype)
    _, outputs = lax.while_loop(
        lambda state: state[0] < dispatch.tiles_end[-1],
        run_expert,
        (jnp.int32(0), outputs),
    )
    picked = outputs.at[dispatch.row].get(mode="fill", fill_value=0)
    picked = picked.reshape(num_tokens, per_token, -1)

    def combine(picked: Array, weights: Array) -> Array:
        total = jnp.zeros(picked.shape[::2], jnp.float32)
        for rank in range(per_token):
            total += weights[:, rank, None] * picked[:, rank].astype(jnp.float32)
        return total.astype(picked.dtype)

    return map_row_tiles(combine, picked, weights)


class ExpertDispatch:
    """Where each (token, expert) pair goes in a buffer of tiles that hold one expert's rows each.

    Attributes:
        num_rows: static number of rows of the buffer.
        tiles_end: the tile behind each expert's last.
        tile_expert: expert of each tile.
        row: row of the buffer of each pair; `num_rows` for padding.
    """

    def __init__(self, experts: Int[Array, " pairs"], num_experts: int) -> None:
        pairs = experts.shape[0]
        max_tiles = (pairs + min(num_experts, pairs) * (ROW_TILE - 1)) // ROW_TILE
        self.num_rows = max_tiles * ROW_TILE
        counts = jnp.zeros((num_experts,), jnp.int32).at[experts].add(1, mode="drop")
        tiles = -(-counts // ROW_TILE)
        self.tiles_end = jnp.cumsum(tiles, dtype=jnp.int32)
        tile_numbers = jnp.arange(max_tiles)[:, None]
        self.tile_expert = jnp.sum(tile_numbers >= self.tiles_end, axis=1, dtype=jnp.int32)
        first_row = (self.tiles_end - tiles) * ROW_TILE
        first_pair = jnp.cumsum(counts) - counts
        order = jnp.argsort(experts, stable=True)
        ordered = jnp.minimum(experts[order], num_experts - 1)
        row = first_row[ordered] + jnp.arange(pairs) - first_pair[ordered]
        row = jnp.where(experts[order] < num_experts, row, self.num_rows)
        self.row = jnp.zeros((pairs,), jnp.int32).at[order].set(row.astype(jnp.int32))


def _bind(
    stack: GatedStack,
    index: tuple[Scalar, ...],
    offset: Scalar,
    round_inputs: bool,
    dtype: jax.typing.DTypeLike,
) -> Callable[[Array], Array]:
    """A function from rows to this device's part of an expert's outputs."""

    def bind(matrices: ExpertMatrices, starts: tuple[Scalar, Scalar]) -> Callable[[Array], Array]:
        matrix = take(matrices.weight, *index)
        if matrices.scale is not None:
            matrix = dequantize(matrix, take(matrices.scale, *index), starts, dtype)

        def apply(rows: Array) -> Array:
            if round_inputs:
                rows = round_to_e4m3(rows)
            return multiply(rows, matrix).astype(rows.dtype)

        return apply

    gate, up = (bind(each, (offset, 0)) for each in (stack.gate, stack.up))
    down = bind(stack.down, (0, offset))

    def run(rows: Array) -> Array:
        return down(jax.nn.silu(gate(rows)) * up(rows))

    return run
