"""Progress of a benchmark on standard error."""

import sys
from collections.abc import Callable, Iterable, Iterator

from tqdm import tqdm

from glm53.terminal import terminal_columns


def show_progress[Run](
    runs: Iterable[Run], total: int, describe: Callable[[Run], str]
) -> Iterator[Run]:
    """Yields runs as they end, with a bar on a terminal and a line for each elsewhere.

    Args:
        runs: the results, each computed when it is drawn.
        total: number of runs.
        describe: returns the text of a run's line.
    """
    with_bar = terminal_columns() > 0
    for number, run in enumerate(tqdm(runs, total=total, disable=not with_bar), 1):
        if not with_bar:
            print(f"{number} of {total}: {describe(run)}", file=sys.stderr, flush=True)
        yield run
