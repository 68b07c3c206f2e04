"""Products of each head's rows and the head's own matrix, which is some rows of a stored one."""

import functools

from pallas_kernels.common import implementation as implementations
from pallas_kernels.common.implementation import Implementation
from pallas_kernels.common.types import Scalar
from pallas_kernels.matmul.matrix_stack import MatrixStack
from pallas_kernels.per_head_matmul import mosaic_gpu, reference
from pallas_kernels.per_head_matmul.plan import unsupported
from pallas_kernels.per_head_matmul.reference import HeadRows, HeadsFunction


def bind(
    stack: MatrixStack,
    *index: Scalar,
    taken: HeadRows,
    transpose: bool = False,
    implementation: Implementation | None = None,
) -> HeadsFunction:
    """A function from rows [tokens, heads, width] to the products of each head's with its matrix.

    These are the absorbed products of multi-head latent attention, DeepSeek-V2 (arXiv:2405.04434),
    section 2.1: W_UK and W_UV lie in one matrix by head, and one of them is multiplied from the
    other side.

    A product's bits depend on its row and its matrix alone. The kernel and the reference differ
    as those of `matmul.bind_together`; neither rounds rows to e4m3.

    Args:
        stack: matrices [heads * taken.per_head, inputs], plain or block-FP8; blocks of scales may
            straddle heads.
        index: where in the stack the matrix is.
        taken: the rows of each head.
        transpose: a row of `taken.count` gives a product of `inputs`, instead of the reverse.
        implementation: None takes the kernel on a GPU where it supports the shapes.

    Returns:
        A function of rows of the stack's dtype, whose products have it too. The reference
        dequantises the matrix here, once, and not in each call of the function.

    Raises:
        ValueError: the kernel is asked for, and does not support the shapes.
    """
    return implementations.run(
        implementation,
        functools.partial(reference.bind, taken=taken, transpose=transpose),
        functools.partial(mosaic_gpu.bind, taken=taken, transpose=transpose),
        unsupported(stack, taken),
        stack,
        index,
    )
