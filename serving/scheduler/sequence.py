"""A sequence, as its owner gives it to the scheduler, and what the scheduler keeps of it."""

import dataclasses
import enum
from typing import Protocol, runtime_checkable

from kvcache.counters import CacheCounters
from kvcache.prefix.tree import EncodedTokens


@runtime_checkable
class Schedulable(Protocol):
    """A prompt and what has been generated for it: `serving.requests.request.Continuation`.

    Compared by identity. The scheduler reads it and never changes it.

    Attributes:
        token_ids: the prompt.
        output_ids: tokens generated whose results are known.
        max_tokens: most tokens to generate.
        priority: higher goes first.
    """

    token_ids: list[int]
    output_ids: list[int]
    max_tokens: int
    priority: int

    @property
    def reuse_prefix(self) -> bool:
        """Whether cached rows may stand for computed ones."""
        ...

    @property
    def finished(self) -> bool:
        """Whether it wants no more tokens."""
        ...


class Phase(enum.Enum):
    """Where a sequence stands.

    WAITING: has never had a slot. HELD: so too, and waits for the same prompt of another to be
    computed. PREFILLING: has a slot, and tokens that are known and not launched. DECODING: has a
    slot, and all known tokens are launched. DRAINING: its last token is launched. PREEMPTED: lost
    its slot and waits for another.
    """

    WAITING = enum.auto()
    HELD = enum.auto()
    PREFILLING = enum.auto()
    DECODING = enum.auto()
    DRAINING = enum.auto()
    PREEMPTED = enum.auto()


@dataclasses.dataclass(eq=False, slots=True)
class ScheduledSequence:
    """The scheduler's record of a sequence.

    Attributes:
        sequence: what its owner gave.
        number: counts sequences in the order in which they came.
        launched_before: prompt tokens that had been launched when it came.
        remaining: prompt tokens to launch, as far as that is known.
        num_tokens: tokens that are known, of prompt and output.
        num_left: output tokens that no launch chooses yet.
        phase: where it stands.
        slot: its slot, or None.
        opened: counts first openings; None before its own.
        was_preempted: whether it has lost a slot.
        tokens: prompt and output so far, while it has no slot, if they were looked at, and while
            it prefills.
        in_flight: launches that choose a token and whose results are not known.
        started: whether a chunk has been launched since it got its slot.
        counters: what the cache did for it in slots that it had before.
    """

    sequence: Schedulable
    number: int
    launched_before: int
    remaining: int
    num_tokens: int
    num_left: int
    phase: Phase = Phase.WAITING
    slot: int | None = None
    opened: int | None = None
    was_preempted: bool = False
    tokens: EncodedTokens | None = None
    in_flight: int = 0
    started: bool = False
    counters: CacheCounters = dataclasses.field(default_factory=CacheCounters)

    @property
    def num_rows(self) -> int:
        """Rows launched or found since it got its slot."""
        if self.phase is Phase.PREFILLING:
            return self.num_tokens - self.remaining
        # The row of the newest token is launched with the choice of the next.
        return self.num_tokens + self.in_flight - 1

    def known_tokens(self) -> EncodedTokens:
        """Prompt and output so far, kept for the next time: they do not grow before it decodes."""
        if self.tokens is None:
            prompt, output = self.sequence.token_ids, self.sequence.output_ids
            self.tokens = EncodedTokens(prompt + output if output else prompt)
        return self.tokens

    @property
    def precedence(self) -> tuple[int, int]:
        """Greater is preempted first: of lowest priority, then opened last."""
        assert self.opened is not None, "a sequence that has never run is not preempted"
        return -self.sequence.priority, self.opened
