"""Public function that normalises rows."""

import functools

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.common.implementation import Implementation, run
from pallas_kernels.common.quantization import unsupported_width
from pallas_kernels.common.types import Scalar
from pallas_kernels.rms_norm import mosaic_gpu, reference
from pallas_kernels.rms_norm.reference import NormedRows


def rms_norm(
    rows: Float[Array, "tokens width"],
    update: Float[Array, "tokens width"] | None,
    weights: Float[Array, "layers width"],
    layer: Scalar,
    eps: float,
    *,
    quantized: bool = False,
    implementation: Implementation | None = None,
) -> NormedRows:
    """Adds an update to rows and normalises the sum: x / rms(x), times the weight.

    Root mean square layer normalization: Zhang and Sennrich (arXiv:1910.07467).

    Args:
        rows: the residual stream, or any rows.
        update: what a part of a layer adds to it, in the same dtype.
        weights: weights of all layers' norms.
        layer: the layer.
        eps: added to the mean square.
        quantized: whether block-FP8 products take the result.
        implementation: None takes the kernel on a GPU where it supports the shapes.

    Raises:
        ValueError: the kernel is asked for, and does not support the shapes.
    """
    sizes = {"eps": eps, "quantized": quantized}
    return run(
        implementation,
        functools.partial(reference.rms_norm, **sizes),
        functools.partial(mosaic_gpu.rms_norm, **sizes),
        _unsupported(rows),
        rows,
        update,
        weights,
        layer,
    )


def _unsupported(rows: Float[Array, "tokens width"]) -> str | None:
    """Why the kernel cannot normalise rows, None if it can."""
    if rows.dtype != jnp.bfloat16:
        return f"rows of {rows.dtype}, not bfloat16"
    return unsupported_width(rows.shape[1])
