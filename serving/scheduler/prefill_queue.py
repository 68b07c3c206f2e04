"""The order in which prompts are computed."""

import heapq

from serving.scheduler.sequence import ScheduledSequence

Order = tuple[int, int, float, int]
Entry = tuple[Order, int, ScheduledSequence]  # the second, a ticket, makes entries distinct


class PrefillQueue:
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
        self._heap: list[Entry] = []
        self._entries: dict[ScheduledSequence, Entry] = {}
        self._next_ticket = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def records(self) -> list[ScheduledSequence]:
        """All, in no particular order."""
        return list(self._entries)

    def __contains__(self, record: ScheduledSequence) -> bool:
        return record in self._entries

    def order(self, record: ScheduledSequence) -> Order:
        """A sequence's place, lower first; no two have the same."""
        key = record.remaining + self._age_weight * record.launched_before
        if record.was_preempted:
            assert record.opened is not None, "a sequence that has never run was preempted"
            key = float(record.opened)
        return -record.sequence.priority, int(not record.was_preempted), key, record.number

    def push(self, record: ScheduledSequence) -> None:
        """Adds a sequence, or gives it its new place."""
        entry = self.order(record), self._next_ticket, record
        self._next_ticket += 1
        self._entries[record] = entry
        heapq.heappush(self._heap, entry)
        self._shrink()

    def discard(self, record: ScheduledSequence) -> None:
        """Removes a sequence, if it is here."""
        if self._entries.pop(record, None) is not None:
            self._shrink()

    def first(self) -> ScheduledSequence | None:
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
        for record, (order, _, _) in self._entries.items():
            assert order == self.order(record), f"sequence {record.number} has another's place"

    def _shrink(self) -> None:
        """Forgets old places once they are the most, so that nothing is kept that has ended."""
        if len(self._heap) > 2 * len(self._entries) + 8:
            self._heap = list(self._entries.values())
            heapq.heapify(self._heap)
