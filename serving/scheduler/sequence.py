"""A sequence of tokens to compute: what its owner gives, and what the scheduler keeps of it."""

import dataclasses
import enum

from kvcache.counters import CacheCounters
from kvcache.prefix.tree import EncodedTokens


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
class Sequence:
    """A prompt and what has been generated for it. Compared by identity.

    Its owner appends to `output_ids`. What follows them is the scheduler's, which begins anew with
    `enter`.

    Attributes:
        token_ids: the prompt.
        max_tokens: most tokens to generate.
        priority: higher goes first.
        cacheable: whether its rows may serve others, and those of others it.
        output_ids: tokens generated whose results are known.
        number: counts sequences in the order in which they came.
        launched_before: prompt tokens that had been launched when it came.
        remaining: prompt tokens to launch, as far as that is known.
        num_tokens: tokens that are known, of prompt and output.
        num_left: output tokens that no launch samples yet.
        phase: where it stands.
        slot: its slot, or None.
        opened: counts first openings; None before its own.
        was_preempted: whether it has lost a slot.
        encoded: prompt and output so far as the cache looks them up, while it has no slot, if they
            were looked at, and while it prefills.
        in_flight: launches that sample a token and whose results are not known.
        prefill_begun: whether a chunk has been launched since it got its slot.
        counters: what the cache did for it in slots that it had before.
    """

    token_ids: list[int]
    max_tokens: int
    priority: int = 0
    cacheable: bool = True
    output_ids: list[int] = dataclasses.field(default_factory=list)
    number: int = dataclasses.field(init=False, default=-1)
    launched_before: int = dataclasses.field(init=False, default=0)
    remaining: int = dataclasses.field(init=False, default=0)
    num_tokens: int = dataclasses.field(init=False, default=0)
    num_left: int = dataclasses.field(init=False, default=0)
    phase: Phase = dataclasses.field(init=False, default=Phase.WAITING)
    slot: int | None = dataclasses.field(init=False, default=None)
    opened: int | None = dataclasses.field(init=False, default=None)
    was_preempted: bool = dataclasses.field(init=False, default=False)
    encoded: EncodedTokens | None = dataclasses.field(init=False, default=None)
    in_flight: int = dataclasses.field(init=False, default=0)
    prefill_begun: bool = dataclasses.field(init=False, default=False)
    counters: CacheCounters = dataclasses.field(init=False, default_factory=CacheCounters)

    @property
    def reuse_prefix(self) -> bool:
        """Whether cached rows may stand for computed ones."""
        return self.cacheable

    @property
    def finished(self) -> bool:
        """Whether it wants no more tokens."""
        return len(self.output_ids) >= self.max_tokens

    @property
    def num_rows(self) -> int:
        """Rows launched or found since it got its slot."""
        if self.phase is Phase.PREFILLING:
            return self.num_tokens - self.remaining
        # The row of the newest token is launched with the sampling of the next.
        return self.num_tokens + self.in_flight - 1

    @property
    def precedence(self) -> tuple[int, int]:
        """Greater is preempted first: of lowest priority, then opened last."""
        assert self.opened is not None, "a sequence that has never run is not preempted"
        return -self.priority, self.opened

    def enter(self, number: int, launched_before: int, encoded: EncodedTokens | None) -> None:
        """Begins the scheduler's part, for a sequence without a slot.

        Args:
            number: of the sequence.
            launched_before: prompt tokens launched so far.
            encoded: its prompt, if it has been encoded.
        """
        self.number, self.launched_before = number, launched_before
        self.num_tokens = self.remaining = len(self.token_ids) + len(self.output_ids)
        self.num_left = self.max_tokens - len(self.output_ids)
        self.phase, self.slot, self.opened = Phase.WAITING, None, None
        self.was_preempted = self.prefill_begun = False
        self.encoded = None if self.output_ids else encoded
        self.in_flight, self.counters = 0, CacheCounters()

    def encode(self) -> EncodedTokens:
        """Prompt and output so far, kept for the next time: they do not grow before it decodes."""
        if self.encoded is None:
            prompt, output = self.token_ids, self.output_ids
            self.encoded = EncodedTokens(prompt + output if output else prompt)
        return self.encoded
