"""Norm by one warpgroup a row, which holds the row in registers.

Sums are in an order that follows from the width alone, so a row's bits do not depend on the others.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.common.quantization import (
    GROUPS,
    LEAST_SCALE,
    QuantizedRows,
    as_groups,
    quantize_groups,
)
from pallas_kernels.common.types import Interpret, Ref, Scalar
from pallas_kernels.rms_norm.reference import NormedRows


def rms_norm(
    rows: Float[Array, "tokens width"],
    update: Float[Array, "tokens width"] | None,
    weights: Float[Array, "layers width"],
    layer: Scalar,
    *,
    eps: float,
    quantized: bool,
    interpret: Interpret,
) -> NormedRows:
    """The kernel of `operation.rms_norm`."""
    tokens, width = rows.shape
    rows, weights = as_groups(rows), as_groups(weights)
    inputs = [rows] if update is None else [rows, as_groups(update)]
    outputs = [jax.ShapeDtypeStruct(rows.shape, rows.dtype)] * len(inputs)
    if quantized:
        outputs += [
            jax.ShapeDtypeStruct(rows.shape, jnp.float8_e4m3fn),
            jax.ShapeDtypeStruct((rows.shape[1], tokens), jnp.float32),
        ]
    found = plgpu.kernel(
        functools.partial(_norm, has_update=update is not None, eps=eps, width=width),
        out_type=outputs,
        grid=(tokens,),
        grid_names=("token",),
        kernel_name="rms_norm",
        interpret=interpret,
    )(jnp.asarray(layer, jnp.int32).reshape(1), weights, *inputs)
    normed, *found = found
    residual = rows if update is None else found.pop(0)
    values = QuantizedRows(found[0].reshape(tokens, width), found[1]) if quantized else None
    return NormedRows(residual.reshape(tokens, width), normed.reshape(tokens, width), values)


def _norm(
    layer_ref: Ref, weights_ref: Ref, *references: Ref, has_update: bool, eps: float, width: int
) -> None:
    """The kernel: one row. References are the inputs of `rms_norm`, then its outputs: normalised
    rows, the residual if there is an update, and quantised values and scales."""
    token = lax.axis_index("token")
    rows_ref, *refs = references
    update_ref = refs.pop(0) if has_update else None
    normed_ref, *refs = refs
    values = _load(rows_ref.at[token])
    if update_ref is not None:
        residual_ref = refs.pop(0)
        values = (values + _load(update_ref.at[token])).astype(rows_ref.dtype)
        residual_ref.at[token][...] = values
        values = values.astype(jnp.float32)
    factor = lax.rsqrt(_sum(values * values) / width + eps)
    normed = (values * factor).astype(rows_ref.dtype).astype(jnp.float32)
    normed = (normed * _load(weights_ref.at[layer_ref[0]])).astype(rows_ref.dtype)
    normed_ref.at[token][...] = normed
    if refs:
        codes, scale = quantize_groups(normed.astype(jnp.float32), LEAST_SCALE)
        codes_ref, scale_ref = refs
        codes_ref.at[token][...] = codes
        scale_ref.at[:, token][...] = lax.bitcast_convert_type(scale, jnp.float32)


def _load(groups: Ref) -> jax.Array:
    return plgpu.load(groups, layout=GROUPS, optimized=False).astype(jnp.float32)


def _sum(values: jax.Array) -> jax.Array:
    return jnp.sum(jnp.sum(jnp.sum(values, axis=-1), axis=-1))
