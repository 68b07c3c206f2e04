"""Whole pages between the device slab and host memory, and within the slab."""

from pallas_kernels.move_pages.operation import copy_pages, load_pages, store_pages

__all__ = ["copy_pages", "load_pages", "store_pages"]
