"""MLA attention of query rows over the physical rows selected for each."""

from pallas_kernels.sparse_attention.operation import (
    merge_attention,
    prepare_query,
    sparse_attention,
)

__all__ = ["merge_attention", "prepare_query", "sparse_attention"]
