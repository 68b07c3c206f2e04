"""The gated MLP, dense or as experts.

Mixture of experts: DeepSeek-V3 (arXiv:2412.19437), equations 12 to 16.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from glm53.model.config import GLMConfig
from glm53.model.layer_plan import Index
from glm53.model.linear import Linear, RowFunction
from glm53.model.row_tiles import ROW_TILE, map_row_tiles
from pallas_kernels.matmul import multiply, take


class GatedMLP(nnx.Module):
    """A stack of down(silu(gate x) * up x); the intermediate axis is sharded."""

    def __init__(self, config: GLMConfig, stack: tuple[int, ...], width: int, axis: str) -> None:
        hidden = config.hidden_size
        self.gate_proj = Linear(config, stack, (width, hidden), (axis, "hidden"))
        self.up_proj = Linear(config, stack, (width, hidden), (axis, "hidden"))
        self.down_proj = Linear(config, stack, (hidden, width), ("hidden", axis))

    def bind(self, *index: Index) -> RowFunction:
        """A function from rows [t, hidden] to this device's part of their outputs."""
        parts = (self.gate_proj, self.up_proj, self.down_proj)
        gate, up, down = (part.bind(*index) for part in parts)

        def apply(rows: Array) -> Array:
            return down(jax.nn.silu(gate(rows)) * up(rows))

        return apply


class Router(nnx.Module):
    """Router of tokens to experts: sigmoid scores in float32, and a bias that takes part in the
    choice of experts, not in their weights."""

    def __init__(self, config: GLMConfig) -> None:
        layers, experts = config.num_sparse_layers, config.n_routed_experts
        self.weight = nnx.Param(
            jnp.zeros((layers, experts, config.hidden_size), config.compute_dtype),
            logical_axes=("layers", "experts", "hidden"),
        )
        self.e_score_correction_bias = nnx.Param(
            jnp.zeros((layers, experts), jnp.float32), logical_axes=("layers", "experts")
        )
        self.config = config

    def bind(self, layer: Index) -> Callable[[Array], tuple[Array, Array]]:
        """A function from rows [tokens, hidden] to experts and their weights, both [tokens, k]."""
        weight = take(self.weight[...], layer).astype(jnp.float32)
        bias = take(self.e_score_correction_bias[...], layer)

        def apply(rows: Array) -> tuple[Array, Array]:
            scores = jax.nn.sigmoid(multiply(rows.astype(jnp.float32), weight))
            _, experts = lax.top_k(scores + bias, self.config.num_experts_per_tok)
            weights = jnp.take_along_axis(scores, experts, axis=-1)
            weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
            return experts, weights * self.config.routed_scaling_factor

        return apply


class MixtureOfExperts(nnx.Module):
    """Routed experts and the shared expert of all sparse layers."""

    def __init__(self, config: GLMConfig) -> None:
        layers, width = config.num_sparse_layers, config.moe_intermediate_size
        self.gate = Router(config)
        self.experts = GatedMLP(
            config, (layers, config.n_routed_experts), width, "expert_intermediate"
        )
        self.shared_experts = GatedMLP(
            config, (layers,), width * config.n_shared_experts, "expert_intermediate"
        )
        self.num_experts = config.n_routed_experts

    def run_experts(
        self,
        layer: Index,
        rows: Float[Array, "tokens hidden"],
        experts: Int[Array, "tokens k"],
        weights: Float[Array, "tokens k"],
    ) -> Float[Array, "tokens hidden"]:
        """This device's part of each token's weighted sum of expert outputs.

        Tokens are grouped by expert in row tiles, and only tiles that hold a token are computed.

        Args:
            layer: which sparse layer.
            rows: inputs.
            experts: experts of each token; `num_experts` marks padding.
            weights: float32 weight of each.
        """
        num_tokens, per_token = experts.shape
        dispatch = ExpertDispatch(experts.reshape(-1), self.num_experts)
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
            expert = self.experts.bind(layer, number)

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
