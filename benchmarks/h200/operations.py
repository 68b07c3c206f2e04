"""Table of the operations that `kernels.py` checks and times."""

from benchmarks.h200.selection_operations import SELECTIONS
from benchmarks.h200.slab_operations import SLAB_OPERATIONS

OPERATIONS = SLAB_OPERATIONS | SELECTIONS
"""Operations by name."""
