"""Table of decode times by context, without measuring time."""

from benchmarks.common.small_checkpoint import small_fields
from benchmarks.cpu.decode_by_context import Timing, fitting_batches, format_table
from glm53.model.config import GLMConfig


def test_rest_is_compared_within_a_batch() -> None:
    """A ratio to the first row of all batches, or one that counts the selection."""
    timings = [Timing(1, 8, 5.0, 1.0), Timing(1, 16, 8.0, 2.0), Timing(4, 8, 12.0, 2.0)]
    assert format_table(timings).splitlines()[2:] == [
        "| 1 | 8 | 5.00 | 1.00 | 4.00 | 1.00 |",
        "| 1 | 16 | 8.00 | 2.00 | 6.00 | 1.50 |",
        "| 4 | 8 | 12.00 | 2.00 | 10.00 | 1.00 |",
    ]


def test_batches_follow_memory() -> None:
    """A store that is made although it does not fit."""
    config = GLMConfig.from_hf(small_fields())
    assert fitting_batches(config, 64) == (1, 4)
    assert fitting_batches(config, 1 << 40) == ()
