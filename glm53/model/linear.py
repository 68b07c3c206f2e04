"""Stacks of matrices and norms.

Block FP8: DeepSeek-V3 (arXiv:2412.19437), section 3.3.2.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from glm53.model.config import FP8_BLOCK, GLMConfig
from glm53.model.layer_plan import Index
from glm53.model.sharding import RULES, LogicalAxes
from kvcache.device.store import MESH_AXIS
from pallas_kernels.matmul import MatrixStack, bind
from pallas_kernels.rms_norm import NormedRows, rms_norm

RowFunction = Callable[[Float[Array, "*rows inputs"]], Float[Array, "*rows outputs"]]
"""Function of token rows."""


class Linear(nnx.Module):
    """A stack of matrices [*stack, outputs, inputs], plain or block-FP8.

    Scales of FP8 blocks are small and replicated, so that a block may straddle two devices.

    Attributes:
        weight: compute dtype, or e4m3.
        scale: float32 [*stack, ceil(outputs / 128), ceil(inputs / 128)], or None.
    """

    def __init__(
        self,
        config: GLMConfig,
        stack: tuple[int, ...],
        shape: tuple[int, int],
        axes: tuple[str, str],
        *,
        quantizable: bool = True,
    ) -> None:
        stack_axes: LogicalAxes = ("layers", "experts")[: len(stack)]
        quantized = config.fp8_weights and quantizable
        dtype = jnp.float8_e4m3fn if quantized else jnp.dtype(config.compute_dtype)
        self.weight = nnx.Param(
            jnp.zeros((*stack, *shape), dtype), logical_axes=(*stack_axes, *axes)
        )
        blocks = tuple(-(-size // FP8_BLOCK) for size in shape)
        self.scale = (
            nnx.Param(
                jnp.ones((*stack, *blocks), jnp.float32), logical_axes=(*stack_axes, None, None)
            )
            if quantized
            else None
        )
        self.axes = axes
        self.compute_dtype = config.compute_dtype
        self.rounds_inputs = quantized and config.activation_quantization == "fp8_1x128"

    @property
    def stack(self) -> MatrixStack:
        """This device's part of all matrices."""
        output_part, input_part = (
            lax.axis_index(MESH_AXIS) if RULES[axis] else None for axis in self.axes
        )
        return MatrixStack(
            weight=self.weight[...],
            scale=None if self.scale is None else self.scale[...],
            dtype=jnp.dtype(self.compute_dtype),
            round_inputs=self.rounds_inputs,
            output_part=output_part,
            input_part=input_part,
        )

    def bind(
        self,
        *index: Index,
        dtype: jax.typing.DTypeLike | None = None,
        many_rows: bool = False,
    ) -> RowFunction:
        """A function from rows [..., inputs] to rows [..., outputs].

        Args:
            index: where in the stack the matrix is.
            dtype: of the outputs; None takes the rows'.
            many_rows: see `bind_together`.
        """
        return bind(self.stack, *index, dtype=dtype, many_rows=many_rows)


class RMSNorm(nnx.Module):
    """A stack of root-mean-square norms: x / rms(x) in float32, cast back, times the weight."""

    def __init__(self, config: GLMConfig, stack: tuple[int, ...], width: int, eps: float) -> None:
        self.weight = nnx.Param(
            jnp.zeros((*stack, width), config.compute_dtype),
            logical_axes=(*(("layers",) * len(stack)), None),
        )
        self.eps = eps

    def bind(self, *index: Index) -> RowFunction:
        """A function that normalises rows."""
        norm = self._bind(index)
        return lambda rows: norm(rows, None).rows

    def bind_residual(self, *index: Index) -> Callable[[Array, Array], tuple[Array, Array]]:
        """A function from rows and what is added to them to their sum, and the sum normalised."""
        norm = self._bind(index)

        def apply(rows: Array, update: Array) -> tuple[Array, Array]:
            normed = norm(rows, update)
            return normed.residual, normed.rows

        return apply

    def _bind(self, index: tuple[Index, ...]) -> Callable[[Array, Array | None], NormedRows]:
        weights = self.weight[...]
        weights = weights.reshape(-1, weights.shape[-1])
        layer = index[0] if index else 0
        return lambda rows, update: rms_norm(rows, update, weights, layer, self.eps)
