"""Bucket sizes, and which are chosen."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm53.model.kv_geometry import kv_geometry
from glm53.model.presets import preset
from serving.engine.buckets import Buckets, fit


def buckets(max_model_len: int, max_sequences: int, chunk: int) -> Buckets:
    geometry = kv_geometry(
        preset("test-small"),
        row_kind="float32",
        device_pages=4,
        max_model_len=max_model_len,
        max_sequences=max_sequences,
    )
    return Buckets.for_geometry(geometry, chunk)


@given(st.integers(1, 200_000), st.integers(1, 300), st.integers(1, 9000))
def test_buckets_cover_every_size(max_model_len: int, sequences: int, chunk: int) -> None:
    """Ascending, and the last is exactly the limit."""
    made = buckets(max_model_len, sequences, chunk)
    for sizes, last in (
        (made.rows, chunk),
        (made.sequences, sequences),
        (made.context_pages, -(-max_model_len // 64)),
    ):
        assert sizes[-1] == last
        assert list(sizes) == sorted(set(sizes))


@given(st.integers(1, 5000), st.integers(1, 2000))
def test_chunks_of_a_prompt(length: int, chunk: int) -> None:
    """A prompt ends after few steps, none of which is mostly padding unless it is the smallest."""
    made = buckets(8192, 8, chunk)
    steps, left = 0, length
    while left > 0:
        rows = made.chunk(left)
        assert rows in made.rows
        assert rows <= 2 * left or rows == made.rows[0]
        left -= rows
        steps += 1
    assert steps <= length // chunk + 3 * len(made.rows)


def test_too_large() -> None:
    """A size beyond the last bucket is an error, never a silent clamp."""
    with pytest.raises(ValueError, match="5 exceeds the largest bucket 4"):
        fit((1, 2, 4), 5)
