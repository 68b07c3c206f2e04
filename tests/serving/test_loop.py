"""The serving loop: requests from threads and event loops, their ends, and its metrics."""

import asyncio
import atexit
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from glm53 import EngineDeadError, GenerationError, RequestStream, SamplingParams, ServingLoop
from serving.engine.metrics import LoopMetrics
from serving.engine.model_runner import ModelRunner
from serving.requests.outputs import RequestOutput
from tests.helpers.toy_engine import assert_idle, tokens, toy_options

pytestmark = pytest.mark.compiles
LONG = 150
RUNNER = "serving.engine.model_runner.ModelRunner"


@pytest.fixture(scope="module")
def stepped(folder: Path) -> ServingLoop:
    """One that the tests step themselves."""
    return ServingLoop(toy_options(folder), warm_up=False)


@pytest.fixture(scope="module")
def shared_loop(folder: Path) -> Iterator[ServingLoop]:
    with ServingLoop(toy_options(folder), warm_up=False) as loop:
        yield loop


@pytest.fixture
def loop(shared_loop: ServingLoop) -> Iterator[ServingLoop]:
    """One with a thread of its own; in the end nothing is left in it."""
    yield shared_loop
    wait_for(lambda: not shared_loop._engine.has_work)
    shared_loop._access.run(partial(assert_idle, shared_loop._engine))
    assert not shared_loop._requests


def wait_for(holds: Any) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def ids(seed: int, count: int = 40) -> dict[str, list[int]]:
    return {"prompt_token_ids": tokens(seed, count)}


def greedy(max_tokens: int = 8, **fields: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **fields)


def token_ids_of(output: RequestOutput) -> list[int]:
    assert output.error is None
    return output.outputs[0].token_ids


def reason(output: RequestOutput) -> str | None:
    return output.outputs[0].finish_reason


def run(loop: ServingLoop, *streams: RequestStream) -> list[RequestOutput]:
    while loop.step():
        pass
    return [stream.result(timeout=0) for stream in streams]


async def finish_async(stream: RequestStream, way: str) -> None:
    if way == "await":
        await stream
    else:
        async for _ in stream:
            pass


@pytest.fixture(scope="module")
def expected(stepped: ServingLoop) -> list[list[int]]:
    """What prompts give alone."""
    return [
        token_ids_of(run(stepped, stepped.submit(ids(seed), greedy(seed + 4)))[0])
        for seed in range(8)
    ]


@pytest.mark.usefixtures("as_a_user")
def test_what_is_no_options() -> None:
    """An error from deep within, or one that does not say where options go."""
    kind: Any = ServingLoop
    with pytest.raises(TypeError, match="ServingLoop takes an EngineOptions, got 'tiny'"):
        kind("tiny")
    with pytest.raises(TypeError, match=r"no 'max_model_len': pass ServingLoop\(EngineOptions\("):
        kind(max_model_len=512)
    with pytest.raises(TypeError, match="no 'gpu_memory_utilization': it is called memory_frac"):
        kind(gpu_memory_utilization=0.5)


@pytest.mark.parametrize("way", ["result", "await", "iterate"])
def test_waiting_for_a_loop_that_nothing_runs(
    folder: Path, caplog: pytest.LogCaptureFixture, way: str
) -> None:
    """A wait that never ends and says nothing of it; or a warning for each, or without a cause."""
    loop = ServingLoop(toy_options(folder), warm_up=False)
    stream, other = loop.submit(ids(1)), loop.submit(ids(2))
    for waiting in (stream, other):
        if way == "result":
            with pytest.raises(TimeoutError):
                waiting.result(timeout=0)
        else:
            with pytest.raises(TimeoutError):
                asyncio.run(asyncio.wait_for(finish_async(waiting, way), 0.01))
    (record,) = caplog.records
    assert "call start(), use it in a with block, or call step()" in record.getMessage()
    assert record.levelname == "WARNING"
    loop.close()


def test_waiting_for_a_loop_that_is_stepped(
    stepped: ServingLoop, caplog: pytest.LogCaptureFixture
) -> None:
    """A warning where another step may well come."""
    run(stepped)
    stream = stepped.submit(ids(1))
    with pytest.raises(TimeoutError):
        stream.result(timeout=0)
    run(stepped, stream)
    # Not those of programs that take long to compile.
    assert not [record for record in caplog.records if record.name == "serving.loop"]


def test_many_threads(loop: ServingLoop, expected: list[list[int]]) -> None:
    """Outputs mixed up, lost, or changed by what runs beside them."""
    found: dict[int, list[RequestOutput]] = {}

    def ask(seed: int) -> None:
        found[seed] = list(loop.submit(ids(seed), greedy(seed + 4)))

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for seed in range(8):
        *earlier, last = found[seed]
        assert token_ids_of(last) == expected[seed]
        assert last.finished
        lengths = [len(token_ids_of(output)) for output in earlier]
        assert lengths == sorted(set(lengths))
        for output in earlier:
            assert not output.finished
            assert token_ids_of(output) == expected[seed][: len(token_ids_of(output))]


def test_event_loop(loop: ServingLoop, expected: list[list[int]]) -> None:
    """The same from coroutines, several of which may follow one request."""

    async def last_of(stream: RequestStream) -> RequestOutput:
        outputs = [output async for output in stream]
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        return outputs[-1]

    async def ask(seed: int) -> list[RequestOutput]:
        stream = loop.submit(ids(seed), greedy(seed + 4))
        return await asyncio.gather(*(last_of(stream) for _ in range(3)))

    async def ask_all() -> list[list[RequestOutput]]:
        return await asyncio.wait_for(asyncio.gather(*(ask(seed) for seed in range(8))), 60)

    for outputs, answer in zip(asyncio.run(ask_all()), expected, strict=True):
        assert [token_ids_of(output) for output in outputs] == [answer] * 3


def test_each_output_has_grown(stepped: ServingLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens that are taken while those before them are told of, and are told of twice."""
    stream = stepped.submit(ids(7), greedy(11))

    def wait(holds: Any, timeout: float | None = None) -> None:
        assert holds(), "would wait"

    async def follow() -> None:
        in_thread, in_coroutine = iter(stream), aiter(stream)
        while not stream._num_tokens:
            stepped.step()
        counts = [len(token_ids_of(next(in_thread))), len(token_ids_of(await anext(in_coroutine)))]
        stepped.step()
        stepped._engine.step()  # nobody is told of the third token yet
        counts += [len(token_ids_of(next(in_thread))), len(token_ids_of(await anext(in_coroutine)))]
        assert counts == [1, 1, 3, 3]
        waiting = asyncio.ensure_future(anext(in_coroutine))
        await asyncio.sleep(0)
        assert not waiting.done()
        stream.notify()
        for _ in range(3):
            await asyncio.sleep(0)
        assert not waiting.done()
        with pytest.raises(AssertionError, match="would wait"):
            next(in_thread)
        run(stepped)
        assert len(token_ids_of(await waiting)) == 3  # as the other iteration was left

    monkeypatch.setattr(stream._changed, "wait_for", wait)
    asyncio.run(follow())


@pytest.mark.parametrize("way", ["break", "cancel", "abort"])
def test_listener_that_goes_away(loop: ServingLoop, way: str) -> None:
    """A request that goes on for nobody."""

    async def leave() -> RequestStream:
        stream = loop.submit(ids(20), greedy(LONG))
        if way == "break":
            async for _ in stream:
                break
        elif way == "cancel":
            started = asyncio.Event()

            async def follow() -> None:
                async for _ in stream:
                    started.set()

            task = asyncio.create_task(follow())
            await started.wait()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        else:
            iterator: AsyncIterator[RequestOutput] = aiter(stream)
            await anext(iterator)
            stream.abort()
        await asyncio.to_thread(stream.result, 60)
        return stream

    output = asyncio.run(leave()).result(timeout=60)
    assert reason(output) == "abort"
    assert 0 < len(token_ids_of(output)) < LONG


def test_event_loop_that_is_closed(stepped: ServingLoop) -> None:
    """A request that goes on for a coroutine that never will."""
    events = asyncio.new_event_loop()
    stream = stepped.submit(ids(23), greedy(LONG))

    async def begin() -> AsyncIterator[RequestOutput]:
        iterator: Any = aiter(stream)
        anext(iterator).send(None)  # no task, which would complain that it was destroyed
        return iterator

    iterator = events.run_until_complete(begin())
    events.close()
    (output,) = run(stepped, stream)
    assert reason(output) == "abort"
    assert 0 < len(token_ids_of(output)) < 4
    del iterator


def test_left_iteration_in_a_thread(loop: ServingLoop) -> None:
    """A generator that is closed early, and one that is never begun."""
    stream = loop.submit(ids(21), greedy(LONG))
    for output in stream:
        assert len(token_ids_of(output)) >= 1
        break
    assert reason(stream.result(timeout=60)) == "abort"
    begun = loop.submit(ids(22), greedy(4))
    iter(begun)
    assert reason(begun.result(timeout=60)) == "length"


def test_abort_at_any_moment(stepped: ServingLoop, expected: list[list[int]]) -> None:
    """Before it is taken in, while it waits, computes its prompt and decodes, and when it is done;
    by its name; others go on."""
    for steps in (0, 1, 2, 3, 5, 12):
        kept = stepped.submit(ids(7), greedy(11))
        others = [stepped.submit(ids(30 + number, 70), greedy(LONG)) for number in range(4)]
        for _ in range(steps):
            assert stepped.step()
        for other in others:
            assert stepped.abort(other.request_id)
        assert not any(other.finished for other in others), "before the next step"
        stepped.step()
        assert [reason(other.result(timeout=0)) for other in others] == ["abort"] * 4
        assert [token_ids_of(output) for output in run(stepped, kept)] == [expected[7]]
        assert_idle(stepped._engine)
    done = stepped.submit(ids(7), greedy(11))
    run(stepped, done)
    assert not stepped.abort(done.request_id)
    done.abort()
    stepped.step()
    assert reason(done.result(timeout=0)) == "length"
    assert not stepped.abort("no such request")


def test_several_continuations(stepped: ServingLoop) -> None:
    """A request that is told to be done when its first continuation is."""
    stream = stepped.submit(ids(40), SamplingParams(n=4, seed=1, max_tokens=5, ignore_eos=True))
    assert [len(part.token_ids) for part in stream.output().outputs] == [0] * 4
    (output,) = run(stepped, stream)
    assert [len(part.token_ids) for part in output.outputs] == [5] * 4
    assert len({tuple(part.token_ids) for part in output.outputs}) == 4


def test_priorities(stepped: ServingLoop) -> None:
    """A request that is urgent and waits behind those that are not."""
    slow = [stepped.submit(ids(50 + number), greedy(30)) for number in range(3)]
    for _ in range(4):
        stepped.step()
    late = [stepped.submit(ids(60 + number), greedy(4)) for number in range(3)]
    urgent = stepped.submit(ids(70), greedy(4), priority=5)
    while not urgent.finished:
        stepped.step()
    assert not any(stream.finished for stream in late)
    run(stepped, *slow, *late)


@pytest.mark.usefixtures("as_a_user")
@pytest.mark.parametrize(
    ("prompt", "options", "kind", "message"),
    [
        ({"prompt_token_ids": []}, {}, ValueError, "is empty"),
        ({"prompt_token_ids": [999]}, {}, ValueError, "999"),
        ("text", {}, ValueError, "tokenizer"),
        (ids(1, 256), {}, ValueError, "max_model_len 256"),
        (ids(1), {"params": "x"}, TypeError, "SamplingParams"),
        (ids(1), {"params": {}}, TypeError, "SamplingParams"),
        (ids(1), {"priority": "high"}, TypeError, "priority must be an integer, got 'high'"),
        (ids(1), {"request_id": 5}, TypeError, "request_id must be text, got 5"),
        (ids(1), {"request_id": "taken"}, ValueError, "request_id 'taken'"),
    ],
)
def test_refused(
    stepped: ServingLoop, prompt: Any, options: dict[str, Any], kind: type, message: str
) -> None:
    """Something queued of what is refused, or others disturbed."""
    taken = stepped.submit(ids(7), greedy(11), request_id="taken")
    with pytest.raises(kind, match=message):
        stepped.submit(prompt, **options)
    assert list(stepped._requests) == ["taken"]
    assert len(stepped._arrived) == 1
    run(stepped, taken)
    again = stepped.submit(ids(7), greedy(1), request_id="taken")
    run(stepped, again)


def test_names_of_its_own(stepped: ServingLoop) -> None:
    """A request without a name that is refused for the name that another caller chose."""
    names = [stepped.submit(ids(1), greedy(1)).request_id]
    number = int(names[0].removeprefix("request-"))
    mine = [f"request-{number + more}" for more in (1, 2, 4)]
    names += [stepped.submit(ids(1), greedy(1), request_id=name).request_id for name in mine]
    names += [stepped.submit(ids(1), greedy(1)).request_id for _ in range(3)]
    assert len(set(names)) == 7
    run(stepped)


@pytest.mark.parametrize("part", ["add", "abort", "metrics"])
def test_interrupted_outside_the_engine(
    stepped: ServingLoop, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """Control-C while requests are taken in or handed out: one that waits forever, and one that
    came too late to be taken in and is lost."""
    running = [stepped.submit(ids(seed), greedy(LONG)) for seed in range(4)]
    stepped.step()
    running.append(stepped.submit(ids(4), greedy(LONG)))
    stepped.abort(running[0].request_id)
    late = []

    def interrupted(*_: Any) -> None:
        monkeypatch.undo()
        late.append(stepped.submit(ids(7), greedy(11)))
        raise KeyboardInterrupt

    monkeypatch.setattr(stepped._engine, part, interrupted)
    with pytest.raises(KeyboardInterrupt):
        stepped.step()
    assert [reason(stream.result(timeout=0)) for stream in running] == ["abort"] * 5
    assert_idle(stepped._engine)
    assert reason(run(stepped, *late)[0]) == "length"


def test_waiting_in_vain(loop: ServingLoop) -> None:
    """A wait without an end, or one that ends the request."""
    stream = loop.submit(ids(71), greedy(LONG))
    with pytest.raises(TimeoutError, match=r"not finished after 0\.0 seconds"):
        stream.result(timeout=0.0)
    assert reason(stream.result(timeout=60)) == "length"


def test_failing_step(
    loop: ServingLoop, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that fails ends the thread, or leaves its requests without a word."""
    launch, calls = ModelRunner.launch_decode, []

    def failing(self: ModelRunner, batch: Any) -> Any:
        calls.append(batch)
        if len(calls) == 4:
            raise RuntimeError("the device is lost")
        return launch(self, batch)

    monkeypatch.setattr(ModelRunner, "launch_decode", failing)
    streams = [loop.submit(ids(seed), greedy(LONG)) for seed in range(2)]
    for stream in streams:
        with pytest.raises(GenerationError, match="the device is lost") as caught:
            stream.result(timeout=60)
        assert isinstance(caught.value.__cause__, RuntimeError)
        assert stream.output().error == "the device is lost"
        with pytest.raises(GenerationError):
            list(stream)
        with pytest.raises(GenerationError):
            asyncio.run(drain(stream))
    assert token_ids_of(loop.submit(ids(7), greedy(11)).result(timeout=60)) == expected[7]


async def drain(stream: RequestStream) -> None:
    async for _ in stream:
        pass


def test_closing(folder: Path) -> None:
    """Requests that wait for a loop that is gone; a thread that stays; two drivers at once."""
    loop = ServingLoop(toy_options(folder), warm_up=False)
    loop.start()
    with pytest.raises(RuntimeError, match="own thread"):
        loop.step()
    with pytest.raises(RuntimeError, match="runs already"):
        loop.start()
    streams = [loop.submit(ids(80 + number), greedy(LONG)) for number in range(6)]
    next(iter(streams[0]))
    loop.close()
    assert [reason(stream.result(timeout=0)) for stream in streams] == ["abort"] * 6
    thread = loop._thread
    assert thread is not None
    assert not thread.is_alive()
    assert not loop._engine.has_work
    for refused in (lambda: loop.submit(ids(1)), loop.step, loop.start):
        with pytest.raises(RuntimeError, match="closed"):
            refused()
    loop.close()
    unstarted = ServingLoop(toy_options(folder), warm_up=False)
    stream = unstarted.submit(ids(1))
    unstarted.close()
    assert reason(stream.result(timeout=0)) == "abort"


def test_the_program_ends(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop that is never closed, whose thread crashes the process when the interpreter goes."""
    at_exit: list[Any] = []
    monkeypatch.setattr(atexit, "register", at_exit.append)
    monkeypatch.setattr(atexit, "unregister", at_exit.remove)
    loop = ServingLoop(toy_options(folder), warm_up=False)
    loop.start()
    stream = loop.submit(ids(1), greedy(LONG))
    (close,) = at_exit
    close()
    assert reason(stream.result(timeout=0)) == "abort"
    assert loop._thread is not None
    assert not loop._thread.is_alive()
    assert not at_exit, "kept when it is closed"


@pytest.mark.parametrize(
    ("part", "error"),
    [("serving.loop.Engine.step", RuntimeError()), (f"{RUNNER}.launch_decode", SystemExit())],
)
def test_an_end_of_the_thread(
    folder: Path, monkeypatch: pytest.MonkeyPatch, part: str, error: BaseException
) -> None:
    """An error that the engine cannot survive, or an interruption: requests that wait forever, and
    later ones that are not told why."""
    loop = ServingLoop(toy_options(folder), warm_up=False)

    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(part, fail)
    loop.start()
    stream = loop.submit(ids(1), greedy(LONG))
    if isinstance(error, SystemExit):
        assert reason(stream.result(timeout=60)) == "abort"
    else:
        with pytest.raises(GenerationError, match="'request-0' failed: RuntimeError") as caught:
            stream.result(timeout=60)
        assert caught.value.__cause__ is error
    wait_for(lambda: loop._closed)
    message = f"the serving loop has ended: {type(error).__name__}"
    with pytest.raises(EngineDeadError, match=message) as refused:
        loop.submit(ids(1))
    assert refused.value.__cause__ is error
    with pytest.raises(EngineDeadError, match=message):
        loop.step()
    loop.close()


def test_sleeps_while_there_is_nothing_to_do(loop: ServingLoop) -> None:
    """A thread that steps or polls for nobody."""
    loop.submit(ids(1), greedy(2)).result(timeout=60)
    wait_for(lambda: not loop._engine.has_work)
    steps, start = loop.metrics().steps, time.process_time()
    time.sleep(0.3)
    assert loop.metrics().steps - steps <= 1
    assert time.process_time() - start < 0.1


def test_metrics(stepped: ServingLoop) -> None:
    """A count that misses something, counts it twice, or goes back."""
    before = stepped.metrics()
    streams = [stepped.submit(ids(90 + number, 60), greedy(100)) for number in range(5)]
    seen: list[LoopMetrics] = []
    while stepped.step():
        seen.append(stepped.metrics())
    after = stepped.metrics()
    assert max(one.num_running for one in seen) == 3
    assert max(one.num_waiting for one in seen) >= 2
    assert max(one.num_preempted for one in seen) == 1
    assert after.num_preemptions > before.num_preemptions
    for one in seen:
        assert sum(one.pages.values()) == one.device_pages + one.host_pages == 8
        assert one.free_device_pages <= one.device_pages == 6
        assert one.num_running + one.num_waiting + one.num_preempted <= 5
    counts = ("steps", "prompt_tokens", "cached_tokens", "generated_tokens", "stalled_seconds")
    for one, other in zip(seen, [*seen[1:], after], strict=True):
        assert all(getattr(one, name) <= getattr(other, name) for name in counts)
    assert after.generated_tokens - before.generated_tokens == 500
    assert after.finished["length"] - before.finished.get("length", 0) == 5
    assert after.first_tokens - before.first_tokens == 5
    assert after.later_tokens - before.later_tokens == 495
    assert after.first_token_seconds - before.first_token_seconds > 0
    assert after.later_token_seconds - before.later_token_seconds > 0
    assert after.prompt_tokens - before.prompt_tokens >= 300
    assert 0 <= after.hit_rate <= 1
    assert after.stalls > before.stalls
    assert (after.num_running, after.num_waiting, after.num_preempted) == (0, 0, 0)
    reads = after.cache.resident_reads - before.cache.resident_reads
    assert reads > 0
    assert all(stream.finished for stream in streams)
    for stream in streams:  # A preempted one finds its own rows again, which is no prompt found.
        assert stream.output().num_cached_tokens <= 60
    shown = json.loads(json.dumps(after.as_dict()))
    assert shown["finished"] == dict(after.finished)
    assert shown["hit_rate"] == after.hit_rate
    assert shown["cache"]["resident_reads"] == after.cache.resident_reads
    again = stepped.submit(ids(94, 60), greedy(1))
    run(stepped, again)
    assert stepped.metrics().cached_tokens > after.cached_tokens
