import pytest

from pallas_kernels.common.ring_copy import Spans, divide, lines_within, split_row


@pytest.mark.parametrize(
    ("width", "dtype", "expected"),
    [
        (164, "int32", (1, 164)),
        (576, "bfloat16", (3, 192)),
        (576, "float32", (3, 192)),
        (33, "int32", None),
        (12, "bfloat16", None),
        (260, "int32", (5, 52)),  # halves of 520 bytes are no multiples of 16
        (3072, "float32", (12, 256)),
        (3076, "float32", None),
    ],
)
def test_split_row(width: int, dtype: str, expected: tuple[int, int] | None) -> None:
    """A piece longer than a side of a box, or one that does not begin at a multiple of 16 bytes."""
    assert split_row(width, dtype) == expected


@pytest.mark.parametrize("length", range(1, 90))
def test_even_spans(length: int) -> None:
    """Spans that overlap, leave something out, or are longer than allowed."""
    for longest in (1, 2, 7, 24, 256):
        spans, covered = Spans.even(length, longest), []
        assert len(spans.sizes) <= 2
        assert max(spans.sizes) <= longest
        assert spans.count == -(-length // longest)
        for first, number, start, size in spans._parts:
            assert first == len(covered)
            covered += [range(start + i * size, start + (i + 1) * size) for i in range(number)]
        assert [row for span in covered for row in span] == list(range(length))
        assert len(covered) == spans.count


@pytest.mark.parametrize("length", range(1, 20))
def test_spans_of_given_sizes(length: int) -> None:
    """More transfers for a row than need be, or layers left out."""
    spans = Spans(length, (4, 2, 1))
    assert sum(part.number * part.size for part in spans._parts) == length
    assert spans.count == length // 4 + (length % 4).bit_count()


def test_lines_within() -> None:
    """Transfers beyond the side of a box, or none where a line is long."""
    assert lines_within(656) == 24
    assert lines_within(16) == 256
    assert lines_within(1 << 20) == 1


def test_divide() -> None:
    """Static numbers that become traced ones, where shapes depend on them."""
    assert divide(17, 5) == (3, 2)
