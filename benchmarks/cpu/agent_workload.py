"""Agents that take turns with a model: the workload, and who drives it against a server."""

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np


@dataclasses.dataclass(frozen=True)
class Workload:
    """What each agent does: turns of one conversation, each as soon as the last is answered.

    Attributes:
        turns: turns of a conversation.
        first_tokens: prompt tokens of its first turn.
        later_tokens: prompt tokens that each later turn adds.
        output_tokens: tokens of each answer.
    """

    turns: int
    first_tokens: int
    later_tokens: int
    output_tokens: int

    @property
    def context_tokens(self) -> int:
        """Tokens of a whole conversation."""
        later = (self.turns - 1) * (self.later_tokens + self.output_tokens)
        return self.first_tokens + self.output_tokens + later

    def scaled(self, divisor: int) -> "Workload":
        """The same with shorter texts."""
        tokens = (self.first_tokens, self.later_tokens, self.output_tokens)
        return Workload(self.turns, *(math.ceil(count / divisor) for count in tokens))


AGENTS = Workload(turns=13, first_tokens=74_160, later_tokens=753, output_tokens=220)
"""Software agents: a repository to read, then short exchanges."""


@dataclasses.dataclass(frozen=True)
class AnswerTimes:
    """How long an answer took.

    Attributes:
        first_token_seconds: from the request to the first token.
        last_token_seconds: from the first token to the last.
    """

    first_token_seconds: float
    last_token_seconds: float


@dataclasses.dataclass(frozen=True)
class Answer:
    """The end of a turn.

    Attributes:
        agent: whose.
        token_ids: the answer.
        cached_tokens: prompt tokens that were found in the cache.
        times: None where nothing was computed.
    """

    agent: int
    token_ids: Sequence[int]
    cached_tokens: int
    times: AnswerTimes | None


class Server(Protocol):
    """What answers: an engine, or a simulation of one."""

    def submit(self, agent: int, token_ids: list[int], output_tokens: int) -> None:
        """Queues a turn."""
        ...

    def step(self) -> list[Answer]:
        """Goes on; returns the turns that have ended."""
        ...

    @property
    def num_running(self) -> int:
        """Turns under way, of those submitted."""
        ...

    @property
    def preemptions(self) -> int:
        """How often one that was under way had to wait again."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Times:
    """How long a model took after each agent had its first answer.

    Attributes:
        seconds: all of it.
        first_token_seconds: of each turn.
        token_seconds: mean time between tokens, of each turn with several.
    """

    seconds: float
    first_token_seconds: Sequence[float]
    token_seconds: Sequence[float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """What was measured after each agent had its first answer.

    Attributes:
        concurrency: agents at a time.
        turns: turns that ended.
        output_tokens: tokens of their answers.
        times: None where nothing was computed.
        running: turns under way, mean over steps.
        most_running: the most of them in any step.
        reuse: prompt tokens that were found in the cache, over those of the turns before.
        preemptions: how often a turn under way had to wait again.
        cut: it was stopped by the clock.
    """

    concurrency: int
    turns: int
    output_tokens: int
    times: Times | None
    running: float
    most_running: int
    reuse: float
    preemptions: int
    cut: bool


class Agents:
    """A fixed number of conversations at a time; one that ends makes room for another.

    Args:
        workload: what each does.
        concurrency: how many at a time.
        vocab_size: random tokens are drawn below it.
    """

    def __init__(self, workload: Workload, concurrency: int, vocab_size: int) -> None:
        self._workload, self._vocab_size = workload, vocab_size
        self._rng = np.random.default_rng(concurrency)
        self._tokens: dict[int, list[int]] = {agent: [] for agent in range(concurrency)}
        self._turn = dict.fromkeys(self._tokens, 0)

    def next_turn(self, agent: int, answer: Sequence[int] = ()) -> tuple[list[int], int]:
        """An agent's next prompt, and how many of its tokens an earlier turn has had rows for."""
        workload, tokens = self._workload, self._tokens[agent]
        if self._turn[agent] == workload.turns:
            self._turn[agent] = 0
            tokens.clear()
        tokens += answer if self._turn[agent] else ()
        # No step has computed a row of the answer's last token.
        known = max(len(tokens) - 1, 0)
        count = workload.later_tokens if tokens else workload.first_tokens
        tokens += self._rng.integers(self._vocab_size, size=count).tolist()
        self._turn[agent] += 1
        return list(tokens), known


def run_agents(
    server: Server,
    workload: Workload,
    *,
    concurrency: int,
    turns: int,
    vocab_size: int,
    most_seconds: float = math.inf,
    clock: Callable[[], float] = time.monotonic,
) -> Result:
    """Has agents talk until some number of turns has ended, and measures.

    Measuring starts when each agent has had an answer, so that the first prompts, which nothing
    could have cached, count for nothing; it ends early when the time is up.

    Args:
        server: what answers; nothing is queued there.
        workload: what the agents do.
        concurrency: how many there are at a time.
        turns: turns to measure.
        vocab_size: ids of the model.
        most_seconds: of measuring, and as many again before it.
        clock: tells seconds.
    """
    agents = Agents(workload, concurrency, vocab_size)
    known: dict[int, int] = {}

    def submit(agent: int, answer: Sequence[int] = ()) -> None:
        token_ids, known[agent] = agents.next_turn(agent, answer)
        server.submit(agent, token_ids, workload.output_tokens)

    for agent in known or range(concurrency):
        submit(agent)
    answered: set[int] = set()
    start = clock()
    while len(answered) < concurrency and clock() - start < most_seconds:
        for answer in server.step():
            answered.add(answer.agent)
            submit(answer.agent, answer.token_ids)
    start, preemptions = clock(), server.preemptions
    ended: list[Answer] = []
    running: list[int] = []
    reused = reusable = 0
    while len(ended) < turns and clock() - start < most_seconds:
        for answer in server.step():
            ended.append(answer)
            reused += min(answer.cached_tokens, known[answer.agent])
            reusable += known[answer.agent]
            submit(answer.agent, answer.token_ids)
        running.append(server.num_running)
    seconds = clock() - start
    times = [answer.times for answer in ended if answer.times is not None]
    return Result(
        concurrency=concurrency,
        turns=len(ended),
        output_tokens=len(ended) * workload.output_tokens,
        times=_times(times, seconds, workload) if len(times) == len(ended) else None,
        running=float(np.mean(running)),
        most_running=max(running),
        reuse=reused / reusable if reusable else 0.0,
        preemptions=server.preemptions - preemptions,
        cut=len(ended) < turns,
    )


def _times(times: Sequence[AnswerTimes], seconds: float, workload: Workload) -> Times:
    later_tokens = workload.output_tokens - 1
    return Times(
        seconds=seconds,
        first_token_seconds=[answer.first_token_seconds for answer in times],
        token_seconds=[
            answer.last_token_seconds / later_tokens for answer in times if later_tokens
        ],
    )
