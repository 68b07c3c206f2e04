"""Free lists whose order tells indices apart."""

from typing import Any

import pytest

from kvcache.tiers.free_list import FreeList
from kvcache.tiers.residency import Residency


def device_list(count: int) -> FreeList:
    """Device pages, the last first."""
    return FreeList(range(count))


def host_list(count: int) -> FreeList:
    """Host pages from the middle on.

    Page ids are taken from the first on, so that no two of the three numbers of a page are likely
    to be the same, and one that is used for another shows.
    """
    middle = count // 2
    return FreeList([*range(middle - 1, -1, -1), *range(count - 1, middle - 1, -1)])


def use_host_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has every cache take its host pages in the order of `host_list`."""
    init = Residency.__init__

    def init_with_host_list(self: Residency, *, free_host: FreeList, **options: Any) -> None:
        init(self, free_host=host_list(len(free_host)), **options)

    monkeypatch.setattr(Residency, "__init__", init_with_host_list)
