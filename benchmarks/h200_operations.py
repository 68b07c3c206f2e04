"""The operations that benchmarks/h200.py checks and times; another one takes an entry more."""

from benchmarks.h200_selection import SELECTIONS
from benchmarks.h200_slabs import SLAB_OPERATIONS

OPERATIONS = SLAB_OPERATIONS | SELECTIONS
"""By name."""
