"""Exact selection of the highest-scored positions, ties broken by position."""

from pallas_kernels.select_topk.operation import merge_topk, select_topk

__all__ = ["merge_topk", "select_topk"]
