import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache.tiers.free_list import FreeList


@given(indices=st.permutations(range(6)), takes=st.lists(st.booleans(), max_size=30))
def test_free_list(indices: list[int], takes: list[bool]) -> None:
    """An index handed out twice or lost, or another than the one given back last."""
    free, expected, held = FreeList(indices), list(indices), []
    for take in takes:
        if take and expected:
            held.append(free.take())
            assert held[-1] == expected.pop()
        elif held:
            expected.append(held.pop(0))
            free.give_back(expected[-1])
        assert len(free) == len(expected)
        free.check_integrity(held)


def test_integrity_check_finds_corruption() -> None:
    """An index lost or held twice that the check lets pass."""
    free = FreeList(range(3))
    for held in ([0], [2, 2], [3]):
        with pytest.raises(AssertionError, match="indices lost or doubled"):
            free.check_integrity(held)
    with pytest.raises(IndexError):
        [free.take() for _ in range(4)]
