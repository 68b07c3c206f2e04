"""Lifetimes of engines: threads, handlers and ends."""

import asyncio
import contextlib
import gc
import logging
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

from glm53 import LLM, GenerationError, SamplingParams, ServingLoop
from serving.engine.model_runner import ModelRunner
from serving.requests.outputs import RequestOutput
from tests.helpers.toy_engine import assert_idle, tokens, toy_llm, toy_options

pytestmark = pytest.mark.compiles


@pytest.fixture(scope="module")
def shared_llm(folder: Path) -> LLM:
    return toy_llm(folder)


@pytest.fixture
def llm(shared_llm: LLM) -> Iterator[LLM]:
    """One in which nothing is left in the end."""
    yield shared_llm
    gc.collect()
    assert_idle(shared_llm._engine)


def ids(seed: int, count: int = 40) -> Any:
    return {"prompt_token_ids": tokens(seed, count)}


def greedy(max_tokens: int = 8) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def token_ids_of(output: RequestOutput) -> list[int]:
    assert output.error is None
    return output.outputs[0].token_ids


@pytest.fixture(scope="module")
def expected(shared_llm: LLM) -> list[list[int]]:
    """What prompts give alone."""
    return [token_ids_of(shared_llm.generate(ids(seed), greedy())[0]) for seed in range(6)]


def run_threads(*actions: Callable[[], None]) -> None:
    """Runs actions side by side; the first error of any comes out."""
    errors: list[BaseException] = []

    def run(action: Callable[[], None]) -> None:
        try:
            action()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(one,), daemon=True) for one in actions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a thread waits forever"
    if errors:
        raise errors[0]


# --- threads ---


def test_threads_of_one_llm(llm: LLM, expected: list[list[int]]) -> None:
    """Answers mixed up, rows of arrays that another thread has given away, and threads that wait
    forever: by lists, iterators that are read to the end or left, prompts drawn one by one, and
    everything else that touches the cache."""

    def generate(seed: int) -> None:
        for _ in range(3):
            outputs = llm.generate([ids(seed), ids(5 - seed)], greedy(), use_tqdm=False)
            assert [token_ids_of(one) for one in outputs] == [expected[seed], expected[5 - seed]]

    def iterate() -> None:
        for _ in range(3):
            last = dict(llm.generate_iter([ids(2), ids(3)], greedy(), stream=True))
            assert [token_ids_of(last[index]) for index in range(2)] == expected[2:4]
            with contextlib.closing(
                llm.serve((ids(seed), greedy()) for seed in range(6))
            ) as served:
                index, output = next(served)
                assert token_ids_of(output) == expected[index]

    def reset() -> None:
        for _ in range(10):
            llm.reset_prefix_cache()

    run_threads(*(lambda seed=seed: generate(seed) for seed in range(3)), iterate, iterate, reset)


def test_export_beside_a_thread_that_resets(llm: LLM, tmp_path: Path) -> None:
    """Pages of a prompt that go between its last step and the export."""
    exported = threading.Event()

    def export() -> None:
        for number in range(5):
            assert llm.export_prefix(ids(95, 50), tmp_path / f"{number}") == 50
        exported.set()

    def reset() -> None:
        while not exported.is_set():
            llm.reset_prefix_cache()

    run_threads(export, reset)
    assert len({file.read_bytes() for file in tmp_path.iterdir()}) == 1


def test_turns(llm: LLM, expected: list[list[int]]) -> None:
    """A thread that gets no turn while another, which comes back at once, has work."""
    seen: list[int] = []
    started, answered = threading.Event(), threading.Event()

    def long() -> None:
        for _, output in llm.generate_iter(ids(90, 20), greedy(230), stream=True):
            seen.append(len(token_ids_of(output)))
            if len(seen) == 5:
                started.set()
        assert answered.is_set(), "all of the other's work came first"

    def short() -> None:
        started.wait(60)
        assert token_ids_of(llm.generate(ids(1), greedy())[0]) == expected[1]
        answered.set()

    run_threads(long, short)
    assert seen[-1] == 230


def test_an_interruption_of_another_call(
    llm: LLM, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs that an interruption has cut short, given as if they were whole."""
    raising = llm.generate_iter(ids(90, 20), greedy(230), stream=True)
    returning = llm.generate_iter(ids(91, 20), greedy(230), stream=True, on_error="return")
    served = llm.serve([(ids(92, 20), greedy(230))], stream=True)
    for iterator in (raising, returning, served):
        next(iterator)

    def interrupt(*_: Any) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(ModelRunner, "launch_decode", interrupt)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(ids(1), greedy())
    for iterator in (raising, served):
        with pytest.raises(RuntimeError, match="interrupted in another call"):
            next(iterator)
    (_, output), *rest = returning
    assert not rest and output.error is not None and "submit it again" in output.error
    assert token_ids_of(llm.generate(ids(1), greedy())[0]) == expected[1]


def test_an_iterator_that_another_thread_closes(llm: LLM, expected: list[list[int]]) -> None:
    """Pages kept, or a step disturbed that is in flight meanwhile."""
    iterators = [llm.generate_iter(ids(seed), greedy(100), stream=True) for seed in (91, 92)]
    for one in iterators:
        next(one)

    def close() -> None:
        for one in iterators:
            one.close()  # pyright: ignore[reportAttributeAccessIssue] it is a generator

    def generate() -> None:
        assert token_ids_of(llm.generate(ids(2), greedy())[0]) == expected[2]

    run_threads(generate, close)


@pytest.mark.parametrize("where", ["launch_decode", "results"])
def test_an_iterator_that_is_collected_in_a_step(
    llm: LLM, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """A collection in the middle of a step, which aborts requests of that step."""
    iterator = llm.generate_iter(ids(93), greedy(100), stream=True)
    next(iterator)
    method, left = getattr(ModelRunner, where), [iterator]
    del iterator

    def collecting(*args: Any) -> Any:
        left.clear()
        return method(*args)

    monkeypatch.setattr(ModelRunner, where, collecting)
    assert token_ids_of(llm.generate(ids(3), greedy())[0]) == expected[3]


# --- calls from inside ---


def test_calls_from_inside_a_step(
    llm: LLM, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal handler that calls the LLM whose step it interrupts, and waits for itself."""
    launch, refused = ModelRunner.launch_decode, []

    def handling(*args: Any) -> Any:
        for call in (lambda: llm.generate(ids(1), greedy()), llm.reset_prefix_cache):
            with pytest.raises(RuntimeError, match="LLM was called from inside its own step"):
                call()
            refused.append(call)
        return launch(*args)

    monkeypatch.setattr(ModelRunner, "launch_decode", handling)
    assert token_ids_of(llm.generate(ids(4), greedy())[0]) == expected[4]
    assert refused


def test_a_handler_while_its_thread_waits(llm: LLM, expected: list[list[int]]) -> None:
    """A signal handler that calls the LLM for which its thread waits, and waits for that thread."""
    inside, go_on, found = threading.Event(), threading.Event(), []
    holder = threading.Thread(
        target=lambda: llm._shared.run(lambda: (inside.set(), go_on.wait(60)))
    )

    def handle(*_: object) -> None:
        go_on.set()
        found.append(token_ids_of(llm.generate(ids(1), greedy(), use_tqdm=False)[0]))

    before = signal.signal(signal.SIGALRM, handle)
    try:
        holder.start()
        inside.wait(60)
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        assert token_ids_of(llm.generate(ids(2), greedy())[0]) == expected[2]
    finally:
        signal.signal(signal.SIGALRM, before)
    holder.join(60)
    assert found == [expected[1]]


def test_prompts_that_call_the_llm(llm: LLM, expected: list[list[int]]) -> None:
    """A generator of prompts that asks the LLM itself for them, or raises in the middle."""

    def prompts() -> Iterator[tuple[Any, SamplingParams]]:
        for seed in range(4):
            first = token_ids_of(llm.generate(ids(seed), greedy())[0])
            assert first == expected[seed]
            yield {"prompt_token_ids": tokens(seed, 40) + first[:4]}, greedy(4)

    outputs = dict(llm.serve(prompts()))
    assert [token_ids_of(outputs[index]) for index in range(4)] == [one[4:] for one in expected[:4]]

    def raising() -> Iterator[tuple[Any, SamplingParams]]:
        yield ids(1), greedy()
        raise KeyError("of the caller's own")

    with pytest.raises(KeyError, match="of the caller's own"):
        list(llm.serve(raising()))


# --- ends ---


def arrays_of(llm: LLM) -> list[jax.Array]:
    runner = llm._engine.runner
    device = runner.cache.device
    return jax.tree.leaves((runner.params, device.store, device.sequences, runner._sampling))


def test_closing_an_llm(folder: Path, expected: list[list[int]], tmp_path: Path) -> None:
    """Memory that is kept, or use of what is gone."""
    with toy_llm(folder) as llm:
        (output,) = llm.generate(ids(1), greedy())
        open_one = llm.generate_iter(ids(2), greedy(100), stream=True)
        next(open_one)
        unread = llm.generate_iter(ids(2), greedy())
        drawn = llm.serve([(ids(1), greedy())])
        arrays = arrays_of(llm)
    assert token_ids_of(output) == expected[1]
    assert len(arrays) > 20
    assert all(array.is_deleted() for array in arrays)
    calls: list[Callable[[], object]] = [
        lambda: llm.generate(ids(1)),
        lambda: llm.generate([]),
        lambda: llm.generate_iter(ids(1)),
        lambda: llm.serve([]),
        lambda: llm.chat([{"role": "user", "content": "?"}]),
        lambda: llm.import_prefix(tmp_path / "prefix"),
        lambda: llm.export_prefix(ids(1), tmp_path / "other"),
        llm.reset_prefix_cache,
        llm.__enter__,
        lambda: next(open_one),
        lambda: next(unread),
        lambda: next(drawn),
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match="this LLM is closed"):
            call()
    llm.close()


@pytest.mark.parametrize("times", [1, 2])
def test_closing_while_others_use_it(folder: Path, times: int) -> None:
    """A thread that waits forever, or goes on with arrays that are gone."""
    llm, started, refused = toy_llm(folder), threading.Event(), []

    def generate() -> None:
        with pytest.raises(RuntimeError, match="this LLM is closed") as caught:
            for _ in llm.generate_iter([ids(94), ids(95)], greedy(200), stream=True):
                started.set()
        refused.append(caught.value)

    def close() -> None:
        started.wait(60)
        llm.close()

    run_threads(generate, *[close] * times)
    assert refused


def test_closing_inside_a_step(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal handler that closes an LLM or a loop whose step it interrupts."""
    launch = ModelRunner.launch_decode
    llm = toy_llm(folder)
    loop = ServingLoop(toy_options(folder), warm_up=False)
    closed: Any = llm

    def handling(*args: Any) -> Any:
        closed.close()
        return launch(*args)

    monkeypatch.setattr(ModelRunner, "launch_decode", handling)
    with pytest.raises(RuntimeError, match="this LLM is closed"):
        llm.generate(ids(1), greedy())
    assert all(array.is_deleted() for array in arrays_of(llm))
    closed = loop
    stream = loop.submit(ids(1), greedy())
    with pytest.raises(RuntimeError, match="is closed"):
        while loop.step():
            pass
    assert stream.result(timeout=0).outputs[0].finish_reason == "abort"


def test_a_deleted_llm(folder: Path) -> None:
    """An engine that is kept by what it has given: outputs, iterators, errors of requests."""
    llm = toy_llm(folder)
    engine, arrays = weakref.ref(llm._engine), [weakref.ref(one) for one in arrays_of(llm)]
    kept: list[Any] = llm.generate([ids(1), ids(2)], greedy())
    unread = llm.generate_iter(ids(1), greedy())
    drawn = llm.serve([(ids(1), greedy())] * 2)
    begun = llm.generate_iter([ids(1), ids(2)], greedy(30), stream=True)
    kept += [next(begun), next(drawn)]
    iterators = [unread, drawn, begun]
    del llm
    gc.collect()
    assert engine() is None
    assert all(array() is None for array in arrays)
    for one in iterators:
        with pytest.raises(RuntimeError, match="the LLM of this iterator was deleted"):
            next(one)
        assert list(one) == []


def test_a_deleted_loop(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same of a loop's streams; those that wait for a step that nobody will run."""
    loop = ServingLoop(toy_options(folder), warm_up=False)
    engine = weakref.ref(loop._engine)
    done, running, waiting, failed = (loop.submit(ids(seed), greedy(20)) for seed in range(4))
    outputs = iter(running)

    def fail(*_: Any) -> None:
        raise RuntimeError("the device is lost")

    while not done.finished:
        loop.step()
    next(outputs, None)
    with monkeypatch.context() as patch:
        # A record of the log, which pytest keeps, has the error with its frames.
        patch.setattr(logging.getLogger("serving.engine.failures"), "disabled", True)
        patch.setattr(ModelRunner, "launch_prefill", fail)
        patch.setattr(ModelRunner, "launch_decode", fail)
        late = loop.submit(ids(5))
        while not failed.finished:
            loop.step()
    waiting = loop.submit(ids(6))
    loop.abort(late.request_id)
    del loop
    gc.collect()
    assert engine() is None
    assert len(token_ids_of(done.result(timeout=0))) == 20
    with pytest.raises(GenerationError, match="the device is lost"):
        failed.result(timeout=0)
    with pytest.raises(GenerationError, match="its serving loop was deleted"):
        waiting.result(timeout=60)
    with pytest.raises(GenerationError, match="its serving loop was deleted"):
        asyncio.run(anext(aiter(waiting)))
    waiting.abort()


def test_closing_a_loop_twice(folder: Path) -> None:
    """Threads that wait for each other; memory that is kept."""
    loop = ServingLoop(toy_options(folder), warm_up=False)
    loop.start()
    streams = [loop.submit(ids(seed), greedy(200)) for seed in range(4)]
    arrays: Any = jax.tree.leaves(loop._engine.runner.params)
    run_threads(loop.close, loop.close)
    assert all(array.is_deleted() for array in arrays)
    for stream in streams:
        assert stream.result(timeout=0).outputs[0].finish_reason == "abort"
    assert loop.metrics().finished["abort"] == 4


# --- the prefix cache ---


def test_reset_prefix_cache(llm: LLM, expected: list[list[int]]) -> None:
    """A prompt found after it has been dropped, or rows dropped that a request still reads."""
    llm.generate(ids(1), greedy())
    (output,) = llm.generate(ids(1), greedy())
    assert output.num_cached_tokens > 0
    open_one = llm.generate_iter(ids(96, 90), greedy(), stream=True)
    next(open_one)
    assert not llm.reset_prefix_cache()
    (output,) = llm.generate(ids(1), greedy())
    assert output.num_cached_tokens == 0
    assert token_ids_of(output) == expected[1]
    *_, (_, output) = open_one
    assert llm.reset_prefix_cache()
    (again,) = llm.generate(ids(96, 90), greedy())
    assert token_ids_of(again) == token_ids_of(output)
    assert llm.reset_prefix_cache()
    pool = llm._engine.runner.cache.pool
    assert pool.num_free == llm._engine.runner.geometry.num_pages


# --- event loops ---


def test_awaiting(folder: Path, expected: list[list[int]]) -> None:
    """A stream that is awaited: its last output, its error, its end when nobody waits any more.
    A loop that is closed at the end of a block, while its event loop goes on."""

    async def main() -> None:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0)

        async with ServingLoop(toy_options(folder), warm_up=False) as loop:
            streams = [loop.submit(ids(seed), greedy()) for seed in range(6)]
            outputs = await asyncio.gather(*streams)
            assert [token_ids_of(output) for output in outputs] == expected
            assert [token_ids_of(await stream) for stream in streams] == expected
            left = loop.submit(ids(7), greedy(200))
            waiting = asyncio.ensure_future(left)
            async for output in loop.submit(ids(8), greedy(3)):
                assert output.error is None
            waiting.cancel()
            output = await left
            assert output.outputs[0].finish_reason == "abort"
            assert loop.reset_prefix_cache()
            last = loop.submit(ids(9), greedy(200))
            close, go_on = loop.close, threading.Event()

            def close_later() -> None:
                go_on.wait(60)
                close()

            loop.close = close_later
            ticking = asyncio.create_task(tick())
            asyncio.get_running_loop().call_later(0.01, go_on.set)
            before = ticks
        assert ticks > before + 2, "nothing else ran while the loop was closed"
        ticking.cancel()
        assert (await last).outputs[0].finish_reason == "abort"

    asyncio.run(main())
