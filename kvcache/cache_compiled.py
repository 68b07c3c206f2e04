"""Compiled functions shared by all engines of equal sizes in a process."""

import functools

cache_compiled = functools.lru_cache(maxsize=16)
"""Decorates what makes jitted functions, so that the engines of as many sizes compile them once."""
