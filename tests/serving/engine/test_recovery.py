"""Engines whose bookkeeping is torn at any point: they are built anew, or stop for good."""

import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from glm53 import LLM, EngineDeadError, GenerationError, SamplingParams, ServingLoop
from kvcache import CacheCounters, KVGeometry
from serving import engine_access
from serving.engine.engine import Engine
from serving.engine.failures import MAX_FAILURES
from serving.engine.model_runner import ModelRunner
from tests.helpers.toy_engine import assert_idle, request, tokens, toy_llm, toy_options

pytestmark = pytest.mark.compiles
ROOT = Path(__file__).parents[3]
PROMPT = tokens(7, 40)
SHORT = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return toy_llm(folder)


@pytest.fixture(scope="module")
def expected(llm: LLM) -> list[int]:
    """What the prompt gives while nothing goes wrong."""
    return answer(llm)


def answer(llm: LLM) -> list[int]:
    (output,) = llm.generate({"prompt_token_ids": PROMPT}, SHORT)
    assert output.error is None
    return output.outputs[0].token_ids


def crowd(engine: Engine) -> list[Any]:
    """More than have slots and pages, two of them with the same prompt."""
    seeds = (1, 2, 2, 3)
    return [
        request(engine, f"{index}", tokens(seed, 70 + seed), max_tokens=60)
        for index, seed in enumerate(seeds)
    ]


# --- tears ---


def parts(root: object) -> list[Any]:
    """Containers and objects with counts that a scheduler or a cache keeps, in a fixed order."""
    found: list[Any] = []
    seen: set[int] = set()
    left = deque([root])
    while left:
        one = left.popleft()
        ours = type(one).__module__.startswith(("kvcache", "serving.scheduler"))
        container = isinstance(one, dict | list | set | deque)
        immutable = isinstance(one, KVGeometry | CacheCounters)
        if id(one) in seen or immutable or not (ours or container):
            continue
        seen.add(id(one))
        found.append(one)
        if isinstance(one, dict):
            left.extend([*one.keys(), *one.values()])
        elif container:
            left.extend(one)
        else:
            slots = [name for kind in type(one).__mro__ for name in getattr(kind, "__slots__", ())]
            names = [*getattr(one, "__dict__", {}), *slots]
            left.extend(getattr(one, name) for name in names if name != "counters")
    return found


def tear(part: Any, number: int) -> None:
    """Loses, doubles or changes something in a container or object."""
    match part:
        case dict() | set() if part:
            kept = list(part)
            one = kept[number % len(kept)]
            _ = part.pop(one) if isinstance(part, dict) else part.remove(one)
        case list() | deque() if part:
            index = number % len(part)
            if number % 3:
                del part[index]
            else:
                part.append(part[index])
        case dict() | set() | list() | deque():
            pass
        case _:
            counts = [
                name for name, value in getattr(part, "__dict__", {}).items() if type(value) is int
            ]
            if counts:
                name = counts[number % len(counts)]
                setattr(part, name, getattr(part, name) + number % 7 - 3)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    steps=st.integers(0, 40),
    tears=st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 1000)), min_size=1, max_size=6),
    lose_store=st.booleans(),
    interrupted=st.booleans(),
)
def test_any_tear(
    llm: LLM,
    expected: list[int],
    steps: int,
    tears: list[tuple[int, int]],
    lose_store: bool,
    interrupted: bool,
) -> None:
    """A recovery that asks something of what it replaces."""
    engine = llm._engine
    requests = crowd(engine)
    for one in requests:
        engine.add(one)
    for _ in range(steps):
        engine.step()
    for where, number in tears:
        found = parts([engine.scheduler, engine.runner.cache])
        tear(found[where % len(found)], number)
    if lose_store:
        leaves = jax.tree.leaves((engine.runner.cache.device.store, engine.runner._sampling))
        leaves[tears[0][0] % len(leaves)].delete()

    def fail(*_: Any) -> None:
        raise KeyboardInterrupt if interrupted else RuntimeError("torn")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelRunner, "launch_prefill", fail)
        patch.setattr(ModelRunner, "launch_decode", fail)
        try:
            for _ in range(3):
                if engine.has_work:
                    engine.step()
        except KeyboardInterrupt:
            pass
    engine._state.failures.end()
    while engine.has_work:
        engine.step()
    assert all(one.finished for one in requests)
    assert_idle(engine)
    assert answer(llm) == expected
    assert_idle(engine)


class Interruption:
    """Raises at given lines of what is called, counted over the files of serving and the cache.

    Attributes:
        num_lines: lines that have come.
    """

    def __init__(self, errors: dict[int, type[BaseException]]) -> None:
        self._errors, self.num_lines = errors, 0

    def __call__(self, frame: FrameType, event: str, _: object) -> Any:
        name = frame.f_code.co_filename
        if name == engine_access.__file__:
            return None  # It relies on Python, which interrupts after calls and not at all lines.
        if not name.startswith((f"{ROOT}/serving", f"{ROOT}/kvcache")):
            return None
        if event == "line":
            self.num_lines += 1
            if self.num_lines in self._errors:
                raise self._errors[self.num_lines]
        return self

    def run(self, action: Callable[[], object]) -> None:
        """Runs an action; what was raised may come out of it."""
        before = sys.gettrace()
        sys.settrace(self)
        try:
            action()
        except (KeyboardInterrupt, RuntimeError, AssertionError):
            pass
        finally:
            sys.settrace(before)


def use(llm: LLM) -> None:
    """A call of each kind, beside an iterator that is left open and one that is closed."""
    prompts: list[Any] = [{"prompt_token_ids": tokens(seed, 50)} for seed in (4, 5, 5, 6)]
    open_one = llm.generate_iter(prompts[0], SHORT, stream=True)
    next(open_one)
    llm.generate(prompts, SHORT, use_tqdm=False)
    for index, _ in llm.serve(((prompt, SHORT) for prompt in prompts), stream=True):
        if index == 2:
            break
    llm.reset_prefix_cache()
    next(open_one)


# What is raised in a finalizer comes out nowhere.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interruption_anywhere(llm: LLM, expected: list[int]) -> None:
    """A line after which an error or Control-C, or both, leave an LLM that is of no use: locked,
    with pages lost, or with requests that never end."""
    use(llm)
    count = Interruption({})
    count.run(lambda: use(llm))
    assert count.num_lines > 10_000
    for number in range(30):
        first = 1 + number * count.num_lines // 30 + number * 17 % 50
        kinds = (KeyboardInterrupt, RuntimeError)
        errors: dict[int, type[BaseException]] = {first: kinds[number % 2]}
        if number % 3 == 0:  # While that is dealt with.
            errors[first + 1 + number * 7 % 60] = kinds[number // 2 % 2]
        Interruption(errors).run(lambda: use(llm))
        llm._engine._state.failures.end()
        assert answer(llm) == expected, errors
        while llm._engine.has_work:
            llm._engine.step()
        assert_idle(llm._engine)


# --- failures without end ---


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Launches that all fail, the first with another error than the rest; their numbers."""
    calls: list[int] = []

    def fail(*_: Any) -> None:
        calls.append(len(calls))
        raise RuntimeError("the first of all" if len(calls) == 1 else "")

    monkeypatch.setattr(ModelRunner, "launch_prefill", fail)
    return calls


def test_failures_without_end(
    folder: Path, failing: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    """An engine that fails step after step for as long as there are requests, and fills the log;
    requests that wait for it, or are not told why they fail; lines of the log without a word."""
    llm = toy_llm(folder)
    prompts: Any = [{"prompt_token_ids": tokens(seed, 30)} for seed in range(40)]
    outputs = llm.generate(prompts, SHORT, on_error="return")
    assert len(failing) == MAX_FAILURES
    errors = [output.error for output in outputs]
    assert errors[:6] == ["the first of all", *["RuntimeError"] * 3, *["the first of all"] * 2]
    assert all("the first of all" in error for error in errors[4:] if error is not None)
    assert all(errors)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == MAX_FAILURES + 1
    assert [message.split(": ")[-1] for message in messages] == [
        "the first of all",
        *["RuntimeError"] * 4,
        "the first of all",
    ]
    assert [bool(record.exc_info) for record in caplog.records] == [True] + [False] * MAX_FAILURES
    for _ in range(2):
        with pytest.raises(EngineDeadError, match=r"has stopped.*the first of all") as caught:
            llm.generate(prompts[0], SHORT)
        assert str(caught.value.__cause__) == "the first of all"
    assert len(failing) == MAX_FAILURES
    assert len(caplog.records) == MAX_FAILURES + 1


def test_failures_with_tokens_between(
    llm: LLM, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that stops although it serves requests between its failures."""
    launch, calls = ModelRunner.launch_decode, []

    def failing(*args: Any) -> Any:
        calls.append(args)
        if len(calls) % 3 == 0:
            raise RuntimeError("now and then")
        return launch(*args)

    monkeypatch.setattr(ModelRunner, "launch_decode", failing)
    for _ in range(MAX_FAILURES + 2):
        with pytest.raises(RuntimeError, match="now and then"):
            answer(llm)
    monkeypatch.undo()
    assert answer(llm) == expected


def test_failures_without_end_in_a_loop(folder: Path, failing: list[int]) -> None:
    """The same of a serving loop: streams that wait forever."""
    with ServingLoop(toy_options(folder), warm_up=False) as loop:
        streams = [
            loop.submit({"prompt_token_ids": tokens(seed, 30)}, request_id=f"{seed}")
            for seed in range(20)
        ]
        for stream in streams:
            with pytest.raises(GenerationError, match=f"request '{stream.request_id}' failed: .*"):
                stream.result(timeout=60)
        assert len(failing) == MAX_FAILURES
        with pytest.raises(EngineDeadError, match=r"has stopped.*the first of all"):
            loop.submit({"prompt_token_ids": PROMPT})


def test_a_loop_that_stops_after_a_request_came(folder: Path) -> None:
    """One that is submitted in time and taken in too late."""
    loop = ServingLoop(toy_options(folder), warm_up=False)
    stream = loop.submit({"prompt_token_ids": PROMPT})
    for _ in range(MAX_FAILURES):
        loop._engine._state.failures.add(RuntimeError("the device is lost"))
    assert not loop.step()
    with pytest.raises(GenerationError, match=r"has stopped.*the device is lost"):
        stream.result(timeout=0)
    loop.close()


def test_a_step_that_can_do_nothing(llm: LLM, expected: list[int]) -> None:
    """Sequences that nothing will ever start, for which steps are run forever."""
    engine = llm._engine
    requests = crowd(engine)
    for one in requests:
        engine.add(one)
    engine.scheduler._waiting = type(engine.scheduler._waiting)(0.25)
    while engine.has_work:
        engine.step()
    # None had started, so that all of them could begin once more.
    assert [one.error for one in requests] == [None] * 4
    assert_idle(engine)
    assert answer(llm) == expected
