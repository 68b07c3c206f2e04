"""Whole pages between the device slab and host memory, and within the slab."""

from pallas_kernels.move_pages.operation import copy_pages, offload_pages, onload_pages

__all__ = ["copy_pages", "offload_pages", "onload_pages"]
