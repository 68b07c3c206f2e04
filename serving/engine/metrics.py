"""Counters and state of an engine."""

import dataclasses
from collections import Counter
from collections.abc import Mapping
from typing import Any

from kvcache import CacheCounters


@dataclasses.dataclass(slots=True)
class EngineCounters:
    """Counts since the engine was made, which it keeps.

    Attributes:
        generated_tokens: output tokens.
        finished: sequences that have ended, by reason; "error" for those that failed.
        stalls: launches whose results were waited for.
        stalled_seconds: how long.
        first_tokens: requests that have had their first token.
        first_token_seconds: from their arrival to it, all together.
        later_tokens: output tokens that came after another one of their sequence.
        later_token_seconds: from that one to them, all together.
    """

    generated_tokens: int = 0
    finished: Counter[str] = dataclasses.field(default_factory=Counter)
    stalls: int = 0
    stalled_seconds: float = 0.0
    first_tokens: int = 0
    first_token_seconds: float = 0.0
    later_tokens: int = 0
    later_token_seconds: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoopMetrics:
    """Metrics of an engine at the end of a step.

    All but the numbers of sequences and pages are counts since the start, which only grow.

    Attributes:
        num_waiting: sequences that have not started; a request has `n` of them.
        num_running: sequences that have slots.
        num_preempted: sequences that have lost their slot for want of pages and wait to go on.
        num_preemptions: times that one did.
        steps: steps of the loop.
        device_pages: pages of the store on the devices.
        free_device_pages: of these, free.
        host_pages: pages of the store in host memory.
        free_host_pages: of these, free.
        pages: pages by state, as named in docs/design.md.
        prompt_tokens: tokens of prompts that have been computed or found in the cache, those of
            preempted sequences each time.
        cached_tokens: of these, found in the cache.
        generated_tokens: output tokens.
        cache: what the cache did: reads as of the last results, all else for sequences that have
            ended or been preempted.
        finished: sequences that have ended, by reason; "error" for those that failed.
        stalls: launches whose results were waited for.
        stalled_seconds: how long.
        first_tokens: requests that have had their first token.
        first_token_seconds: from their arrival to it, all together.
        later_tokens: output tokens that came after another one of their sequence.
        later_token_seconds: from that one to them, all together.
        compilations: programs that jax has compiled, or read from its cache, since the engine was
            ready, for anybody.
    """

    num_waiting: int
    num_running: int
    num_preempted: int
    num_preemptions: int
    steps: int
    device_pages: int
    free_device_pages: int
    host_pages: int
    free_host_pages: int
    pages: Mapping[str, int]
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    cache: CacheCounters
    finished: Mapping[str, int]
    stalls: int
    stalled_seconds: float
    first_tokens: int
    first_token_seconds: float
    later_tokens: int
    later_token_seconds: float
    compilations: int

    def __post_init__(self) -> None:
        for name in ("pages", "finished"):
            object.__setattr__(self, name, dict(getattr(self, name)))

    def as_dict(self) -> dict[str, Any]:
        """All of it as dicts and numbers, as for JSON."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return values | {
            "pages": dict(self.pages),
            "finished": dict(self.finished),
            "cache": dataclasses.asdict(self.cache),
            "hit_rate": self.hit_rate,
        }

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens that were found in the cache; 0 before the first."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0
