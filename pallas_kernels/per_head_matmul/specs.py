"""Shapes of products by head: GLM-5.3's on one H200 of eight, and small odd ones."""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.matmul.matrix_stack import MatrixStack
from pallas_kernels.matmul.specs import MatmulSpec
from pallas_kernels.per_head_matmul.reference import HeadRows


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PerHeadSpec:
    """A stored matrix, and the rows of each head that are multiplied.

    Attributes:
        matrix: the stored matrices.
        taken: rows of a head.
        transpose: they are the inputs of the product.
    """

    matrix: MatmulSpec
    taken: HeadRows
    transpose: bool

    @property
    def heads(self) -> int:
        """Heads of a device."""
        return self.matrix.outputs[0] // self.taken.per_head

    @property
    def stack(self) -> MatrixStack:
        """Shapes of the stack."""
        return self.matrix.stacks()[0]

    def rows(self, tokens: int) -> jax.ShapeDtypeStruct:
        """[tokens, heads, width]."""
        width = self.taken.count if self.transpose else self.matrix.inputs
        return jax.ShapeDtypeStruct((tokens, self.heads, width), jnp.bfloat16)


def _both(name: str, matrix: MatmulSpec, keys: HeadRows, values: HeadRows) -> dict:
    return {
        f"{name}_{'fp8' if matrix.fp8 else 'bfloat16'}_{which}": PerHeadSpec(
            matrix=matrix, taken=taken, transpose=which == "keys"
        )
        for which, taken in (("keys", keys), ("values", values))
    }


_GLM = (HeadRows(448, 0, 192), HeadRows(448, 192, 256))
# Blocks of scales straddle heads.
_ODD = (HeadRows(192, 0, 128), HeadRows(192, 128, 64))
SPECS: dict[str, PerHeadSpec] = {}
"""By name."""
for _fp8 in (True, False):
    _stored = MatmulSpec(stack=(79,), outputs=(3584,), inputs=512, fp8=_fp8, parts=(8, 1))
    SPECS |= _both("glm", _stored, *_GLM)
    _stored = MatmulSpec(stack=(2,), outputs=(384,), inputs=256, fp8=_fp8, parts=(2, 1))
    SPECS |= _both("odd", _stored, *_ODD)
