"""Plans of launches, which the scheduler hands out, and results, which it takes."""

import dataclasses
from typing import Protocol, runtime_checkable

from serving.scheduler.sequence import Sequence


@dataclasses.dataclass(frozen=True, slots=True)
class PrefillChunk[SequenceT: Sequence]:
    """Launch of a piece of a prompt, or of what a preempted sequence had.

    Attributes:
        sequence: the sequence.
        slot: its slot.
        start: position of the first token.
        token_ids: the tokens.
        is_first: nothing has been launched for the sequence since it got this slot.
        is_last: the launch samples the next token.
    """

    sequence: SequenceT
    slot: int
    start: int
    token_ids: list[int]
    is_first: bool
    is_last: bool


@dataclasses.dataclass(frozen=True, slots=True)
class DecodeBatch[SequenceT: Sequence]:
    """Launch of one more token of each sequence.

    Attributes:
        sequences: the sequences, by slot.
    """

    sequences: dict[int, SequenceT]


type Plan[SequenceT: Sequence] = PrefillChunk[SequenceT] | DecodeBatch[SequenceT]
"""A launch, whose pages are ready."""


@runtime_checkable
class StepResult[SequenceT: Sequence](Protocol):
    """Result of a launch for one sequence."""

    @property
    def sequence(self) -> SequenceT:
        """The sequence."""
        ...

    @property
    def token(self) -> int | None:
        """The token that the launch sampled, None if it samples none."""
        ...
