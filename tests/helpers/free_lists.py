"""Free lists whose order tells indices apart."""

from kvcache.tiers.free_list import FreeList


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
