"""The sequences that have slots, and which of them gives way when pages are short."""

from serving.scheduler.sequence import Phase, Sequence


class Slots[SequenceT: Sequence]:
    """Numbered slots of the sequences that run.

    Args:
        count: how many.

    Attributes:
        taken: by slot, the sequences that have one.
        decoding: by slot, sequences that can take one more token.
        draining: by slot, sequences whose last token is launched.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._free = list(range(count - 1, -1, -1))
        self.taken: dict[int, SequenceT] = {}
        self.decoding: dict[int, SequenceT] = {}
        self.draining: dict[int, SequenceT] = {}

    def __len__(self) -> int:
        return len(self.taken)

    @property
    def next_free(self) -> int | None:
        """The slot that the next sequence gets, or None if all are taken."""
        return self._free[-1] if self._free else None

    def take(self, sequence: SequenceT) -> None:
        """Gives `next_free` to a sequence."""
        sequence.slot = self._free.pop()
        self.taken[sequence.slot] = sequence

    def sampled(self, sequence: SequenceT) -> None:
        """Notes that the last launch of a sequence samples a token."""
        assert sequence.slot is not None, f"sequence {sequence.number} decodes without a slot"
        if not sequence.num_left:
            self.decoding.pop(sequence.slot, None)
            self.draining[sequence.slot] = sequence
            sequence.phase = Phase.DRAINING
        elif sequence.phase is not Phase.DECODING:
            self.decoding[sequence.slot] = sequence
            sequence.phase = Phase.DECODING

    def give_back(self, sequence: SequenceT) -> None:
        """Takes a sequence's slot away."""
        assert sequence.slot is not None, f"sequence {sequence.number} has no slot"
        del self.taken[sequence.slot]
        self.decoding.pop(sequence.slot, None)
        self.draining.pop(sequence.slot, None)
        self._free.append(sequence.slot)
        sequence.slot = None

    def next_to_preempt(self) -> SequenceT | None:
        """Sequence to preempt: of lowest priority, then opened last; None if there is but one."""
        unfinished = [
            sequence for sequence in self.taken.values() if sequence.phase is not Phase.DRAINING
        ]
        if len(unfinished) < 2:
            return None
        return max(unfinished, key=lambda sequence: sequence.precedence)

    def check_integrity(self) -> None:
        """Proves that every slot is free or one sequence's, who is listed by its phase.

        Raises:
            AssertionError: naming the one that is not.
        """
        slots = sorted([*self._free, *self.taken])
        assert slots == list(range(self._count)), f"slots lost or doubled: {slots}"
        for slot, sequence in self.taken.items():
            assert sequence.slot == slot, f"slot {slot} holds a sequence of slot {sequence.slot}"
        for listed, phase in ((self.decoding, Phase.DECODING), (self.draining, Phase.DRAINING)):
            found = {slot: one for slot, one in self.taken.items() if one.phase is phase}
            assert listed == found, f"{phase.name}: {sorted(listed)}, are {sorted(found)}"
