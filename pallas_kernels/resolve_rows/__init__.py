"""Resolution of selected rows: which are cached, which must be staged, and which they replace."""

from pallas_kernels.resolve_rows.operation import resolve_rows
from pallas_kernels.resolve_rows.reference import Resolution
from pallas_kernels.resolve_rows.row_cache import RowCache, SelectedRows

__all__ = ["Resolution", "RowCache", "SelectedRows", "resolve_rows"]
