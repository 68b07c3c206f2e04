"""Listed rows of one layer read from host memory into a buffer on the device."""

from pallas_kernels.fetch_rows.operation import fetch_rows

__all__ = ["fetch_rows"]
