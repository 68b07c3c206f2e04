"""Products of token rows and matrices, each taken where it lies in a stack of parameters."""

from pallas_kernels.matmul.matrix_stack import MatrixStack
from pallas_kernels.matmul.operation import bind, bind_together

__all__ = ["MatrixStack", "bind", "bind_together"]
