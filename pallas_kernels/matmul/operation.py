"""Products of token rows and matrices, each taken where it lies in a stack of parameters."""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.common import implementation as implementations
from pallas_kernels.common.implementation import Implementation
from pallas_kernels.common.types import Scalar
from pallas_kernels.matmul import many_rows as many_rows_kernel
from pallas_kernels.matmul import mosaic_gpu, reference
from pallas_kernels.matmul.matrix_stack import MatrixStack, RowsFunction
from pallas_kernels.matmul.plan import unsupported


def bind(
    stack: MatrixStack,
    *index: Scalar,
    dtype: jax.typing.DTypeLike | None = None,
    many_rows: bool = False,
    implementation: Implementation | None = None,
) -> Callable[[Float[Array, "*rows inputs"]], Float[Array, "*rows outputs"]]:
    """`bind_together` of one matrix."""
    together = bind_together(
        [stack], [index], dtype=dtype, many_rows=many_rows, implementation=implementation
    )

    def apply(rows: jax.Array) -> jax.Array:
        (product,) = together(rows)
        return product

    return apply


def bind_together(
    stacks: Sequence[MatrixStack],
    indices: Sequence[tuple[Scalar, ...]],
    *,
    dtype: jax.typing.DTypeLike | None = None,
    many_rows: bool = False,
    implementation: Implementation | None = None,
) -> RowsFunction:
    """A function from rows to their products with several matrices, in one launch.

    A product's bits depend on its row and its matrix, and on which matrices are multiplied
    together; not on the number of rows, nor on the others.

    With e4m3 weights the kernel multiplies by them and by their scale exactly, while the
    reference rounds the scaled weight to the rows' dtype: `2**-9` of each term. Beyond that the two
    differ by less than `2**-16 * sum_i |row[i] * matrix[o, i]|` before the result is rounded, from
    the order of the sum. A value below `2**-32` of the largest of its group of 128 inputs may
    differ by `2**-39` of that.

    A row with an infinity or a NaN gives infinities or NaN, and changes no other.

    Args:
        stacks: matrices of equally many inputs, plain or block-FP8 alike.
        indices: where in its stack each matrix is.
        dtype: of the products; None takes the rows'.
        many_rows: takes a kernel that is bound by the tensor cores instead of by memory, with
            launches of its own for each matrix and for the rows. Products have other bits, so
            that this must not depend on a sequence's neighbours. Rows that are rounded to e4m3
            are multiplied as such, and sums of 128 products have 14 bits.
        implementation: None takes the kernel on a GPU where it supports the shapes.

    Returns:
        A function of rows of any number, of the stacks' dtype. The reference dequantises each
        matrix here, once, and not in each call of the function.

    Raises:
        ValueError: the kernel is asked for, and does not support the shapes.
    """
    dtype = None if dtype is None else jnp.dtype(dtype)
    return implementations.run(
        implementation,
        functools.partial(reference.bind, dtype=dtype),
        functools.partial(many_rows_kernel.bind if many_rows else mosaic_gpu.bind, dtype=dtype),
        unsupported(stacks) or (many_rows_kernel.unsupported(stacks) if many_rows else None),
        stacks,
        indices,
    )
