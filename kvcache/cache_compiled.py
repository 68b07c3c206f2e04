"""What engines of equal sizes in one process share."""

import functools

cache_compiled = functools.lru_cache(maxsize=16)
"""Decorates what makes jitted functions, so that the engines of as many sizes compile them once."""
