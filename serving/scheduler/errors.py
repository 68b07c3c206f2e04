"""Errors of the scheduler."""

from kvcache.page_pool import OutOfPagesError
from serving.scheduler.sequence import Sequence


class SequenceOutOfPagesError(OutOfPagesError):
    """A sequence cannot have its pages. It is still with the scheduler: `finish` it.

    Attributes:
        sequence: the sequence.
    """

    def __init__(self, sequence: Sequence, message: str) -> None:
        super().__init__(message)
        self.sequence = sequence


def does_not_fit(sequence: Sequence, num_tokens: int, reason: str) -> SequenceOutOfPagesError:
    """The error of a sequence that does not fit even alone."""
    return SequenceOutOfPagesError(
        sequence,
        f"a sequence of {num_tokens} tokens does not fit even alone ({reason}): raise "
        "device_pages or host_memory_gib",
    )
