"""Servers for the agents: an engine, or its scheduler and cache on a simulated device."""

import dataclasses
import time
from typing import NamedTuple

from benchmarks.cpu.agent_workload import Answer, AnswerTimes
from kvcache import KVCache, KVGeometry, SimulatedDevice
from serving.engine.engine import Engine
from serving.requests.request import Request
from serving.requests.sampling_params import SamplingParams
from serving.scheduler import DecodeBatch, PrefillChunk, Scheduler, Sequence


class EngineServer:
    """Turns run by an engine.

    Args:
        engine: an idle engine.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._agents: dict[Request, int] = {}
        self._submitted: dict[Request, float] = {}
        self._first: dict[Request, float] = {}
        self._numbers = iter(range(1 << 62))

    def submit(self, agent: int, token_ids: list[int], output_tokens: int) -> None:
        """Queues a turn with a greedy answer of fixed length."""
        params = SamplingParams(
            temperature=0, max_tokens=output_tokens, ignore_eos=True, detokenize=False
        )
        prompt = {"prompt_token_ids": token_ids}
        request = self._engine.input_processor.read(str(next(self._numbers)), prompt, params)
        self._agents[request], self._submitted[request] = agent, time.monotonic()
        self._engine.add(request)

    def step(self) -> list[Answer]:
        """Runs a step of the engine and returns the turns that ended.

        Raises:
            RuntimeError: a request failed.
        """
        grown, now, ended = self._engine.step(), time.monotonic(), []
        for request in grown:
            if request not in self._agents:
                continue  # left over from an earlier run
            first = self._first.setdefault(request, now)
            if not request.finished:
                continue
            output = request.output()
            if output.error is not None:
                raise RuntimeError(output.error)
            ended.append(
                Answer(
                    self._agents.pop(request),
                    output.outputs[0].token_ids,
                    output.cache_counters.cached_tokens,
                    AnswerTimes(first - self._submitted.pop(request), now - first),
                )
            )
            del self._first[request]
        return ended

    @property
    def num_running(self) -> int:
        """Number of sequences that have slots."""
        return self._engine.scheduler.num_running

    @property
    def preemptions(self) -> int:
        """Number of preemptions."""
        return self._engine.scheduler.counters.preempted


@dataclasses.dataclass(eq=False, kw_only=True)
class _Turn(Sequence):
    """Turn of an agent; the tokens of its answer are all the agent's number."""

    agent: int


class _Sampled(NamedTuple):
    """Token that a launch sampled."""

    sequence: _Turn
    token: int


class SimulatedServer:
    """Scheduler and cache bookkeeping, in which a step takes no time and no memory.

    It shows how many turns run at once and what they find in the cache, for stores of any size.

    Args:
        geometry: sizes of the store.
        max_num_batched_tokens: maximum prompt tokens per step.
    """

    def __init__(self, geometry: KVGeometry, max_num_batched_tokens: int) -> None:
        self.cache = KVCache(
            geometry, SimulatedDevice(geometry), max_step_rows=max_num_batched_tokens
        )
        self._scheduler: Scheduler[_Turn] = Scheduler(
            self.cache,
            max_num_seqs=geometry.max_sequences,
            max_num_batched_tokens=max_num_batched_tokens,
            max_step_rows=max_num_batched_tokens,
        )
        self._in_flight: list[_Sampled] = []

    def submit(self, agent: int, token_ids: list[int], output_tokens: int) -> None:
        """Queues a turn."""
        self._scheduler.add(_Turn(token_ids, output_tokens, agent=agent))

    def step(self) -> list[Answer]:
        """Runs a step, and returns the turns that ended with the one before."""
        scheduler, launched = self._scheduler, list[_Sampled]()
        while (plan := scheduler.schedule()) is not None:
            match plan:
                case PrefillChunk(sequence=turn, is_last=True):
                    launched.append(_Sampled(turn, turn.agent))
                case DecodeBatch(sequences=turns):
                    launched += [_Sampled(turn, turn.agent) for turn in turns.values()]
        results, self._in_flight = self._in_flight, launched
        ended = []
        for turn, token in scheduler.process(results):
            turn.output_ids.append(token)
            if turn.finished:
                cached = scheduler.finish(turn).cached_tokens
                ended.append(Answer(turn.agent, turn.output_ids, cached, None))
        return ended

    @property
    def num_running(self) -> int:
        """Number of sequences that have slots."""
        return self._scheduler.num_running

    @property
    def preemptions(self) -> int:
        """Number of preemptions."""
        return self._scheduler.counters.preempted
