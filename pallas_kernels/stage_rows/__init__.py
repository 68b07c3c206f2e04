"""Rows and pages of host memory brought to the device for one step."""

from pallas_kernels.stage_rows.operation import stage_pages, stage_rows

__all__ = ["stage_pages", "stage_rows"]
