"""New rows, in their row format, written to their pages."""

from pallas_kernels.append_rows.operation import append_rows

__all__ = ["append_rows"]
