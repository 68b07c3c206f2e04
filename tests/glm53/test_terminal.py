"""Whether there is a place for a progress bar."""

import io
import sys

import pytest

from glm53.terminal import terminal_columns
from tests.helpers.terminal import terminal


@pytest.mark.parametrize("columns", [0, 1, 80])
def test_terminals(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    """A bar where tqdm prints nothing."""
    with terminal(columns) as shown:
        monkeypatch.setattr(sys, "stderr", shown.stream)
        assert terminal_columns() == columns


def test_other_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bar in a file, or an error where standard error is closed or has no descriptor."""
    for stream in (None, io.StringIO()):
        monkeypatch.setattr(sys, "stderr", stream)
        assert terminal_columns() == 0
    shell = io.StringIO()
    monkeypatch.setattr(shell, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", shell)
    assert terminal_columns() == 80
