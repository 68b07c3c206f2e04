"""Stacks of parameters of the experts of all layers, on one device."""

from jaxtyping import Array, Float, Shaped

from pallas_kernels.common.pytree import pytree_dataclass


@pytree_dataclass
class ExpertMatrices:
    """Matrices taken where they lie, plain or block-FP8.

    Attributes:
        weight: [layers, (experts,) outputs, inputs], this device's part.
        scale: float32 scales of the blocks of 128 x 128 of whole matrices; None of plain ones.
    """

    weight: Shaped[Array, "..."]
    scale: Float[Array, "..."] | None


@pytree_dataclass
class GatedStack:
    """Matrices of down(silu(gate x) * up x).

    Attributes:
        gate: [layers, (experts,) width, hidden].
        up: likewise.
        down: [layers, (experts,) hidden, width].
    """

    gate: ExpertMatrices
    up: ExpertMatrices
    down: ExpertMatrices
