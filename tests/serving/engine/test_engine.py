"""The engine's loop: results that come late, preemption, errors, and ends in every state."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from kvcache import KVCache, OutOfPagesError
from kvcache.prefix.tree import encode_tokens
from serving.engine.engine import Engine
from serving.engine.model_runner import ModelRunner
from serving.requests.outputs import RequestOutput
from serving.requests.request import Request
from serving.requests.sampling_params import SamplingParams
from tests.helpers.toy_engine import PAGES, assert_idle, finish, request, tokens, toy_options

pytestmark = pytest.mark.compiles


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    made = Engine(toy_options(folder))
    assert made.runner.geometry.num_pages == PAGES
    return made


@pytest.fixture(autouse=True)
def empty(engine: Engine):
    """Before every test nothing is cached, and after it nothing is in use."""
    cache = engine.runner.cache
    while cache.index.evict(cache.tick()):
        pass
    yield
    assert_idle(engine)


def ids(output: RequestOutput) -> list[int]:
    assert output.error is None
    return output.outputs[0].token_ids


PARAMS: list[dict[str, Any]] = [
    {"temperature": 0, "logprobs": 2},
    {"temperature": 0.9, "seed": 7, "top_k": 40, "frequency_penalty": 0.4, "logprobs": 0},
    {"temperature": 1.2, "seed": 3, "min_tokens": 110, "repetition_penalty": 1.3},
]


def crowd(engine: Engine) -> list[Request]:
    """Three requests that come to need eleven pages, with everything that sampling remembers."""
    found = []
    for number, params in enumerate(PARAMS):
        one = request(engine, f"{number}", tokens(number, 90), max_tokens=120, **params)
        (part,) = one.sequences
        if part.sampling is not None:
            words = [[5], [9, 11], [3] * 4]
            stops = sorted(range(0, 256, 9)) if part.params.min_tokens else ()
            part.sampling = dataclasses.replace(part.sampling, bad_words=words, stop_ids=stops)
            part.stop_ids = frozenset(stops)
        found.append(one)
    return found


def shown(output: RequestOutput) -> list[Any]:
    part = output.outputs[0]
    found: list[Any] = [part.token_ids, part.finish_reason, part.cumulative_logprob]
    return [*found, [list(entry.items()) for entry in part.logprobs or ()]]


@pytest.fixture(scope="module")
def expected(engine: Engine) -> list[list[Any]]:
    """What each of the crowd gives alone."""
    return [shown(finish(engine, one)[0]) for one in crowd(engine)]


def test_preempted_and_resumed(engine: Engine, expected: list[list[Any]]) -> None:
    """A sequence that goes on with another history, draw or log-probability than if it had never
    lost its slot; a token lost or doubled."""
    before = engine.scheduler.counters.preempted
    outputs = finish(engine, *crowd(engine))
    assert engine.scheduler.counters.preempted > before
    assert [shown(output) for output in outputs] == expected
    assert len({tuple(ids(output)) for output in outputs}) == 3


def test_swapped_out_and_in(folder: Path, expected: list[list[Any]]) -> None:
    """The same where whole sequences leave the device and come back, and none runs otherwise."""
    swapping = Engine(toy_options(folder, kv_policy="swap", row_cache_rows=None))
    requests = crowd(swapping)
    for one in requests:
        swapping.add(one)
    cache = swapping.runner.cache
    while swapping.has_work:
        swapping.step()
        for slot in swapping.scheduler.running:
            assert all(
                cache.residency.states.device_page_index(page) >= 0 for page in cache.pages_of(slot)
            )
    assert_idle(swapping)
    assert swapping.scheduler.counters.preempted > 0
    assert [shown(one.output()) for one in requests] == expected
    wider = dataclasses.replace(swapping.input_processor, max_model_len=500)
    with pytest.raises(ValueError, match=r"8 pages .* has 6 .*raise device_pages$"):
        wider.read("x", {"prompt_token_ids": [1] * 450}, SamplingParams())


def test_a_step_is_launched_before_the_last_one_is_known(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loop that waits for the device before it plans the next step."""
    calls: list[str] = []

    def record(kind: type, name: str, *, returned: Callable[[Any], str]) -> None:
        method = getattr(kind, name)

        def recording(*args: Any) -> Any:
            found = method(*args)
            calls.append(returned(found))
            return found

        monkeypatch.setattr(kind, name, recording)

    record(ModelRunner, "launch_prefill", returned=lambda _: "prefill")
    record(ModelRunner, "launch_decode", returned=lambda _: "decode")
    record(ModelRunner, "results", returned=lambda found: f"{len(found)} known")
    finish(engine, request(engine, "a", tokens(1, 20), max_tokens=4))
    assert calls == [
        "prefill",
        "decode",
        "1 known",
        "decode",
        "1 known",
        "decode",
        *["1 known"] * 2,
    ]


def test_tokens_after_the_last(engine: Engine) -> None:
    """The step launched beside the one that stops a sequence: its token shown, its row left in a
    page that others continue, or in the slot's next sequence."""
    prompts = [tokens(number, 40 + number) for number in range(20, 26)]
    alone = [ids(finish(engine, request(engine, "a", ids_))[0]) for ids_ in prompts]
    before = engine.scheduler.counters.dropped_results
    requests = []
    for prompt, answer in zip(prompts, alone, strict=True):
        stop = next(token for token in answer[3:] if answer.index(token) >= 3)
        requests.append(request(engine, "b", prompt, stop_token_ids=[stop]))
    outputs = finish(engine, *requests)
    for output, answer in zip(outputs, alone, strict=True):
        found = ids(output)
        assert output.outputs[0].finish_reason == "stop"
        assert 4 <= len(found) <= 16
        assert found == answer[: len(found)]
    assert engine.scheduler.counters.dropped_results >= before + 3
    for prompt, answer in zip(prompts, alone, strict=True):
        longer = request(engine, "c", prompt + answer[:8], max_tokens=8)
        assert ids(finish(engine, longer)[0]) == answer[8:]


def test_prompt_logprobs_come_late(engine: Engine) -> None:
    """A chunk's log-probabilities lost, doubled or out of order, alone or beside others."""
    prompt = tokens(30, 100)
    wanted = {"prompt_logprobs": 2, "logprobs": 1}

    def scored() -> Request:
        return request(engine, "a", prompt, **wanted)

    (alone,) = finish(engine, scored())
    assert alone.prompt_logprobs is not None
    assert alone.prompt_logprobs[0] is None
    assert [entry.token_id for entry in alone.prompt_logprobs[1:] if entry] == prompt[1:]
    beside = [request(engine, f"{seed}", tokens(seed, 50)) for seed in (31, 32)]
    again, *_ = finish(engine, scored(), *beside)
    for one, other in zip(again.prompt_logprobs or [], alone.prompt_logprobs, strict=True):
        assert (one is None) == (other is None)
        assert one is None or dict(one) == dict(other or {})
    (single,) = finish(engine, request(engine, "b", [3], prompt_logprobs=1))
    assert single.prompt_logprobs == [None]


def test_priority(engine: Engine) -> None:
    """A request that comes last and is more urgent starts first, and is not preempted for
    others."""
    order = []
    requests = [
        request(engine, f"{number}", tokens(40 + number, 60), priority=number % 2, max_tokens=4)
        for number in range(8)
    ]
    for one in requests:
        engine.add(one)
    while engine.has_work:
        order += [one.request_id for one in engine.step() if one.finished]
    assert set(order[:4]) == {"1", "3", "5", "7"}


# --- errors ---


def test_an_error_before_the_launch(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """One request's pages that find no place fail the others."""
    good = [request(engine, f"{seed}", tokens(seed, 40)) for seed in (50, 51)]
    alone = [ids(output) for output in finish(engine, *good)]
    bad = request(engine, "bad", tokens(52, 40), n=2)
    prepare = KVCache.prepare

    def failing(self: KVCache, rows: Mapping[int, int], *, staging: bool = False) -> None:
        slot = bad.sequences[0].slot
        if staging and slot is not None and slot in rows and self.length(slot) > 0:
            raise OutOfPagesError("no place for its pages")
        prepare(self, rows, staging=staging)

    monkeypatch.setattr(KVCache, "prepare", failing)
    again = [request(engine, f"{seed}", tokens(seed, 40)) for seed in (50, 51)]
    failed, *outputs = finish(engine, bad, *again)
    assert failed.error == "no place for its pages"
    assert failed.finished
    assert failed.outputs == []
    assert not bad.step_failed
    assert [ids(output) for output in outputs] == alone


def test_a_fault_before_the_launch(engine: Engine) -> None:
    """A request whose pages cannot be readied for some other reason is tried again without end."""
    prepare, bad = KVCache.prepare, request(engine, "bad", tokens(53, 40))

    def failing(self: KVCache, rows: Mapping[int, int], *, staging: bool = False) -> None:
        if bad.sequences[0].slot in rows:
            raise RuntimeError("a fault")
        prepare(self, rows, staging=staging)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KVCache, "prepare", failing)
        (failed,) = finish(engine, bad)
    assert failed.error is not None and "a fault" in failed.error
    good = request(engine, "good", tokens(50, 40))
    assert finish(engine, good)[0].error is None


@pytest.mark.parametrize(
    ("part", "call"), [("launch_prefill", 3), ("launch_decode", 6), ("results", 6)]
)
def test_an_error_of_the_device(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, part: str, call: int
) -> None:
    """A request that has started and is not told, one that waits and fails too, or the next one on
    rows that are lost."""
    prompts = [tokens(60 + number, 50) for number in range(5)]
    alone = [
        ids(finish(engine, request(engine, "", prompt, max_tokens=12))[0]) for prompt in prompts
    ]
    requests = [
        request(engine, f"{number}", prompt, max_tokens=12) for number, prompt in enumerate(prompts)
    ]
    method, calls = getattr(ModelRunner, part), []

    def failing(*args: Any) -> Any:
        calls.append(part)
        if len(calls) == call:
            raise RuntimeError("the device is lost")
        return method(*args)

    monkeypatch.setattr(ModelRunner, part, failing)
    failures = engine.metrics().finished.get("error", 0)
    outputs = finish(engine, *requests)
    started = [output.error is not None for output in outputs]
    assert 2 <= sum(started) <= 4, started
    for output, one, answer in zip(outputs, requests, alone, strict=True):
        if output.error is None:
            assert ids(output) == answer
        else:
            assert output.error == "the device is lost"
            assert isinstance(one.error, RuntimeError)
            assert one.step_failed
    assert engine.metrics().finished["error"] == failures + sum(started)


def test_complete_before_an_error(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request with its last token, which fails with others whose results come after its own."""
    running = request(engine, "running", tokens(65, 20), max_tokens=30)
    engine.add(running)
    for _ in range(3):
        engine.step()
    short = request(engine, "short", tokens(66, 20), max_tokens=1)
    method = ModelRunner.results

    def failing(*args: Any) -> Any:
        if short.finished:
            raise RuntimeError("the device is lost")
        return method(*args)

    with monkeypatch.context() as patch:
        patch.setattr(ModelRunner, "results", failing)
        output, failed = finish(engine, short, running)
    assert failed.error == "the device is lost"
    (again,) = finish(engine, request(engine, "again", tokens(66, 20), max_tokens=1))
    assert ids(output) == ids(again)
    assert output.outputs[0].finish_reason == "length"


def test_no_memory_for_another_store(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """After an error of the device, and one of building the store anew: requests that wait forever,
    or an engine that is of no use any more."""
    requests = [request(engine, f"{seed}", tokens(seed, 40)) for seed in range(70, 75)]

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(ModelRunner, "launch_decode", fail)
        patch.setattr(ModelRunner, "_start_empty", fail)
        outputs = finish_without_store(engine, requests)
    assert [output.error for output in outputs] == ["no memory"] * 5
    assert len(ids(finish(engine, request(engine, "a", tokens(70, 40)))[0])) == 16


def finish_without_store(engine: Engine, requests: list[Request]) -> list[RequestOutput]:
    for one in requests:
        engine.add(one)
    while engine.has_work:
        engine.step()
    assert not engine.runner.usable
    return [one.output() for one in requests]


@pytest.mark.parametrize("has_memory", [True, False])
def test_interruption_in_a_step(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, has_memory: bool
) -> None:
    """Control-C between a launch and its bookkeeping: sequences or pages left behind, also where
    another store finds no memory, for which the interruption is not to be mistaken."""
    requests = [request(engine, f"{seed}", tokens(seed, 40)) for seed in range(80, 85)]
    for one in requests:
        engine.add(one)
    engine.step()
    method = ModelRunner.launch_prefill

    def interrupted(*args: Any) -> Any:
        method(*args)
        raise KeyboardInterrupt

    def fail(*_: Any) -> None:
        raise RuntimeError("no memory")

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(ModelRunner, "launch_prefill", interrupted)
        if not has_memory:
            patch.setattr(ModelRunner, "_start_empty", fail)
        engine.step()
    assert [one.output().outputs[0].finish_reason for one in requests] == ["abort"] * 5
    assert engine.runner.usable == has_memory
    assert len(ids(finish(engine, request(engine, "a", tokens(80, 40)))[0])) == 16


# --- ends ---


def test_aborted_in_every_state(engine: Engine) -> None:
    """Pages or a slot kept, others disturbed, or a result that comes for one that has gone: while
    it waits, its prompt is computed, it decodes, and it is preempted."""
    kept = request(engine, "kept", tokens(90, 90), max_tokens=120)
    (alone,) = finish(engine, request(engine, "", tokens(90, 90), max_tokens=120))
    states = set()
    for steps in (0, 1, 2, 4, 9, 30, 60, 90, 110):
        others = [
            request(engine, f"{seed}", tokens(seed, 90), max_tokens=120, priority=-1)
            for seed in range(91, 94)
        ]
        kept = request(engine, "kept", tokens(90, 90), max_tokens=120)
        for one in (kept, *others):
            engine.add(one)
        for _ in range(steps):
            engine.step()
        for one in others:
            states.add(one.sequences[0].phase.name)
            engine.abort(one)
            engine.scheduler.check_integrity()
            engine.runner.cache.check_integrity()
            assert one.output().outputs[0].finish_reason == "abort"
        assert ids(finish(engine, kept)[0]) == ids(alone)
    assert states >= {"WAITING", "PREFILLING", "DECODING", "PREEMPTED"}


def test_abort_twice_and_too_late(engine: Engine) -> None:
    """A request that is aborted again, or was done before: what it has stays."""
    one = request(engine, "a", tokens(95, 20))
    (output,) = finish(engine, one)
    engine.abort(one)
    assert one.output() == output
    other = request(engine, "b", tokens(96, 20))
    engine.add(other)
    engine.abort(other)
    engine.abort(other)
    assert other.output().outputs[0].finish_reason == "abort"


def test_no_step_encodes_a_prompt(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that run waiting until the pages of a long prompt are encoded, to look it up."""
    prompt = tokens(97, 150)
    finish(engine, request(engine, "a", prompt))
    again = request(engine, "b", prompt)
    encoded: list[int] = []

    def encode(token_ids: list[int]) -> bytes:
        encoded.append(len(token_ids))
        return encode_tokens(token_ids)

    monkeypatch.setattr("kvcache.prefix.tree.encode_tokens", encode)
    (output,) = finish(engine, again)
    assert output.num_cached_tokens == 149
    assert encoded == [149 % engine.runner.geometry.rows_per_page]
    assert again.encoded is None
