"""Which selected rows are hot, which must come from host memory, and which they replace."""

from pallas_kernels.resolve_rows.operation import resolve_rows
from pallas_kernels.resolve_rows.reference import Resolution

__all__ = ["Resolution", "resolve_rows"]
