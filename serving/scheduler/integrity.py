"""Invariants of each sequence between the calls of the scheduler's owner."""

from serving.scheduler.sequence import Phase, ScheduledSequence
from serving.scheduler.sequence_cache import SequenceCache

_NEVER_OPENED = (Phase.WAITING, Phase.HELD)
_COMPUTED = (Phase.DECODING, Phase.DRAINING)


def check_record(record: ScheduledSequence, cache: SequenceCache) -> None:
    """Proves that a record agrees with its sequence, with the cache, and with itself.

    Raises:
        AssertionError: naming what does not.
    """
    name, sequence, phase = (
        f"sequence {record.number}, {record.phase.name},",
        record.sequence,
        record.phase,
    )
    num_tokens = len(sequence.token_ids) + len(sequence.output_ids)
    assert record.num_tokens == num_tokens, f"{name} has {num_tokens} tokens"
    chosen = len(sequence.output_ids) + record.in_flight
    assert chosen <= sequence.max_tokens, f"{name} has chosen {chosen} tokens"
    assert record.num_left == sequence.max_tokens - chosen, f"{name} has chosen {chosen} tokens"
    prefilling = phase is Phase.PREFILLING
    kept = record.tokens is not None
    assert kept or not prefilling, f"{name} has lost its tokens"
    assert not kept or phase not in _COMPUTED, f"{name} keeps its tokens"
    assert record.tokens is None or len(record.tokens) == num_tokens, f"{name} has other tokens"
    never = phase in _NEVER_OPENED
    assert (record.opened is None) == never, f"{name} was opened: {record.opened}"
    if record.slot is None:
        assert never or phase in (Phase.PREEMPTED, Phase.DRAINING), f"{name} has no slot"
        return
    rows = cache.length(record.slot)
    if prefilling:
        assert rows == record.num_rows, f"{name} has {rows} rows"
        assert record.remaining > 0 and not record.in_flight, f"{name} has nothing to compute"
    else:
        assert rows == min(record.num_rows, num_tokens), f"{name} has {rows} rows"
        assert not record.remaining, f"{name} has {record.remaining} tokens to compute"
