"""MLA attention of query rows over the physical rows selected for each."""

from pallas_kernels.sparse_attention.reference import merge_attention, sparse_attention

__all__ = ["merge_attention", "sparse_attention"]
