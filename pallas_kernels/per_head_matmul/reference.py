"""Products of each head's rows and the head's own matrix in plain jax.numpy."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.common.row_tiles import ROW_TILE, map_row_tiles
from pallas_kernels.common.types import Scalar
from pallas_kernels.matmul.matrix_stack import MatrixStack
from pallas_kernels.matmul.reference import dequantized

HeadsFunction = Callable[
    [Float[Array, "tokens heads width"]], Float[Array, "tokens heads products"]
]
"""Function of the rows of each head of each token."""


@dataclasses.dataclass(frozen=True)
class HeadRows:
    """The rows of a stored matrix that are each head's own matrix.

    Attributes:
        per_head: rows of a head, those of one head after those of another.
        first: the first of them that is taken.
        count: how many are taken.
    """

    per_head: int
    first: int
    count: int


def bind(
    stack: MatrixStack, index: tuple[Scalar, ...], taken: HeadRows, transpose: bool
) -> HeadsFunction:
    """`operation.bind`; dequantises the matrix once."""
    matrices = dequantized(stack, *index).reshape(-1, taken.per_head, stack.inputs)
    matrices = matrices[:, taken.first : taken.first + taken.count]

    def multiply(rows: jax.Array) -> jax.Array:
        product = lax.dot_general(
            rows.astype(jnp.float32),
            matrices.astype(jnp.float32),
            (((2,), (1 if transpose else 2,)), ((1,), (0,))),
            precision=lax.Precision.HIGHEST,
        )
        return product.transpose(1, 0, 2).astype(rows.dtype)

    def apply(rows: jax.Array) -> jax.Array:
        return multiply(rows) if rows.shape[0] <= ROW_TILE else map_row_tiles(multiply, rows)

    return apply
