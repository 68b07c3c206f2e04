"""Workload of agents that take turns with a model, and its driver."""

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np


@dataclasses.dataclass(frozen=True)
class Workload:
    """Conversation of each agent: turns, each sent as soon as the last is answered.

    Attributes:
        turns: number of turns of a conversation.
        first_tokens: prompt tokens of its first turn.
        later_tokens: prompt tokens added by each later turn.
        output_tokens: tokens of each answer.
    """

    turns: int
    first_tokens: int
    later_tokens: int
    output_tokens: int

    @property
    def context_tokens(self) -> int:
        """Tokens of the whole conversation."""
        later = (self.turns - 1) * (self.later_tokens + self.output_tokens)
        return self.first_tokens + self.output_tokens + later

    def scaled(self, divisor: int) -> "Workload":
        """Returns the same workload with texts shortened by a factor."""
        tokens = (self.first_tokens, self.later_tokens, self.output_tokens)
        return Workload(self.turns, *(math.ceil(count / divisor) for count in tokens))


AGENTS = Workload(turns=13, first_tokens=74_160, later_tokens=753, output_tokens=220)
"""Software agents: a repository to read, then short exchanges."""


@dataclasses.dataclass(frozen=True)
class AnswerTimes:
    """Times of an answer.

    Attributes:
        first_token_seconds: from the request to the first token.
        last_token_seconds: from the first token to the last.
    """

    first_token_seconds: float
    last_token_seconds: float


@dataclasses.dataclass(frozen=True)
class Answer:
    """Answer to a turn.

    Attributes:
        agent: number of the agent.
        token_ids: tokens of the answer.
        cached_tokens: prompt tokens found in the cache.
        times: None in a simulation.
    """

    agent: int
    token_ids: Sequence[int]
    cached_tokens: int
    times: AnswerTimes | None


class Server(Protocol):
    """Server of the agents: an engine, or a simulation of one."""

    def submit(self, agent: int, token_ids: list[int], output_tokens: int) -> None:
        """Queues a turn."""
        ...

    def step(self) -> list[Answer]:
        """Runs a step and returns the turns that ended."""
        ...

    @property
    def num_running(self) -> int:
        """Number of turns that run now."""
        ...

    @property
    def preemptions(self) -> int:
        """Number of times that a running turn was preempted."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Times:
    """Times measured after each agent had its first answer.

    Attributes:
        seconds: of the whole measurement.
        first_token_seconds: time to the first token of each turn.
        token_seconds: mean time between tokens of each turn with several.
    """

    seconds: float
    first_token_seconds: Sequence[float]
    token_seconds: Sequence[float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """Result of a run, measured after each agent had its first answer.

    Attributes:
        concurrency: number of agents.
        turns: number of turns that ended.
        output_tokens: tokens of their answers.
        times: None in a simulation.
        running: running turns, mean over steps.
        max_running: running turns, maximum over steps.
        reuse: prompt tokens found in the cache, over those that earlier turns computed.
        preemptions: number of times that a running turn was preempted.
        cut: whether the time limit ended the measurement.
    """

    concurrency: int
    turns: int
    output_tokens: int
    times: Times | None
    running: float
    max_running: int
    reuse: float
    preemptions: int
    cut: bool


class Agents:
    """Fixed number of concurrent conversations; a new one replaces each that ends.

    Args:
        workload: the conversation of each agent.
        concurrency: number of agents.
        vocab_size: bound of the random token ids.
    """

    def __init__(self, workload: Workload, concurrency: int, vocab_size: int) -> None:
        self._workload, self._vocab_size = workload, vocab_size
        self._rng = np.random.default_rng(concurrency)
        self._tokens: dict[int, list[int]] = {agent: [] for agent in range(concurrency)}
        self._turn = dict.fromkeys(self._tokens, 0)

    def next_turn(self, agent: int, answer: Sequence[int] = ()) -> tuple[list[int], int]:
        """Returns an agent's next prompt, and how many of its rows earlier turns have computed."""
        workload, tokens = self._workload, self._tokens[agent]
        if self._turn[agent] == workload.turns:
            self._turn[agent] = 0
            tokens.clear()
        tokens += answer if self._turn[agent] else ()
        # No step has computed the row of the answer's last token.
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
    max_seconds: float = math.inf,
    clock: Callable[[], float] = time.monotonic,
) -> Result:
    """Runs agents until a number of turns has ended, and measures them.

    Measuring starts when each agent has had an answer, so that first prompts, which cannot be in
    the cache, are not counted. It ends early when the time is up.

    Args:
        server: an idle server.
        workload: the conversation of each agent.
        concurrency: number of agents.
        turns: number of turns to measure.
        vocab_size: bound of the random token ids.
        max_seconds: time limit of the measurement, and of the first answers before it.
        clock: returns the time in seconds.
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
    while len(answered) < concurrency and clock() - start < max_seconds:
        for answer in server.step():
            answered.add(answer.agent)
            submit(answer.agent, answer.token_ids)
    start, preemptions = clock(), server.preemptions
    ended: list[Answer] = []
    running: list[int] = []
    reused = reusable = 0
    while len(ended) < turns and clock() - start < max_seconds:
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
        max_running=max(running),
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
