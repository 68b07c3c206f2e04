"""Norm in plain jax.numpy."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.common.pytree import pytree_dataclass
from pallas_kernels.common.quantization import QuantizedRows, quantize_rows
from pallas_kernels.common.types import Scalar


@pytree_dataclass
class NormedRows:
    """Rows before and after a norm.

    Attributes:
        residual: [tokens, width], the rows with their update.
        rows: [tokens, width], normalised.
        quantized: the normalised rows in e4m3, where asked for.
    """

    residual: Float[Array, "tokens width"]
    rows: Float[Array, "tokens width"]
    quantized: QuantizedRows | None


def rms_norm(
    rows: Float[Array, "tokens width"],
    update: Float[Array, "tokens width"] | None,
    weights: Float[Array, "layers width"],
    layer: Scalar,
    *,
    eps: float,
    quantized: bool,
) -> NormedRows:
    """The reference of `operation.rms_norm`, in float32 up to the weight."""
    residual = rows if update is None else rows + update
    values = residual.astype(jnp.float32)
    mean_square = jnp.mean(values * values, axis=-1, keepdims=True)
    normed = (values * lax.rsqrt(mean_square + eps)).astype(rows.dtype) * weights[layer]
    return NormedRows(residual, normed, quantize_rows(normed) if quantized else None)
