"""Which selected rows are hot, which must come from host memory, and which they replace."""

from pallas_kernels.resolve_rows.reference import Resolution, resolve_rows

__all__ = ["Resolution", "resolve_rows"]
