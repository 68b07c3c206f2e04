"""The operations that `kernels.py` checks and times; another one takes an entry more."""

from benchmarks.h200.selection_operations import SELECTIONS
from benchmarks.h200.slab_operations import SLAB_OPERATIONS

OPERATIONS = SLAB_OPERATIONS | SELECTIONS
"""By name."""
