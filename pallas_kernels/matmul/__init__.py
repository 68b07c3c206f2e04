"""Products of token rows and matrices, each taken where it lies in a stack of parameters."""

from pallas_kernels.matmul.matrix_stack import MatrixStack, take
from pallas_kernels.matmul.operation import bind, bind_together
from pallas_kernels.matmul.reference import dequantize, multiply, round_to_e4m3

__all__ = [
    "MatrixStack",
    "bind",
    "bind_together",
    "dequantize",
    "multiply",
    "round_to_e4m3",
    "take",
]
