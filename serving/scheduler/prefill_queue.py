"""The order in which prompts are computed."""

import heapq

from serving.scheduler.sequence import Sequence

Order = tuple[int, int, float, int]
type Entry[SequenceT] = tuple[Order, int, SequenceT]  # a ticket, second, makes entries distinct


class PrefillQueue[SequenceT: Sequence]:
    """Sequences with tokens to compute before they decode, best first.

    Higher priority goes first; then those that have been preempted, the one opened first leading;
    then the least `remaining + age_weight * launched_before`. So of equal priority and never
    preempted, a sequence is overtaken only by those that come before `remaining / age_weight`
    further prompt tokens have been launched: whatever comes later has a greater key.

    Adding, removing and changing one costs O(log n).

    Args:
        age_weight: what a prompt token launched counts for those that wait, in tokens of their own.
    """

    def __init__(self, age_weight: float) -> None:
        self._age_weight = age_weight
        self._heap: list[Entry[SequenceT]] = []
        self._entries: dict[SequenceT, Entry[SequenceT]] = {}
        self._next_ticket = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def sequences(self) -> list[SequenceT]:
        """All, in no particular order."""
        return list(self._entries)

    def __contains__(self, sequence: SequenceT) -> bool:
        return sequence in self._entries

    def order(self, sequence: SequenceT) -> Order:
        """A sequence's place, lower first; no two have the same."""
        key = sequence.remaining + self._age_weight * sequence.launched_before
        if sequence.was_preempted:
            assert sequence.opened is not None, "a sequence that has never run was preempted"
            key = float(sequence.opened)
        return -sequence.priority, int(not sequence.was_preempted), key, sequence.number

    def push(self, sequence: SequenceT) -> None:
        """Adds a sequence, or gives it its new place."""
        entry = self.order(sequence), self._next_ticket, sequence
        self._next_ticket += 1
        self._entries[sequence] = entry
        heapq.heappush(self._heap, entry)
        self._shrink()

    def discard(self, sequence: SequenceT) -> None:
        """Removes a sequence, if it is here."""
        if self._entries.pop(sequence, None) is not None:
            self._shrink()

    def first(self) -> SequenceT | None:
        """The best one, which stays."""
        while self._heap:
            entry = self._heap[0]
            if self._entries.get(entry[2]) is entry:
                return entry[2]
            heapq.heappop(self._heap)
        return None

    def check_integrity(self) -> None:
        """Proves that each sequence has one place, its own.

        Raises:
            AssertionError: naming one that has not.
        """
        valid = [entry for entry in self._heap if self._entries.get(entry[2]) is entry]
        assert len(valid) == len(self._entries), "sequences lost or doubled"
        for sequence, (order, _, _) in self._entries.items():
            assert order == self.order(sequence), f"sequence {sequence.number} has another's place"

    def _shrink(self) -> None:
        """Forgets old places once they are the most, so that nothing is kept that has ended."""
        if len(self._heap) > 2 * len(self._entries) + 8:
            self._heap = list(self._entries.values())
            heapq.heapify(self._heap)
