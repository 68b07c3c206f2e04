"""Stacks of matrices and norms, and the matrix product they share.

Block FP8: DeepSeek-V3 (arXiv:2412.19437), section 3.3.2.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Shaped

from glm53.model.config import FP8_BLOCK, GLMConfig
from glm53.model.layer_plan import Index
from glm53.model.sharding import RULES, LogicalAxes
from kvcache.device.store import MESH_AXIS
from pallas_kernels.common.row_format import quantize_e4m3, spread

RowFunction = Callable[[Float[Array, "*rows inputs"]], Float[Array, "*rows outputs"]]
"""Function of token rows."""

_LEAST_ACTIVATION_SCALE = 1e-10 / 448


def take(stack: Shaped[Array, "..."], *index: Index) -> Shaped[Array, "..."]:
    """The entry of a stack at the given leading indices, as one slice."""
    starts = (*index, *[0] * (stack.ndim - len(index)))
    sizes = (*[1] * len(index), *stack.shape[len(index) :])
    return lax.dynamic_slice(stack, starts, sizes).reshape(sizes[len(index) :])


def matmul(
    rows: Float[Array, "*rows inputs"], matrix: Float[Array, "outputs inputs"]
) -> Float[Array, "*rows outputs"]:
    """Product of rows and a matrix stored output-major, accumulated in float32."""
    return lax.platform_dependent(rows, matrix, cpu=_cpu_product, default=_product)


def _product(rows: jax.Array, matrix: jax.Array) -> jax.Array:
    return lax.dot_general(
        rows,
        matrix,
        (((rows.ndim - 1,), (1,)), ((), ())),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )


def _cpu_product(rows: jax.Array, matrix: jax.Array) -> jax.Array:
    """The product as XLA:CPU does it best: the matrix first, which is then not packed anew.

    It takes half the time or less. The barriers keep XLA from turning it back. In float32, because
    some products of bfloat16 are missing; the terms are the same exact ones.
    """
    inputs = rows.shape[-1]
    columns = lax.optimization_barrier(rows.reshape(-1, inputs).astype(jnp.float32).T)
    product = lax.dot_general(
        matrix.astype(jnp.float32),
        columns,
        (((1,), (0,)), ((), ())),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    return lax.optimization_barrier(product).T.reshape(*rows.shape[:-1], -1)


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

    def matrix(self, *index: Index) -> Float[Array, "outputs inputs"]:
        """This device's part of one matrix, in the compute dtype."""
        weight = take(self.weight[...], *index)
        if self.scale is None:
            return weight
        scale = take(self.scale[...], *index)
        for dim, axis in enumerate(self.axes):
            scale = jnp.repeat(scale, FP8_BLOCK, axis=dim)
            start = lax.axis_index(MESH_AXIS) * weight.shape[dim] if RULES[axis] else 0
            scale = lax.dynamic_slice_in_dim(scale, start, weight.shape[dim], dim)
        return (weight.astype(jnp.float32) * scale).astype(self.compute_dtype)

    def bind(self, *index: Index) -> RowFunction:
        """A function from rows [..., inputs] to rows [..., outputs] in the rows' dtype."""
        matrix = self.matrix(*index)

        def apply(rows: jax.Array) -> jax.Array:
            if self.rounds_inputs:
                rows = round_to_e4m3(rows)
            return matmul(rows, matrix).astype(rows.dtype)

        return apply


def round_to_e4m3(rows: Float[Array, "*rows width"]) -> Float[Array, "*rows width"]:
    """Rows after rounding to e4m3 with a power-of-two scale per started group of 128."""
    values, scale = quantize_e4m3(rows, _LEAST_ACTIVATION_SCALE)
    return (values.astype(jnp.float32) * spread(scale, rows.shape[-1])).astype(rows.dtype)


class RMSNorm(nnx.Module):
    """A stack of root-mean-square norms: x / rms(x) in float32, cast back, times the weight."""

    def __init__(self, config: GLMConfig, stack: tuple[int, ...], width: int, eps: float) -> None:
        self.weight = nnx.Param(
            jnp.zeros((*stack, width), config.compute_dtype),
            logical_axes=(*(("layers",) * len(stack)), None),
        )
        self.eps = eps

    def bind(self, *index: Index) -> RowFunction:
        """A function that normalises rows along their last axis."""
        weight = take(self.weight[...], *index)

        def apply(rows: jax.Array) -> jax.Array:
            values = rows.astype(jnp.float32)
            mean_square = jnp.mean(values * values, axis=-1, keepdims=True)
            return (values * lax.rsqrt(mean_square + self.eps)).astype(rows.dtype) * weight

        return apply
