"""Products in float64, to compare kernels with."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.common.product import round_to_e4m3
from pallas_kernels.matmul import MatrixStack


def exact_products(
    stack: MatrixStack, index: tuple[int, ...], rows: jax.Array
) -> tuple[np.ndarray, np.ndarray]:
    """Products in float64, and the sums of their terms' magnitudes; a part is the last."""
    weight = np.asarray(stack.weight[index].astype(jnp.float32), np.float64)
    if stack.scale is not None:
        scale = np.asarray(stack.scale[index], np.float64)
        scale = scale.repeat(128, axis=0).repeat(128, axis=1)
        if stack.output_part is not None:
            scale = scale[-weight.shape[0] :]
        if stack.input_part is not None:
            scale = scale[:, -weight.shape[1] :]
        weight = weight * scale[: weight.shape[0], : weight.shape[1]]
    if stack.round_inputs:
        rows = round_to_e4m3(rows)
    values = np.asarray(rows.astype(jnp.float32), np.float64)
    return values @ weight.T, np.abs(values) @ np.abs(weight).T
