"""Decides what each step computes: who starts, whose prompt goes on, who decodes, who is
preempted."""

from serving.scheduler.counters import SchedulerCounters
from serving.scheduler.errors import SequenceOutOfPagesError
from serving.scheduler.plan import DecodeBatch, Plan, PrefillChunk, StepResult
from serving.scheduler.scheduler import Scheduler
from serving.scheduler.sequence import Sequence
from serving.scheduler.sequence_cache import SequenceCache

__all__ = [
    "DecodeBatch",
    "Plan",
    "PrefillChunk",
    "Scheduler",
    "SchedulerCounters",
    "Sequence",
    "SequenceCache",
    "SequenceOutOfPagesError",
    "StepResult",
]
