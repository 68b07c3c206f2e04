"""Indices of a tier that nothing holds."""

from collections.abc import Iterable, Iterator


class FreeList:
    """Free page indices of one tier, handed to all that take from it.

    Args:
        indices: all indices of the tier, of which the last is taken first, as are those that are
            given back.
    """

    def __init__(self, indices: Iterable[int]) -> None:
        self._free = list(indices)
        self._all = sorted(self._free)

    def __len__(self) -> int:
        return len(self._free)

    def __iter__(self) -> Iterator[int]:
        return iter(self._free)

    def take(self) -> int:
        """Takes an index out.

        Raises:
            IndexError: none is free.
        """
        return self._free.pop()

    def give_back(self, index: int) -> None:
        """Makes an index free."""
        self._free.append(index)

    def check_integrity(self, held: Iterable[int]) -> None:
        """Proves that every index is free or held, once.

        Args:
            held: indices that are held.

        Raises:
            AssertionError: naming the indices as they are.
        """
        indices = sorted([*self._free, *held])
        assert indices == self._all, f"indices lost or doubled: {indices}"
