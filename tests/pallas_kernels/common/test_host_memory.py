import pytest

from pallas_kernels.common import host_memory
from pallas_kernels.common.host_memory import (
    LIMIT_VARIABLE,
    limit_for,
    pinnable_bytes,
    reserve_host_memory,
)

GIB = 1 << 30


@pytest.mark.parametrize(
    ("before", "wanted_gib", "after"),
    [
        (None, 60, None),  # jax allows 64, of which transfers need 4
        (None, 60.5, "65"),
        ("80", 60.5, "80"),
        ("80", 900, "904"),
        ("much", 100, "104"),
    ],
)
def test_reservation(
    monkeypatch: pytest.MonkeyPatch, before: str | None, wanted_gib: float, after: str | None
) -> None:
    """A limit that is lowered, or less than what is to lie in host memory."""
    monkeypatch.delenv(LIMIT_VARIABLE, raising=False)
    if before is not None:
        monkeypatch.setenv(LIMIT_VARIABLE, before)
    monkeypatch.setattr(host_memory, "backends_are_initialized", lambda: False)
    reserve_host_memory(int(wanted_gib * GIB))
    assert host_memory.os.environ.get(LIMIT_VARIABLE) == after
    assert pinnable_bytes() >= wanted_gib * GIB


def test_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit that is set when jax has read it, and so believed to be in force."""
    monkeypatch.delenv(LIMIT_VARIABLE, raising=False)
    monkeypatch.setattr(host_memory, "backends_are_initialized", lambda: True)
    reserve_host_memory(100 * GIB)
    assert LIMIT_VARIABLE not in host_memory.os.environ
    assert pinnable_bytes() == 60 * GIB
    assert limit_for(100 * GIB) == 104
