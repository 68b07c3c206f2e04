"""Scheduler of steps: chunks of prompts, then one token of everything that decodes.

A step is launched before the results of the one before it are known:

    while (plan := scheduler.schedule()) is not None:
        launched.append(runner.run(plan))
    for result in scheduler.process(results_of_the_step_before):
        ...

and `finish` for what is done.
"""

import dataclasses
import enum
from collections import abc
from collections.abc import Callable, Iterator

from kvcache.counters import CacheCounters
from kvcache.page_pool import OutOfPagesError
from kvcache.prefix.tree import EncodedTokens
from serving.scheduler.counters import SchedulerCounters
from serving.scheduler.errors import SequenceOutOfPagesError, does_not_fit
from serving.scheduler.integrity import check_sequence
from serving.scheduler.plan import DecodeBatch, Plan, PrefillChunk, StepResult
from serving.scheduler.prefill_queue import PrefillQueue
from serving.scheduler.sequence import Phase, Sequence
from serving.scheduler.sequence_cache import SequenceCache
from serving.scheduler.slots import Slots
from serving.scheduler.waiting_queue import WaitingQueue

_RESERVED_ROWS = 2  # beyond the tokens that a sequence opens with


class _Stage(enum.Enum):
    """Stage of a step: the kind of launch that `schedule` plans next."""

    BETWEEN_STEPS = enum.auto()
    PREFILL = enum.auto()
    DECODE = enum.auto()
    END = enum.auto()


class Scheduler[SequenceT: Sequence]:
    """Decides who starts, whose prompt goes on, who decodes, and who is preempted.

    Prompts are computed in the order of `PrefillQueue`, those that have begun and those that have
    not alike. The best of the latter, if it does not fit, holds up those behind it, and no
    others. Sequences get pages as they grow; when these are short, the youngest of lowest priority
    is preempted, and computed again from what the cache has kept. So the oldest of highest priority
    always ends.

    The chunks of a step have at most `max_num_batched_tokens` tokens together. There is one at
    least if any can be computed, and a later one that would exceed them waits for the next step
    instead of being cut.

    Args:
        cache: where the sequences' rows are.
        max_num_seqs: most sequences that have slots.
        max_num_batched_tokens: most prompt tokens a step.
        max_step_rows: most rows of a chunk.
        chunk_rows: rows of the launch that suits so many remaining tokens best, which may be fewer
            or more; by default as many.
        age_weight: see `PrefillQueue`.

    Attributes:
        counters: what was done.

    Raises:
        ValueError: a limit is not positive.
    """

    def __init__(
        self,
        cache: SequenceCache,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_step_rows: int,
        chunk_rows: Callable[[int], int] = lambda remaining: remaining,
        age_weight: float = 0.25,
    ) -> None:
        for name, value in (
            ("max_num_seqs", max_num_seqs),
            ("max_num_batched_tokens", max_num_batched_tokens),
            ("max_step_rows", max_step_rows),
            ("age_weight", age_weight),
        ):
            if value <= 0:
                raise ValueError(f"{name} must be positive, got {value}")
        self.counters = SchedulerCounters()
        self._cache = cache
        self._budget = self._max_num_batched_tokens = max_num_batched_tokens
        self._max_chunk_tokens = min(max_step_rows, max_num_batched_tokens)
        self._chunk_rows = chunk_rows
        self._sequences: dict[SequenceT, None] = {}  # in the order in which they came
        self._waiting = WaitingQueue[SequenceT](age_weight)
        self._prefilling = PrefillQueue[SequenceT](age_weight)
        self._slots = Slots[SequenceT](max_num_seqs)
        self._num_added = self._num_opened = 0
        self._stage = _Stage.BETWEEN_STEPS
        self._planned: Plan[SequenceT] | None = None  # handed out, and not noted as launched
        self._sampled_now: list[int] = []  # slots whose last chunk is of this step

    @property
    def num_running(self) -> int:
        """Sequences that have slots."""
        return len(self._slots)

    @property
    def num_waiting(self) -> int:
        """Sequences that have never had a slot."""
        return self._waiting.num_new

    @property
    def num_preempted(self) -> int:
        """Sequences that have lost their slot and wait for another."""
        return self._waiting.num_preempted

    @property
    def running(self) -> dict[int, SequenceT]:
        """The sequences that have slots, by slot."""
        return dict(self._slots.taken)

    def __len__(self) -> int:
        return len(self._sequences)

    def __contains__(self, sequence: SequenceT) -> bool:
        return sequence in self._sequences

    def __iter__(self) -> Iterator[SequenceT]:
        return iter(list(self._sequences))

    def add(self, sequence: SequenceT, encoded: EncodedTokens | None = None) -> None:
        """Queues a sequence.

        Args:
            sequence: the sequence.
            encoded: its prompt, for the cache to be looked up with; None to encode it then.

        Raises:
            ValueError: it is here already, is finished, or has no prompt or nothing to generate.
        """
        if sequence in self._sequences or sequence.finished:
            raise ValueError("a sequence is added once, before it is finished")
        num_prompt, num_output = len(sequence.token_ids), len(sequence.output_ids)
        if not num_prompt or num_output >= sequence.max_tokens:
            raise ValueError(
                f"{num_prompt} token_ids, {num_output} output_ids and max_tokens "
                f"{sequence.max_tokens}: there is nothing to compute"
            )
        sequence.enter(self._num_added, self.counters.prompt_tokens, encoded)
        self._num_added += 1
        self._sequences[sequence] = None
        self._waiting.add(sequence)

    def schedule(self) -> Plan[SequenceT] | None:
        """Plans the next launch of a step, and readies the cache for it.

        First the chunks of prompts, then one more token of everything whose tokens are launched,
        except those whose last chunk is of this step. Where pages are short, the youngest lose
        their slots first.

        A plan is to be run before the next is asked for, which takes it as launched: until then
        nothing moves the pages that it reads and writes.

        Returns:
            The plan. None ends the step: the next call begins another.

        Raises:
            SequenceOutOfPagesError: a sequence fits nowhere. Once it is finished, the step goes on.
        """
        self._note_launched()
        if self._stage is _Stage.BETWEEN_STEPS:
            self._begin_step()
        if self._stage is _Stage.PREFILL:
            self._planned = self._next_chunk()
            if self._planned is not None:
                return self._planned
            self._stage = _Stage.DECODE
        if self._stage is _Stage.DECODE:
            self._planned = self._next_batch()
            self._stage = _Stage.BETWEEN_STEPS if self._planned is None else _Stage.END
            return self._planned
        self._stage = _Stage.BETWEEN_STEPS
        return None

    def process[Result: StepResult](self, results: abc.Sequence[Result]) -> list[Result]:
        """Takes the results of a launch, in the order of launches.

        Returns:
            Those that count, since their sequences have not ended meanwhile. Their tokens are to be
            appended to `output_ids`.

        Raises:
            ValueError: nothing is in flight for a sequence with a token.
        """
        known, counted = self._sequences, []
        for result in results:
            sequence, token = result.sequence, result.token
            if sequence not in known:
                self.counters.dropped_results += token is not None
                continue
            counted.append(result)
            if token is None:
                continue
            if not sequence.in_flight:
                raise ValueError(f"nothing is launched of sequence {sequence.number}")
            sequence.in_flight -= 1
            sequence.num_tokens += 1
            if sequence.in_flight and sequence.slot is not None:
                # Its row has been launched with the sampling of the next.
                self._cache.advance(sequence.slot, [token])
        return counted

    def finish(self, sequence: SequenceT) -> CacheCounters:
        """Ends a sequence, wherever it stands; what the cache did for it, what it found of its own
        rows after it was preempted not counted.

        Raises:
            ValueError: it is not here.
        """
        if sequence not in self._sequences:
            raise ValueError("a sequence that is not here cannot be finished")
        self._note_launched()  # the plan may be of this sequence
        del self._sequences[sequence]
        if sequence.slot is not None:
            self._close(sequence)
        self._waiting.ended(sequence)
        sequence.encoded = None
        return sequence.counters

    def check_integrity(self) -> None:
        """Proves that every sequence is in one place, and every count right.

        Raises:
            AssertionError: naming what is not.
        """
        sequences = list(self._sequences)
        self._waiting.check_integrity(sequences)
        self._slots.check_integrity()
        self._prefilling.check_integrity()
        prefilling = {sequence for sequence in sequences if sequence.phase is Phase.PREFILLING}
        assert set(self._prefilling.sequences) == prefilling, "prefilling sequences lost"
        running = sum(sequence.slot is not None for sequence in sequences)
        assert running == len(self._slots), f"{running} sequences in {len(self._slots)} slots"
        for sequence in sequences:
            check_sequence(sequence, self._cache)
        assert 0 <= self._budget <= self._max_num_batched_tokens, f"{self._budget} tokens left"

    def _begin_step(self) -> None:
        self.counters.steps += 1
        self._budget = self._max_num_batched_tokens
        self._sampled_now.clear()
        self._waiting.look_up(self._cache.num_cached, self._prefilling.first())
        self._stage = _Stage.PREFILL

    def _next_chunk(self) -> PrefillChunk[SequenceT] | None:
        """The next chunk, for which the cache is ready, or None if this step has no more.

        Opens the sequence if it has no slot.

        Raises:
            SequenceOutOfPagesError: the sequence whose turn it is does not fit, and nothing runs;
                or its pages cannot be had, and other sequences are as they were.
        """
        self._open_next()
        while (sequence := self._prefilling.first()) is not None:
            count = self._chunk_tokens(sequence.remaining)
            if count > self._budget:
                return None
            assert sequence.slot is not None and sequence.encoded is not None
            if self._prepare_chunk(sequence, sequence.slot, count):
                return PrefillChunk(
                    sequence,
                    sequence.slot,
                    sequence.num_rows,
                    list(sequence.encoded[sequence.num_rows : sequence.num_rows + count]),
                    is_first=not sequence.prefill_begun,
                    is_last=count == sequence.remaining,
                )
            self._make_room(sequence)
        return None

    def _prepare_chunk(self, sequence: SequenceT, slot: int, count: int) -> bool:
        """Readies the cache for so many rows; False if pages are too few."""
        rows = {slot: count}
        if not self._cache.can_prepare(rows):
            return False
        try:
            self._cache.prepare(rows, staging=True)
        except OutOfPagesError as error:
            raise SequenceOutOfPagesError(sequence, str(error)) from error
        return True

    def _note_launched(self) -> None:
        """Notes that the plan before is launched, if there is one."""
        plan, self._planned = self._planned, None
        if isinstance(plan, PrefillChunk):
            self._note_chunk(plan)
        elif plan is not None:
            self._note_batch(plan)

    def _note_chunk(self, chunk: PrefillChunk[SequenceT]) -> None:
        """Notes that a chunk is launched."""
        sequence, count = chunk.sequence, len(chunk.token_ids)
        self._cache.advance(chunk.slot, chunk.token_ids, prompt_complete=chunk.is_last)
        self._budget -= count
        self.counters.chunks += 1
        self.counters.prompt_tokens += count
        sequence.prefill_begun = True
        sequence.remaining -= count
        if not chunk.is_last:
            self._prefilling.push(sequence)
            return
        self._prefilling.discard(sequence)
        sequence.encoded = None
        sequence.in_flight += 1
        sequence.num_left -= 1
        self._slots.sampled(sequence)
        self._sampled_now.append(chunk.slot)
        self._waiting.prompt_computed(sequence)

    def _next_batch(self) -> DecodeBatch[SequenceT] | None:
        """The sequences that take one more token in this step, for which the cache is ready, or
        None if there are none.

        Raises:
            SequenceOutOfPagesError: the only sequence left cannot have its next row.
        """
        while True:
            batch = self._slots.decoding.copy()
            # Their first token is known at the end of the next step, in time for the cache.
            for slot in self._sampled_now:
                batch.pop(slot, None)
            if not batch:
                return None
            rows = dict.fromkeys(batch, 1)
            if self._cache.can_prepare(rows):
                self._cache.prepare(rows)
                return DecodeBatch(batch)
            self._make_room(self._slots.taken[next(iter(batch))])

    def _note_batch(self, batch: DecodeBatch[SequenceT]) -> None:
        """Notes that a decode batch is launched."""
        self.counters.decoded_tokens += len(batch.sequences)
        for slot, sequence in batch.sequences.items():
            if not sequence.in_flight:
                # Known already, as by an owner that waits for every result.
                self._cache.advance(slot, sequence.output_ids[-1:])
            sequence.in_flight += 1
            sequence.num_left -= 1
            if not sequence.num_left:
                self._slots.sampled(sequence)

    def _open_next(self) -> None:
        """Opens the best sequence without a slot, if it is its turn, and there is room for it."""
        slot, sequence = self._slots.next_free, self._waiting.next_to_open(self._prefilling.first())
        if (
            slot is None
            or sequence is None
            or self._chunk_tokens(sequence.remaining) > self._budget
        ):
            return
        tokens = sequence.encode()
        max_rows = len(sequence.token_ids) + sequence.max_tokens - 1
        try:
            cached = self._cache.open(
                slot,
                tokens,
                min(len(tokens) + _RESERVED_ROWS, max_rows),
                use_prefix=sequence.reuse_prefix,
                # A page for each, to avoid preempting it as soon as one of them grows.
                spare_pages=len(self._slots),
            )
        except OutOfPagesError as error:
            if not len(self._slots):
                raise does_not_fit(sequence, len(tokens), str(error)) from error
            self.counters.refused += 1
            self._waiting.refuse(sequence, error.missing)
            return
        self._waiting.opened(sequence)
        self._slots.take(sequence)
        if sequence.opened is None:
            sequence.opened, self._num_opened = self._num_opened, self._num_opened + 1
        sequence.phase = Phase.PREFILLING
        sequence.prefill_begun = False
        sequence.remaining = len(tokens) - cached
        self._prefilling.push(sequence)
        self.counters.opened += 1
        self.counters.cached_tokens += cached

    def _close(self, sequence: SequenceT, *, preempted: bool = False) -> None:
        """Takes a sequence's slot away; its rows stay cached while there is room."""
        assert sequence.slot is not None, "closed without a slot"
        freed = self._cache.reserved_pages(sequence.slot)
        counters = self._cache.close(sequence.slot, preempted=preempted)
        if sequence.was_preempted:  # It found its own rows again.
            counters = dataclasses.replace(counters, cached_tokens=0)
        sequence.counters += counters
        self._slots.give_back(sequence)
        self._prefilling.discard(sequence)
        sequence.encoded = None
        self._waiting.pages_freed(freed, idle=not len(self._slots))

    def _make_room(self, needy: SequenceT) -> None:
        """Takes slots away: of all that need no more rows, or else of the youngest sequence.

        Raises:
            SequenceOutOfPagesError: there is none but the one in need.
        """
        draining = list(self._slots.draining.values())
        for sequence in draining:
            self._close(sequence)
        if draining:
            return
        sequence = self._slots.next_to_preempt()
        if sequence is None:
            raise does_not_fit(needy, needy.num_rows + 1, "one more row")
        self._close(sequence, preempted=True)
        self._waiting.preempt(sequence)
        self.counters.preempted += 1

    def _chunk_tokens(self, remaining: int) -> int:
        rows = self._chunk_rows(min(remaining, self._max_chunk_tokens))
        return min(rows, remaining, self._max_chunk_tokens)
