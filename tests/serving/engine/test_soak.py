"""Random days of a small engine: arrivals, turns, forks and aborts on a store that is too small."""

import functools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.engine.engine import Engine
from serving.requests.request import Request
from tests.helpers.toy_engine import LONGEST, assert_idle, request, tokens, toy_options

pytestmark = [pytest.mark.compiles, pytest.mark.slow]

MAX_OUTPUT = 120
EVENTS = st.one_of(
    st.tuples(st.just("arrival"), st.integers(0, 5), st.integers(1, 150)),
    st.tuples(st.just("turn"), st.integers(0, 9), st.integers(1, 20)),
    st.tuples(st.just("fork"), st.integers(0, 9), st.integers(1, 150)),
    st.tuples(st.just("abort"), st.integers(0, 9), st.just(0)),
    st.tuples(st.just("steps"), st.integers(1, 30), st.just(0)),
)


class Day:
    """What has been asked of an engine."""

    def __init__(self, engine: Engine, alone: Any) -> None:
        self.engine, self.alone = engine, alone
        self.requests: list[Request] = []
        self.steps = self.work = 0

    def submit(self, token_ids: list[int], priority: int) -> None:
        token_ids = token_ids[: LONGEST - MAX_OUTPUT]
        one = request(
            self.engine,
            str(len(self.requests)),
            token_ids,
            max_tokens=1 + (37 * len(self.requests)) % MAX_OUTPUT,
            priority=priority,
        )
        self.work += len(token_ids) // 8 + MAX_OUTPUT
        self.requests.append(one)
        self.engine.add(one)

    def said(self, number: int) -> list[int]:
        """The conversation of some earlier request."""
        part = self.requests[number % len(self.requests)].sequences[0]
        return [*part.token_ids, *part.output_ids]

    def step(self) -> None:
        self.engine.step()
        self.engine.scheduler.check_integrity()
        self.engine.runner.cache.check_integrity()
        self.steps += 1

    def take(self, kind: str, number: int, size: int) -> None:
        if kind == "steps":
            for _ in range(number):
                self.step()
        elif kind == "arrival":
            self.submit(tokens(number, size), priority=number // 4)
        elif self.requests and kind == "turn":
            self.submit([*self.said(number), *tokens(90 + number, size)], priority=0)
        elif self.requests and kind == "fork":
            self.submit([*self.said(number)[:size], *tokens(50 + number, 3)], priority=0)
        elif self.requests:
            self.engine.abort(self.requests[number % len(self.requests)])

    def end(self) -> None:
        most = self.steps + 4 * self.work + 100
        while self.engine.has_work:
            self.step()
            assert self.steps < most, "a request waits forever"
        assert_idle(self.engine)
        for one in self.requests:
            output = one.output()
            assert output.finished and output.error is None
            (part,) = output.outputs
            expected = self.alone(tuple(output.prompt_token_ids))
            assert part.token_ids == expected[: len(part.token_ids)]
            complete = len(part.token_ids) == one.sequences[0].max_tokens
            assert complete == (part.finish_reason == "length")


@pytest.fixture(scope="module")
def alone(folder: Path) -> Any:
    """The tokens that follow a prompt on an ample store of its own."""
    resident = {"kv_policy": "resident", "host_memory_gib": None, "row_cache_rows": None}
    engine = Engine(toy_options(folder, device_pages=16, enable_prefix_caching=False, **resident))

    @functools.cache
    def answer(token_ids: tuple[int, ...]) -> list[int]:
        one = request(engine, "x", list(token_ids), max_tokens=MAX_OUTPUT)
        engine.add(one)
        while engine.has_work:
            engine.step()
        return one.output().outputs[0].token_ids

    return answer


@pytest.mark.parametrize("kv_policy", ["hybrid", "swap", "resident"])
def test_days(folder: Path, alone: Any, kv_policy: str) -> None:
    """A token that depends on others, a page lost, a request that never ends, or a program that is
    compiled while requests wait."""
    options: dict[str, Any] = {"kv_policy": kv_policy}
    if kv_policy == "hybrid":
        options["device_pages"] = 5  # all its pages can be used
    else:
        options["row_cache_rows"] = None
    if kv_policy == "resident":
        options["host_memory_gib"] = None
    engine = Engine(toy_options(folder, **options), warm_up=True)
    alone(tuple(tokens(0, 9)))
    compiled = engine.metrics().compilations
    steps = 0

    @settings(max_examples=80)
    @given(events=st.lists(EVENTS, min_size=10, max_size=40))
    def day(events: list[tuple[str, int, int]]) -> None:
        nonlocal steps
        one = Day(engine, alone)
        for event in events:
            one.take(*event)
        one.end()
        steps += one.steps

    day()
    assert steps > 5000
    assert engine.scheduler.counters.preempted > 5
    assert engine.metrics().compilations == compiled
