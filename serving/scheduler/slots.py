"""The sequences that have slots, and which of them gives way when pages are short."""

from serving.scheduler.sequence import Phase, Schedulable, ScheduledSequence


class Slots:
    """Numbered places for sequences that run.

    Args:
        count: how many.

    Attributes:
        taken: by slot, the sequences that have one.
        decoding: by slot, sequences that can take one more token, as their owner gave them.
        draining: by slot, sequences whose last token is launched.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._free = list(range(count - 1, -1, -1))
        self.taken: dict[int, ScheduledSequence] = {}
        self.decoding: dict[int, Schedulable] = {}
        self.draining: dict[int, ScheduledSequence] = {}

    def __len__(self) -> int:
        return len(self.taken)

    @property
    def next_free(self) -> int | None:
        """The slot that the next sequence gets, or None if all are taken."""
        return self._free[-1] if self._free else None

    def take(self, record: ScheduledSequence) -> None:
        """Gives `next_free` to a sequence."""
        record.slot = self._free.pop()
        self.taken[record.slot] = record

    def chosen(self, record: ScheduledSequence) -> None:
        """Notes that the last launch of a sequence chooses a token."""
        assert record.slot is not None, f"sequence {record.number} decodes without a slot"
        if not record.num_left:
            self.decoding.pop(record.slot, None)
            self.draining[record.slot] = record
            record.phase = Phase.DRAINING
        elif record.phase is not Phase.DECODING:
            self.decoding[record.slot] = record.sequence
            record.phase = Phase.DECODING

    def give_back(self, record: ScheduledSequence) -> None:
        """Takes a sequence's slot away."""
        assert record.slot is not None, f"sequence {record.number} has no slot"
        del self.taken[record.slot]
        self.decoding.pop(record.slot, None)
        self.draining.pop(record.slot, None)
        self._free.append(record.slot)
        record.slot = None

    def youngest(self) -> ScheduledSequence | None:
        """Whom to preempt: of lowest priority, then opened last. None if there is only one."""
        unfinished = [
            record for record in self.taken.values() if record.phase is not Phase.DRAINING
        ]
        if len(unfinished) < 2:
            return None
        return max(unfinished, key=lambda record: record.precedence)

    def check_integrity(self) -> None:
        """Proves that every slot is free or one sequence's, who is listed by its phase.

        Raises:
            AssertionError: naming the one that is not.
        """
        slots = sorted([*self._free, *self.taken])
        assert slots == list(range(self._count)), f"slots lost or doubled: {slots}"
        for slot, record in self.taken.items():
            assert record.slot == slot, f"slot {slot} holds a sequence of slot {record.slot}"
        draining = {slot: record.sequence for slot, record in self.draining.items()}
        for listed, phase in ((self.decoding, Phase.DECODING), (draining, Phase.DRAINING)):
            found = {
                s: record.sequence for s, record in self.taken.items() if record.phase is phase
            }
            assert listed == found, f"{phase.name}: {sorted(listed)}, are {sorted(found)}"
