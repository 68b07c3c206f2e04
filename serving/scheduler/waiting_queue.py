"""Sequences without a slot, and which of them is to get the next one."""

import collections
from collections.abc import Callable, Sequence

from serving.scheduler.prefill_queue import PrefillQueue
from serving.scheduler.sequence import Phase, ScheduledSequence
from serving.scheduler.shared_prompts import SharedPrompts

# How many tokens of prompts are looked up in the cache a step: it looks at each of their pages.
_TOKENS_LOOKED_UP_A_STEP = 1 << 19


class WaitingQueue:
    """Sequences that have never had a slot, and preempted ones, in the order of `PrefillQueue`.

    The best one that did not fit holds up those behind it, and is not tried again until as many
    pages may have come free as it lacked: a trial looks at each of its pages. Those whose prompt
    another is about to compute are held back until it has.

    Args:
        age_weight: see `PrefillQueue`.
    """

    def __init__(self, age_weight: float) -> None:
        self._queue = PrefillQueue(age_weight)
        self._shared = SharedPrompts()
        self._preempted: set[ScheduledSequence] = set()
        self._not_looked_up: collections.deque[ScheduledSequence] = collections.deque()
        self._refused: ScheduledSequence | None = None
        self._missing = 0  # pages that have to come free before it is tried again

    @property
    def num_new(self) -> int:
        """Sequences that have never had a slot."""
        return len(self._queue) - len(self._preempted) + self._shared.num_held

    @property
    def num_preempted(self) -> int:
        """Sequences that have lost one."""
        return len(self._preempted)

    def add(self, record: ScheduledSequence) -> None:
        """Takes a new sequence."""
        if self._shared.follows(record):
            record.phase = Phase.HELD
        else:
            self._enqueue(record)

    def preempt(self, record: ScheduledSequence) -> None:
        """Takes a sequence that has lost its slot."""
        record.phase = Phase.PREEMPTED
        record.was_preempted = True
        record.remaining = record.num_tokens
        self._preempted.add(record)
        self._queue.push(record)

    def look_up(
        self, num_cached: Callable[[Sequence[int]], int], prefilling: ScheduledSequence | None
    ) -> None:
        """Finds out how much of some prompts is cached, in the order in which they came.

        Not of one that is first anyhow: opening it will show.

        Args:
            num_cached: returns it for tokens.
            prefilling: the best one that is prefilling.
        """
        tokens, queue, first = 0, self._not_looked_up, None
        while queue and tokens < _TOKENS_LOOKED_UP_A_STEP:
            record = queue.popleft()
            if record not in self._queue or record.was_preempted:
                continue
            if record is self._queue.first() and self._goes_before(record, prefilling):
                first = record
                continue
            token_ids = record.known_tokens()
            tokens += len(token_ids)
            record.remaining = len(token_ids) - num_cached(token_ids)
            self._queue.push(record)
        if first is not None:
            queue.appendleft(first)

    def next_to_open(self, prefilling: ScheduledSequence | None) -> ScheduledSequence | None:
        """Whose turn it is to get a slot, if that is before the best one that is prefilling."""
        record = self._queue.first()
        # Of a preempted one, all tokens must be known before it is opened again.
        if record is None or record is self._refused or record.in_flight:
            return None
        return record if self._goes_before(record, prefilling) else None

    def refuse(self, record: ScheduledSequence, missing: int) -> None:
        """Notes that a sequence does not fit before so many pages come free."""
        self._refused, self._missing = record, missing

    def pages_freed(self, max_pages: int, *, idle: bool) -> None:
        """Notes that a slot has been closed.

        Args:
            max_pages: pages that may have come free.
            idle: no slot is taken now.
        """
        # One more, as one page less is to be spared for those that run.
        self._missing -= max_pages + 1
        if idle or self._missing <= 0:
            self._refused = None

    def opened(self, record: ScheduledSequence) -> None:
        """Gives a sequence away, which has got a slot."""
        self._queue.discard(record)
        self._preempted.discard(record)

    def prompt_computed(self, record: ScheduledSequence) -> None:
        """Notes that a prompt is computed, for which others may have waited."""
        for follower in self._shared.computed(record):
            # All but the last token, which is always computed.
            follower.remaining = 1
            self._enqueue(follower, look_up=False)

    def ended(self, record: ScheduledSequence) -> None:
        """Forgets a sequence, which may also run or be gone."""
        self.opened(record)
        if self._refused is record:
            self._refused = None
        leader = self._shared.ended(record)
        if leader is not None:
            self._enqueue(leader)

    def check_integrity(self, records: Sequence[ScheduledSequence]) -> None:
        """Proves that of all sequences those are here that should be, and once.

        Raises:
            AssertionError: naming what is not so.
        """
        self._queue.check_integrity()
        phases = {phase: {r for r in records if r.phase is phase} for phase in Phase}
        self._shared.check_integrity(phases[Phase.HELD])
        assert self._preempted == phases[Phase.PREEMPTED], "preempted sequences lost"
        queued = phases[Phase.WAITING] | phases[Phase.PREEMPTED]
        assert set(self._queue.records) == queued, "waiting sequences lost"
        assert self._refused is None or self._refused in queued, "waits for a sequence that is gone"

    def _goes_before(self, record: ScheduledSequence, prefilling: ScheduledSequence | None) -> bool:
        return prefilling is None or self._queue.order(record) < self._queue.order(prefilling)

    def _enqueue(self, record: ScheduledSequence, *, look_up: bool = True) -> None:
        record.phase = Phase.WAITING
        self._queue.push(record)
        if look_up and record.sequence.reuse_prefix:
            self._not_looked_up.append(record)
