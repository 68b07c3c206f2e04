"""Sequences without a slot, and which of them is to get the next one."""

import collections
from collections import abc
from collections.abc import Callable

from serving.scheduler.prefill_queue import PrefillQueue
from serving.scheduler.sequence import Phase, Sequence
from serving.scheduler.shared_prompts import SharedPrompts

# How many tokens of prompts are looked up in the cache a step: it looks at each of their pages.
_TOKENS_LOOKED_UP_A_STEP = 1 << 19


class WaitingQueue[SequenceT: Sequence]:
    """Sequences that have never had a slot, and preempted ones, in the order of `PrefillQueue`.

    The best one that did not fit holds up those behind it, and is not tried again until as many
    pages may have come free as it lacked: a trial looks at each of its pages. Those whose prompt
    another is about to compute are held back until it has.

    Args:
        age_weight: see `PrefillQueue`.
    """

    def __init__(self, age_weight: float) -> None:
        self._queue = PrefillQueue[SequenceT](age_weight)
        self._shared = SharedPrompts[SequenceT]()
        self._preempted: set[SequenceT] = set()
        self._not_looked_up: collections.deque[SequenceT] = collections.deque()
        self._refused: SequenceT | None = None
        self._missing = 0  # pages that have to come free before it is tried again

    @property
    def num_new(self) -> int:
        """Sequences that have never had a slot."""
        return len(self._queue) - len(self._preempted) + self._shared.num_held

    @property
    def num_preempted(self) -> int:
        """Sequences that have lost one."""
        return len(self._preempted)

    def add(self, sequence: SequenceT) -> None:
        """Takes a new sequence."""
        if self._shared.follows(sequence):
            sequence.phase = Phase.HELD
        else:
            self._enqueue(sequence)

    def preempt(self, sequence: SequenceT) -> None:
        """Takes a sequence that has lost its slot."""
        sequence.phase = Phase.PREEMPTED
        sequence.was_preempted = True
        sequence.remaining = sequence.num_tokens
        self._preempted.add(sequence)
        self._queue.push(sequence)

    def look_up(
        self, num_cached: Callable[[abc.Sequence[int]], int], prefilling: SequenceT | None
    ) -> None:
        """Finds out how much of some prompts is cached, in the order in which they came.

        Not of one that is first anyhow: opening it will show.

        Args:
            num_cached: returns it for tokens.
            prefilling: the best one that is prefilling.
        """
        tokens, queue, first = 0, self._not_looked_up, None
        while queue and tokens < _TOKENS_LOOKED_UP_A_STEP:
            sequence = queue.popleft()
            if sequence not in self._queue or sequence.was_preempted:
                continue
            if sequence is self._queue.first() and self._goes_before(sequence, prefilling):
                first = sequence
                continue
            token_ids = sequence.encode()
            tokens += len(token_ids)
            sequence.remaining = len(token_ids) - num_cached(token_ids)
            self._queue.push(sequence)
        if first is not None:
            queue.appendleft(first)

    def next_to_open(self, prefilling: SequenceT | None) -> SequenceT | None:
        """Whose turn it is to get a slot, if that is before the best one that is prefilling."""
        sequence = self._queue.first()
        # Of a preempted one, all tokens must be known before it is opened again.
        if sequence is None or sequence is self._refused or sequence.in_flight:
            return None
        return sequence if self._goes_before(sequence, prefilling) else None

    def refuse(self, sequence: SequenceT, missing: int) -> None:
        """Notes that a sequence does not fit before so many pages come free."""
        self._refused, self._missing = sequence, missing

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

    def opened(self, sequence: SequenceT) -> None:
        """Gives a sequence away, which has got a slot."""
        self._queue.discard(sequence)
        self._preempted.discard(sequence)

    def prompt_computed(self, sequence: SequenceT) -> None:
        """Notes that a prompt is computed, for which others may have waited."""
        for follower in self._shared.computed(sequence):
            # All but the last token, which is always computed.
            follower.remaining = 1
            self._enqueue(follower, look_up=False)

    def ended(self, sequence: SequenceT) -> None:
        """Forgets a sequence, which may also run or be gone."""
        self.opened(sequence)
        if self._refused is sequence:
            self._refused = None
        leader = self._shared.ended(sequence)
        if leader is not None:
            self._enqueue(leader)

    def check_integrity(self, sequences: abc.Sequence[SequenceT]) -> None:
        """Proves that of all sequences those are here that should be, and once.

        Raises:
            AssertionError: naming what is not so.
        """
        self._queue.check_integrity()
        phases = {phase: {r for r in sequences if r.phase is phase} for phase in Phase}
        self._shared.check_integrity(phases[Phase.HELD])
        assert self._preempted == phases[Phase.PREEMPTED], "preempted sequences lost"
        queued = phases[Phase.WAITING] | phases[Phase.PREEMPTED]
        assert set(self._queue.sequences) == queued, "waiting sequences lost"
        assert self._refused is None or self._refused in queued, "waits for a sequence that is gone"

    def _goes_before(self, sequence: SequenceT, prefilling: SequenceT | None) -> bool:
        return prefilling is None or self._queue.order(sequence) < self._queue.order(prefilling)

    def _enqueue(self, sequence: SequenceT, *, look_up: bool = True) -> None:
        sequence.phase = Phase.WAITING
        self._queue.push(sequence)
        if look_up and sequence.reuse_prefix:
            self._not_looked_up.append(sequence)
