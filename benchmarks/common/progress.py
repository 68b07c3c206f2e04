"""Progress of a benchmark on standard error."""

import sys
from collections.abc import Callable, Iterable, Iterator

from tqdm import tqdm

from glm53.terminal import terminal_columns


def show_progress[Run](
    runs: Iterable[Run], total: int, describe: Callable[[Run], str]
) -> Iterator[Run]:
    """Yields runs as they end, with a bar on a terminal, else with a line for each.

    Args:
        runs: results, each computed when it is asked for.
        total: how many there will be.
        describe: names a run in its line.
    """
    with_bar = terminal_columns() > 0
    for number, run in enumerate(tqdm(runs, total=total, disable=not with_bar), 1):
        if not with_bar:
            print(f"{number} of {total}: {describe(run)}", file=sys.stderr, flush=True)
        yield run
