"""Counters of the scheduler."""

import dataclasses


@dataclasses.dataclass(slots=True)
class SchedulerCounters:
    """Counts since the start.

    Attributes:
        steps: steps begun.
        chunks: pieces of prompts launched.
        prompt_tokens: their tokens, those of preempted sequences that are computed again included.
        cached_tokens: tokens found in the cache when a sequence opened.
        decoded_tokens: tokens launched in decode steps.
        opened: sequences that got a slot, each time.
        refused: times that a sequence did not fit.
        preempted: times that a sequence lost its slot to others.
        dropped_results: results that came after their sequence had ended.
    """

    steps: int = 0
    chunks: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    decoded_tokens: int = 0
    opened: int = 0
    refused: int = 0
    preempted: int = 0
    dropped_results: int = 0
