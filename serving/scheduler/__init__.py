"""Decides what each step computes: who starts, whose prompt goes on, who decodes, who is
preempted."""

from serving.scheduler.counters import SchedulerCounters
from serving.scheduler.scheduler import PrefillChunk, Scheduler, SequenceOutOfPagesError
from serving.scheduler.sequence import Sequence
from serving.scheduler.sequence_cache import SequenceCache

__all__ = [
    "PrefillChunk",
    "Scheduler",
    "SchedulerCounters",
    "Sequence",
    "SequenceCache",
    "SequenceOutOfPagesError",
]
