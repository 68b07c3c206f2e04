"""Terminal that standard error may be."""

import os
import sys

_UNKNOWN_COLUMNS = 80


def terminal_columns() -> int:
    """Columns of the terminal that standard error is; 0 if there is no place for a progress bar.

    That is so where standard error is no terminal, and on a terminal that says it has no columns,
    as some pseudo-terminals do: tqdm would print nothing there.
    """
    if sys.stderr is None or not sys.stderr.isatty():
        return 0
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns
    except OSError:  # A stream without a file descriptor.
        return _UNKNOWN_COLUMNS
