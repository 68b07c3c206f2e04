"""Stacks of matrices, of which one is multiplied where it lies."""

from collections.abc import Callable
from typing import Any

from jaxtyping import Array, Float, Int, Shaped

from pallas_kernels.common.pytree import pytree_dataclass, static

Part = Int[Array, ""] | int | None
"""Number of a device's part of an axis that is divided evenly; None of an axis that is whole."""

RowsFunction = Callable[[Float[Array, "*rows inputs"]], tuple[Float[Array, "*rows outputs"], ...]]
"""Function of token rows that gives their products with each of some matrices."""


@pytree_dataclass
class MatrixStack:
    """Matrices, plain or block-FP8, whole or a device's part of each.

    Attributes:
        weight: `dtype`, or e4m3 with scales.
        scale: float32, one for each block of 128 x 128 of a whole matrix; None of plain matrices.
        dtype: of the rows that are multiplied.
        round_inputs: rows are rounded to e4m3 first, with a power-of-two scale per started group
            of 128.
        output_part: which part of the outputs the weights are.
        input_part: which part of the inputs the weights are.
    """

    weight: Shaped[Array, "*stack outputs inputs"]
    scale: Float[Array, "*stack output_blocks input_blocks"] | None
    dtype: Any = static()
    round_inputs: bool = static(default=False)
    output_part: Part = None
    input_part: Part = None

    @property
    def outputs(self) -> int:
        """Outputs of this part."""
        return self.weight.shape[-2]

    @property
    def inputs(self) -> int:
        """Inputs of this part."""
        return self.weight.shape[-1]
