"""Root-mean-square norm of token rows, after what is added to them."""

from pallas_kernels.rms_norm.operation import rms_norm
from pallas_kernels.rms_norm.reference import NormedRows

__all__ = ["NormedRows", "rms_norm"]
