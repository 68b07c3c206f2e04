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
from glm53.model.sharding import RULES
from kvcache.device.store import MESH_AXIS
from pallas_kernels.experts import ExpertMatrices, GatedStack, StepKind, route, run_experts
from pallas_kernels.matmul import MatrixStack, bind, bind_together

_INTERMEDIATE = "expert_intermediate"


class GatedMLP(nnx.Module):
    """A stack of down(silu(gate x) * up x); the intermediate axis is sharded."""

    def __init__(self, config: GLMConfig, stack: tuple[int, ...], width: int, axis: str) -> None:
        hidden = config.hidden_size
        self.gate_proj = Linear(config, stack, (width, hidden), (axis, "hidden"))
        self.up_proj = Linear(config, stack, (width, hidden), (axis, "hidden"))
        self.down_proj = Linear(config, stack, (hidden, width), ("hidden", axis))

    def bind(self, *index: Index, many_rows: bool) -> RowFunction:
        """A function from rows [t, hidden] to this device's part of their outputs.

        Args:
            index: where in the stack the MLP is.
            many_rows: see `bind_together`.
        """
        first = bind_together(
            [self.gate_proj.stack, self.up_proj.stack], [index, index], many_rows=many_rows
        )
        down = self.down_proj.bind(*index, many_rows=many_rows)

        def apply(rows: Array) -> Array:
            gate, up = first(rows)
            return down(jax.nn.silu(gate) * up)

        return apply

    def stack(self) -> GatedStack:
        """This device's part of all matrices."""
        parts = (self.gate_proj, self.up_proj, self.down_proj)
        return GatedStack(
            *(
                ExpertMatrices(part.weight[...], None if part.scale is None else part.scale[...])
                for part in parts
            )
        )


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

    def bind(self, layer: Index, *, many_rows: bool) -> Callable[[Array], Array]:
        """A function from rows [tokens, hidden] to scores [tokens, experts].

        Args:
            layer: which sparse layer.
            many_rows: see `bind_together`.
        """
        stack = MatrixStack(weight=self.weight[...], scale=None, dtype=self.weight[...].dtype)
        score = bind(stack, layer, dtype=jnp.float32, many_rows=many_rows)
        return lambda rows: jax.nn.sigmoid(score(rows))


class MixtureOfExperts(nnx.Module):
    """Routed experts and the shared expert of all sparse layers."""

    def __init__(self, config: GLMConfig) -> None:
        layers, width = config.num_sparse_layers, config.moe_intermediate_size
        self.gate = Router(config)
        self.experts = GatedMLP(config, (layers, config.n_routed_experts), width, _INTERMEDIATE)
        self.shared_experts = GatedMLP(
            config, (layers,), width * config.n_shared_experts, _INTERMEDIATE
        )
        self.config = config

    def run(
        self,
        layer: Index,
        rows: Float[Array, "tokens hidden"],
        scores: Float[Array, "tokens experts"],
        positions: Int[Array, " tokens"],
        kind: StepKind,
    ) -> Float[Array, "tokens hidden"]:
        """This device's part of each token's expert outputs.

        Args:
            layer: which sparse layer.
            rows: inputs.
            scores: the router's.
            positions: negative for padding.
            kind: kind of step.
        """
        experts, weights = route(
            scores,
            self.gate.e_score_correction_bias[...],
            positions,
            layer,
            per_token=self.config.num_experts_per_tok,
            scaling=self.config.routed_scaling_factor,
        )
        routed = self.experts.stack()
        width = routed.gate.weight.shape[-2]
        offset = lax.axis_index(MESH_AXIS) * width if RULES[_INTERMEDIATE] else 0
        return run_experts(
            rows,
            experts,
            weights,
            layer,
            offset,
            routed,
            self.shared_experts.stack(),
            round_inputs=self.experts.gate_proj.rounds_inputs,
            kind=kind,
        )
