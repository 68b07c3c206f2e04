"""Invariants of each sequence between the calls of the scheduler's owner."""

from serving.scheduler.sequence import Phase, Sequence
from serving.scheduler.sequence_cache import SequenceCache

_NEVER_OPENED = (Phase.WAITING, Phase.HELD)
_COMPUTED = (Phase.DECODING, Phase.DRAINING)


def check_sequence(sequence: Sequence, cache: SequenceCache) -> None:
    """Proves that the scheduler's part of a sequence agrees with the rest, and with the cache.

    Raises:
        AssertionError: naming what does not.
    """
    name, phase = f"sequence {sequence.number}, {sequence.phase.name},", sequence.phase
    num_tokens = len(sequence.token_ids) + len(sequence.output_ids)
    assert sequence.num_tokens == num_tokens, f"{name} has {num_tokens} tokens"
    sampled = len(sequence.output_ids) + sequence.in_flight
    assert sampled <= sequence.max_tokens, f"{name} has sampled {sampled} tokens"
    assert sequence.num_left == sequence.max_tokens - sampled, (
        f"{name} has sampled {sampled} tokens"
    )
    prefilling = phase is Phase.PREFILLING
    kept = sequence.encoded is not None
    assert kept or not prefilling, f"{name} has lost its tokens"
    assert not kept or phase not in _COMPUTED, f"{name} keeps its tokens"
    assert sequence.encoded is None or len(sequence.encoded) == num_tokens, (
        f"{name} has other tokens"
    )
    never = phase in _NEVER_OPENED
    assert (sequence.opened is None) == never, f"{name} was opened: {sequence.opened}"
    if sequence.slot is None:
        assert never or phase in (Phase.PREEMPTED, Phase.DRAINING), f"{name} has no slot"
        return
    rows = cache.length(sequence.slot)
    if prefilling:
        assert rows == sequence.num_rows, f"{name} has {rows} rows"
        assert sequence.remaining > 0 and not sequence.in_flight, f"{name} has nothing to compute"
    else:
        assert rows == min(sequence.num_rows, num_tokens), f"{name} has {rows} rows"
        assert not sequence.remaining, f"{name} has {sequence.remaining} tokens to compute"
