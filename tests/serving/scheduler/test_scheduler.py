"""Each rule of the scheduler, over a cache that does nothing but count."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from kvcache import EncodedTokens
from serving.scheduler import DecodeBatch, PrefillChunk, Scheduler, SequenceOutOfPagesError
from tests.serving.scheduler.fake_cache import FakeCache
from tests.serving.scheduler.mock_engine import (
    MockEngine,
    RowsOfSlots,
    Sampled,
    ToySequence,
    expected_output,
)

MANY = 1000


def engine(
    num_pages: int = MANY,
    *,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 8,
    max_step_rows: int = 8,
    age_weight: float = 0.25,
    pipelined: bool = True,
) -> MockEngine:
    cache = FakeCache(num_pages)
    scheduler = Scheduler(
        cache,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_step_rows=max_step_rows,
        age_weight=age_weight,
    )
    return MockEngine(cache, RowsOfSlots(cache), scheduler, pipelined=pipelined)


def prompt(length: int, first: int = 1) -> list[int]:
    """Prompts of different `first` share nothing."""
    return [first] * length


def add(
    run: MockEngine, token_ids: list[int], max_tokens: int = 3, priority: int = 0
) -> ToySequence:
    sequence = ToySequence(token_ids, max_tokens, priority)
    run.scheduler.add(sequence)
    return sequence


def steps_to_finish(run: MockEngine, sequence: ToySequence, most: int = 200) -> int:
    for count in range(most):
        if sequence.finished:
            return count
        run.step()
        run.scheduler.check_integrity()
    raise AssertionError(f"not finished in {most} steps")


def launched(run: MockEngine) -> list[tuple[ToySequence, range]]:
    """A step's chunks."""
    chunks = run.step().chunks
    run.scheduler.check_integrity()
    return chunks


def endless(token_ids: list[int], max_tokens: int) -> list[int]:
    """A prompt whose output reaches `max_tokens`: no stop token comes before."""
    for last in range(1, 41):
        sequence = ToySequence([*token_ids[:-1], last], max_tokens)
        run = engine()
        run.scheduler.add(sequence)
        steps_to_finish(run, sequence)
        if len(sequence.output_ids) == max_tokens:
            return sequence.token_ids
    raise AssertionError("every output stops")


def test_a_chunk_takes_at_max_a_steps_rows_and_a_step_at_max_its_tokens() -> None:
    """Catches chunks that are too long, a step that is, and one that is filled with a fragment."""
    run = engine(max_num_batched_tokens=10, max_step_rows=6)
    first, second = add(run, prompt(13)), add(run, prompt(14, 2))
    assert launched(run) == [(first, range(6))]  # 6 more would be too many
    assert launched(run) == [(first, range(6, 12)), (first, range(12, 13))]
    assert launched(run) == [(second, range(6))]


def test_chunk_rows_says_how_long_a_chunk_is() -> None:
    """Catches chunks that do not fit the shapes that are compiled."""
    cache = FakeCache(MANY)
    scheduler = Scheduler(
        cache,
        max_num_seqs=1,
        max_num_batched_tokens=100,
        max_step_rows=16,
        chunk_rows=lambda remaining: max(size for size in (1, 4, 16) if size <= remaining),
    )
    run = MockEngine(cache, RowsOfSlots(cache), scheduler)
    sequence = add(run, prompt(22))
    chunks = [range(16), range(16, 20), range(20, 21), range(21, 22)]
    assert launched(run) == [(sequence, chunk) for chunk in chunks]


def test_shorter_prompts_go_first_until_the_longer_one_has_waited_enough() -> None:
    """Catches first-come-first-served, and a long prompt that starves."""
    run = engine(max_num_batched_tokens=4, max_step_rows=4, age_weight=0.5)
    long = add(run, prompt(12))
    overtaking = []
    for number in range(20):
        add(run, prompt(4, 2 + number), max_tokens=1)
        overtaking += [sequence for sequence, _ in launched(run)]
        if overtaking[-1] is long:
            break
    # Those that came before 12 / 0.5 tokens were launched may go first, if they are so short.
    assert len(overtaking) - 1 == (12 - 4) / 0.5 / 4


def test_higher_priorities_go_first() -> None:
    """Catches priorities that count for nothing, or only among those that wait."""
    run = engine(max_num_batched_tokens=4, max_step_rows=4)
    low = add(run, prompt(8))
    assert launched(run) == [(low, range(4))]
    high = add(run, prompt(8, 2), priority=1)
    assert [sequence for sequence, _ in launched(run) + launched(run)] == [high, high]
    assert launched(run) == [(low, range(4, 8))]


def test_a_cached_prompt_counts_for_what_is_left_of_it() -> None:
    """Catches an order that goes by the length of whole prompts."""
    run = engine(max_num_batched_tokens=40, max_step_rows=40)
    steps_to_finish(run, add(run, prompt(33), max_tokens=1))
    other, turn = add(run, prompt(20, 2)), add(run, [*prompt(33), 2])
    assert [sequence for sequence, _ in launched(run)] == [turn, other]


def test_prompts_are_looked_up_once_and_only_when_others_compete() -> None:
    """Catches costs that grow with what waits: a lookup or a trial for each step."""
    run = engine(num_pages=4, max_num_seqs=3)
    cache = run.cache
    assert isinstance(cache, FakeCache)
    running = add(run, endless(prompt(8), 8), max_tokens=8)
    launched(run)
    assert (cache.num_looked_up, cache.num_tried) == (0, 1)
    waiting = [add(run, prompt(12, 2 + number)) for number in range(5)]
    for _ in range(4):
        launched(run)
    # Not the first of them: the trial told what is cached of it.
    assert (cache.num_looked_up, cache.num_tried) == (len(waiting) - 1, 2)
    assert run.scheduler.counters.refused == 1
    steps_to_finish(run, running)
    steps_to_finish(run, waiting[-1])


class SeenTokens(FakeCache):
    """Keeps the tokens that it was asked for."""

    def __init__(self, num_pages: int) -> None:
        super().__init__(num_pages)
        self.seen: list[Sequence[int]] = []

    def num_cached(self, token_ids: Sequence[int]) -> int:
        self.seen.append(token_ids)
        return super().num_cached(token_ids)

    def open(
        self, slot: int, token_ids: Sequence[int], reserved_tokens: int, **options: Any
    ) -> int:
        self.seen.append(token_ids)
        return super().open(slot, token_ids, reserved_tokens, **options)


@pytest.mark.parametrize("is_encoded", [False, True])
def test_a_prompt_is_looked_up_tried_and_opened_with_the_same_encoding(is_encoded: bool) -> None:
    """Catches a prompt encoded again for each of them, or though its owner has done it."""
    cache = SeenTokens(4)
    scheduler = Scheduler(cache, max_num_seqs=3, max_num_batched_tokens=8, max_step_rows=8)
    run = MockEngine(cache, RowsOfSlots(cache), scheduler)
    add(run, endless(prompt(8), 8), max_tokens=8)
    launched(run)
    add(run, prompt(8, 2), priority=1)  # first, but it does not fit
    waiting = ToySequence(prompt(8, 3), 1)
    encoded = EncodedTokens(waiting.token_ids) if is_encoded else None
    run.scheduler.add(waiting, encoded)
    cache.seen.clear()
    steps_to_finish(run, waiting)
    seen = [tokens for tokens in cache.seen if list(tokens) == waiting.token_ids]
    assert len(seen) > 1
    assert {id(tokens) for tokens in seen} == {id(encoded if is_encoded else seen[0])}


def test_what_does_not_fit_holds_up_those_behind_it() -> None:
    """Catches a big prompt that starves as small ones take every page that comes free."""
    run = engine(num_pages=8)
    running = add(run, endless(prompt(16), 6), max_tokens=6)
    launched(run)
    launched(run)
    big, small = add(run, prompt(24, 2), priority=1), add(run, prompt(4, 3))
    while not running.finished:
        assert not launched(run)
    assert [sequence for sequence, _ in launched(run)] == [big]
    steps_to_finish(run, small)


def test_one_that_did_not_fit_is_tried_when_so_much_has_come_free() -> None:
    """Catches a trial, which takes a hash for each page, whenever any other sequence ends."""
    run = engine(num_pages=16, max_num_batched_tokens=64, max_step_rows=64)
    cache = run.cache
    assert isinstance(cache, FakeCache)
    running = [add(run, endless(prompt(8, 1 + n), 3 + n), max_tokens=3 + n) for n in range(4)]
    launched(run)
    big = add(run, prompt(32, 9))
    tried = []
    for sequence in running:
        steps_to_finish(run, sequence)
        launched(run)
        tried.append(cache.num_tried - len(running))
    # It needs 9 pages, where 16 less 4 times 3 are free, and has to leave one for each.
    assert tried == [1, 1, 2, 2]
    steps_to_finish(run, big)


def test_half_computed_prompts_go_on_behind_one_that_does_not_fit() -> None:
    """Catches steps without a chunk although a prompt that has its pages is half computed."""
    run = engine(num_pages=8, max_num_batched_tokens=4, max_step_rows=4)
    begun = add(run, prompt(16))
    launched(run)
    big = add(run, prompt(24, 2), priority=1)
    assert launched(run) == [(begun, range(4, 8))]
    steps_to_finish(run, big)


def test_equal_prompts_are_computed_once() -> None:
    """Catches continuations that compute the prompt that they share each on their own."""
    run = engine(max_num_batched_tokens=8, max_step_rows=8)
    shared = prompt(32)
    copies = [add(run, shared, max_tokens=2) for _ in range(3)]
    other = add(run, prompt(32, 2), max_tokens=2)
    run.scheduler.check_integrity()
    assert run.scheduler.num_waiting == 4
    for sequence in (*copies, other):
        steps_to_finish(run, sequence)
    # All but a page, of which the last token is to be computed.
    assert run.scheduler.counters.prompt_tokens == 32 + 4 + 4 + 32


def test_a_follower_of_higher_priority_waits_for_nobody() -> None:
    """Catches a sequence held back behind one of lower priority."""
    run = engine(max_num_batched_tokens=4, max_step_rows=4)
    add(run, prompt(12, 2), priority=1)
    add(run, prompt(8))
    high = add(run, prompt(8), priority=2)
    assert launched(run) == [(high, range(4))]


@pytest.mark.parametrize("after_steps", [0, 1])
def test_followers_go_on_without_their_leader(after_steps: int) -> None:
    """Catches sequences that wait for a prompt that nobody computes any more."""
    run = engine(max_num_batched_tokens=4, max_step_rows=4)
    leader, *others = [add(run, prompt(12)) for _ in range(3)]
    for _ in range(after_steps):
        launched(run)
    leader.aborted = True
    run.end(leader)
    run.scheduler.check_integrity()
    for sequence in others:
        steps_to_finish(run, sequence)


def test_many_equal_prompts_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches the end of a sequence that costs a pass over all that wait for the same prompt."""
    looked_at = 0

    class Counting(ToySequence):
        def __getattribute__(self, name: str) -> object:
            nonlocal looked_at
            looked_at += name == "priority"
            return super().__getattribute__(name)

    run = engine()
    copies = [Counting(prompt(12), 3, priority) for priority in (2, *[1, 0] * 200)]
    for sequence in copies:
        run.scheduler.add(sequence)
    run.scheduler.check_integrity()
    before = looked_at
    for number, sequence in enumerate(copies):
        run.scheduler.finish(sequence)
        if number % 100 == 50:
            leading = run.scheduler._waiting._queue.first()
            assert leading is not None
            assert leading.priority == 1
    assert looked_at - before < 20 * len(copies)


def test_prompt_logprobs_need_every_row() -> None:
    """Catches cached rows where each is to be computed, and waiting for another's in vain."""
    run = engine(max_num_batched_tokens=64, max_step_rows=64)
    both = [ToySequence(prompt(16), 1, cacheable=False) for _ in range(2)]
    for sequence in both:
        run.scheduler.add(sequence)
    assert launched(run) == [(sequence, range(16)) for sequence in both]


def test_the_youngest_is_preempted_and_the_oldest_ends_first() -> None:
    """Catches preemption of the wrong one, tokens lost by it, and one that comes back too late."""
    run = engine(num_pages=9, max_num_seqs=3)
    sequences = [
        add(run, endless(prompt(8, first), 20), max_tokens=20, priority=priority)
        for first, priority in ((1, 0), (2, 0), (3, 1))
    ]
    order = []
    while len(order) < 3:
        run.step()
        run.scheduler.check_integrity()
        order += [s for s in sequences if s.finished and s not in order]
    assert order == [sequences[2], sequences[0], sequences[1]]
    assert run.scheduler.counters.preempted > 0
    counters = [s.total for s in sequences if s.total is not None]
    # A cache tells 1 for each slot that a sequence had, of which the first found its prompt.
    slots = sum(one.resident_reads for one in counters)
    assert slots == run.scheduler.counters.opened == 3 + run.scheduler.counters.preempted
    assert [one.cached_tokens for one in counters] == [1, 1, 1]


def short_of_pages(run: MockEngine, times: int) -> None:
    """Has the next decode step want room so many times before there is enough."""
    can_prepare = run.cache.can_prepare
    left = [None] * times

    def refuse(rows: Mapping[int, int]) -> bool:
        if set(rows.values()) == {1} and left:
            left.pop()
            return False
        return can_prepare(rows)

    vars(run.cache)["can_prepare"] = refuse


def test_nothing_is_preempted_for_pages_that_come_free_anyhow() -> None:
    """Catches a preemption although a sequence whose last token is launched holds pages."""
    run = engine(max_num_batched_tokens=16)
    both = [add(run, endless(prompt(8, 1 + n), 2 + n), max_tokens=2 + n) for n in range(2)]
    launched(run)
    launched(run)
    short_of_pages(run, times=1)
    for sequence in both:
        steps_to_finish(run, sequence)
        assert sequence.output_ids == expected_output(sequence.token_ids, sequence.max_tokens)
    assert run.scheduler.counters.preempted == 0


def test_a_preempted_sequence_comes_back_when_all_its_tokens_are_known() -> None:
    """Catches one opened again while a token of it is in flight, which would be sampled twice."""
    run = engine()
    add(run, endless(prompt(8), 9), max_tokens=9)
    launched(run)
    launched(run)
    young = add(run, endless(prompt(5, 2), 3), max_tokens=3)
    short_of_pages(run, times=1)
    assert launched(run) == [(young, range(5))]
    assert run.scheduler.num_preempted == 1
    assert not launched(run)
    assert launched(run) == [(young, range(4, 6))]
    steps_to_finish(run, young)
    assert young.output_ids == expected_output(young.token_ids, 3)


def test_preempted_sequences_come_back_in_the_order_in_which_they_first_opened() -> None:
    """Catches the youngest of them coming first, or new ones before them."""
    run = engine(max_num_batched_tokens=32, max_step_rows=8)
    running = [add(run, endless(prompt(8, 1 + n), 9), max_tokens=9) for n in range(3)]
    launched(run)
    short_of_pages(run, times=2)
    launched(run)
    assert run.scheduler.num_preempted == 2
    add(run, [9])
    assert run.step().opened[:2] == running[1:]


def test_a_page_is_left_for_each_that_runs() -> None:
    """Catches one opened into the last pages, only to be preempted as soon as another grows."""
    run = engine(num_pages=5)
    running = add(run, endless(prompt(8), 6), max_tokens=6)
    launched(run)
    add(run, prompt(6, 2))
    while not running.finished:
        assert not launched(run)
    assert len(launched(run)) == 1


def test_one_that_outgrows_the_cache_fails_alone() -> None:
    """Catches a hang, and others that fail with it; the error names what to raise."""
    run = engine(num_pages=4)
    other = add(run, prompt(4, 2), max_tokens=2)
    fatal = add(run, endless(prompt(8), 30), max_tokens=30)
    late = add(run, prompt(4, 3), max_tokens=2)
    failed = []
    for _ in range(40):
        failed += run.step().failed
        run.scheduler.check_integrity()
    assert failed == [fatal] and len(fatal.output_ids) == 16 - 8
    assert other.finished and late.finished
    with pytest.raises(SequenceOutOfPagesError, match="device_pages or host_memory_gib"):
        add(run, prompt(100))
        run.scheduler.schedule()


def test_max_tokens_is_known_ahead_and_a_stop_token_is_not() -> None:
    """Catches launches for tokens that nobody wants, and a surplus token that is not dropped."""
    run = engine()
    sequence = add(run, endless(prompt(5), 4), max_tokens=4)
    steps_to_finish(run, sequence)
    run.step()
    assert run.scheduler.counters.decoded_tokens == 3
    assert run.scheduler.counters.dropped_results == 0
    stopped = next(
        found
        for first in range(1, 41)
        if (found := add(run, prompt(5, first), max_tokens=30))
        and steps_to_finish(run, found) < 30
        and len(found.output_ids) < 30
    )
    run.step()
    assert stopped.output_ids[-1] == 0 and run.scheduler.counters.dropped_results > 0


@pytest.mark.parametrize("after_steps", range(8))
def test_an_abort_in_any_state(after_steps: int) -> None:
    """Catches pages or slots that an aborted sequence keeps, and results that it still gets."""
    run = engine(num_pages=6, max_num_seqs=2, max_num_batched_tokens=4, max_step_rows=4)
    sequences = [add(run, endless(prompt(8, 1 + n), 8), max_tokens=8) for n in range(3)]
    for _ in range(after_steps):
        run.step()
    for sequence in sequences[1:]:
        sequence.aborted = True
        run.end(sequence)
        run.scheduler.check_integrity()
    outputs = [list(sequence.output_ids) for sequence in sequences[1:]]
    steps_to_finish(run, sequences[0])
    assert [sequence.output_ids for sequence in sequences[1:]] == outputs
    assert not len(run.scheduler) and not run.scheduler.num_running
    cache = run.cache
    assert isinstance(cache, FakeCache) and cache.room() == cache.num_pages
    with pytest.raises(ValueError, match="not here"):
        run.scheduler.finish(sequences[0])


def test_a_step_ends() -> None:
    """Catches a step that goes on without end, and one that begins with what is left of another."""
    run = engine()
    add(run, prompt(20))
    plans = [run.scheduler.schedule() for _ in range(6)]
    starts = [plan.start if isinstance(plan, PrefillChunk) else plan for plan in plans]
    assert starts == [0, None, 8, None, 16, None]
    assert run.scheduler.counters.steps == 3
    batch = run.scheduler.schedule()
    assert isinstance(batch, DecodeBatch) and list(batch.sequences) == [0]
    assert run.scheduler.schedule() is None


def test_the_end_of_a_sequence_whose_plan_has_been_run() -> None:
    """Catches a launch that is noted in a slot which its sequence has given back."""
    run = engine()
    sequence, other = add(run, prompt(4)), add(run, prompt(4, 2))
    chunk = run.scheduler.schedule()
    assert isinstance(chunk, PrefillChunk) and chunk.sequence is sequence
    run.scheduler.finish(sequence)
    run.scheduler.check_integrity()
    chunk = run.scheduler.schedule()
    assert isinstance(chunk, PrefillChunk) and chunk.sequence is other
    assert run.scheduler.counters.chunks == 1


def test_what_cannot_be_added() -> None:
    """Catches sequences with nothing to compute, and one that is there twice."""
    run = engine()
    sequence = add(run, prompt(4))
    refused = [
        sequence,
        ToySequence([], 1),
        ToySequence([1], 0),
        ToySequence([1], 2, aborted=True),
        ToySequence([1], 2, output_ids=[3, 4]),
    ]
    for wrong in refused:
        with pytest.raises(ValueError):
            run.scheduler.add(wrong)
    with pytest.raises(ValueError, match="nothing is launched"):
        run.scheduler.process([Sampled(sequence, 1)])
    with pytest.raises(ValueError, match="max_num_seqs must be positive, got 0"):
        engine(max_num_seqs=0)
