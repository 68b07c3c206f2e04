"""Ways in which caches that span two memories are known to fail, tried on whole engines.

An engine that spills must answer as one that keeps every page on the devices, whatever happens to
its pages meanwhile.
"""

import contextlib
import gc
import itertools
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from glm53 import LLM, SamplingParams
from glm53.model.kv_geometry import kv_geometry
from kvcache import KVCache, SimulatedDevice
from kvcache.prefix_transfer import PrefixImport, export_prefix
from kvcache.tiers.page_states import PageState
from serving.engine.buckets import Buckets
from serving.engine.launched import Launched
from serving.engine.model_runner import ModelRunner
from serving.options.store_options import max_step_rows
from serving.scheduler import PrefillChunk
from tests.helpers.golden import golden_config
from tests.helpers.toy_model import write_grouped_model

pytestmark = pytest.mark.compiles
LONGEST = 1024
HOST_GIB = 0.0004  # 8 pages
PAGE = 128  # rows, and the most that a prefill step computes

Prefix = tuple[list[int], np.ndarray, np.ndarray]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_grouped_model(path, max_position_embeddings=4096)
    return path


def engine(model: Path, **options: Any) -> LLM:
    """Two devices, two slots, and one shape of each step."""
    llm = LLM(
        model,
        max_model_len=LONGEST,
        max_num_seqs=2,
        max_num_batched_tokens=PAGE,
        tensor_parallel_size=2,
        **options,
    )
    llm._engine.runner.buckets = Buckets((PAGE,), (2,), (LONGEST // PAGE,), PAGE)
    return llm


@pytest.fixture(scope="module")
def resident(model: Path) -> LLM:
    return engine(model, kv_policy="resident")


@pytest.fixture(scope="module")
def shared_engine(model: Path) -> LLM:
    """14 pages, 6 of them on the devices, where a sequence has up to 8; and fewer row-cache rows
    than a token selects."""
    llm = engine(model, device_pages=6, host_memory_gib=HOST_GIB, row_cache_rows=4)
    assert llm._engine.runner.geometry.num_pages == 14
    return llm


@pytest.fixture
def spilling(shared_engine: LLM) -> LLM:
    """With nothing in its cache."""
    cache = shared_engine._engine.runner.cache
    while cache.index.evict(cache.tick()):
        pass
    assert cache.pool.num_free == cache.geometry.num_pages
    return shared_engine


def tokens(seed: int, count: int) -> list[int]:
    """Tokens of which the first is another for every seed."""
    return [seed, *np.random.default_rng(seed).integers(0, 256, count - 1).tolist()]


def greedy(count: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)


def prompts_of(token_ids: Sequence[list[int]]) -> list[dict[str, list[int]]]:
    return [{"prompt_token_ids": ids} for ids in token_ids]


def answers(llm: LLM, token_ids: Sequence[list[int]], count: int) -> list[list[int]]:
    """The next `count` tokens of each prompt, all given at once."""
    outputs = llm.generate(prompts_of(token_ids), greedy(count))
    assert_idle(llm)
    return [output.outputs[0].token_ids for output in outputs]


def answers_between(
    llm: LLM, token_ids: Sequence[list[int]], count: int, interfere: Callable[[], object]
) -> list[list[int]]:
    """The same, with `interfere` called between the steps."""
    found: dict[int, list[int]] = {}
    for index, output in llm.generate_iter(prompts_of(token_ids), greedy(count), stream=True):
        found[index] = output.outputs[0].token_ids
        interfere()
        llm._engine.runner.cache.check_integrity()
    assert_idle(llm)
    return [found[index] for index in range(len(token_ids))]


def assert_idle(llm: LLM) -> None:
    """No page is in use and none is lost."""
    cache = llm._engine.runner.cache
    cache.check_integrity()
    assert cache.pool.num_free + cache.pool.num_cached_only == cache.geometry.num_pages


def push_out(llm: LLM) -> int:
    """Takes what is sealed off the device, as far as the host has room; returns the pages."""
    residency = llm._engine.runner.cache.residency
    for page in residency.states.droppable_in(PageState.DIRTY).tolist()[
        : residency.states.num_free_host
    ]:
        residency.offload(page)
    dropped = residency.states.droppable_in(PageState.CLEAN).tolist()
    for page in dropped:
        residency.drop(page)
    return len(dropped)


def exported(llm: LLM, token_ids: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Rows [tokens, layers, width] and index keys of a cached prefix."""
    rows, keys = zip(*export_prefix(llm._engine.runner.cache, token_ids), strict=True)
    return np.concatenate(rows), np.concatenate(keys)


def bring_in(llm: LLM, prefix: Prefix) -> None:
    token_ids, rows, keys = prefix
    with PrefixImport(llm._engine.runner.cache, token_ids) as arriving:
        arriving.write(rows, keys)
        arriving.finish()


def test_each_layer_keeps_its_own_rows(resident: LLM, spilling: LLM) -> None:
    """Layers of a group that write over each other; a page, device place or host index that is
    taken for another of the three."""
    prompt = tokens(0, 900)
    assert answers(spilling, [prompt], 8) == answers(resident, [prompt], 8)
    push_out(spilling)
    residency = spilling._engine.runner.cache.residency
    gone = residency.states.pages_in(PageState.HOST).tolist()
    assert len(gone) == 8
    assert sum(page != residency.states.host_page_index(page) for page in gone) > 4
    rows, keys = exported(spilling, prompt)
    expected_rows, expected_keys = exported(resident, prompt)
    np.testing.assert_array_equal(rows, expected_rows)
    np.testing.assert_array_equal(keys, expected_keys)
    for one, other in itertools.combinations(range(rows.shape[1]), 2):
        assert (rows[:, one] != rows[:, other]).any(axis=-1).all()


def test_engines_side_by_side(resident: LLM, spilling: LLM) -> None:
    """Engines of one process that share a pool, a lease or the state of a compiled step."""
    prompts = [tokens(1, 800), tokens(2, 800)]
    expected = answers(resident, prompts, 30)
    streams = [
        llm.generate_iter(prompts_of([prompt]), greedy(30), stream=True)
        for llm, prompt in zip((spilling, resident), prompts, strict=True)
    ]
    *_, last = zip(*streams, strict=True)
    assert [output.outputs[0].token_ids for _, output in last] == expected


def test_imports_while_decoding(resident: LLM, spilling: LLM) -> None:
    """Imports into a store that is nearly full, between the steps of sequences that run: a launch
    that fails, a page lost, a map that the next step reads before it is launched."""
    prefixes: list[Prefix] = []
    for seed in range(10, 15):
        token_ids = tokens(seed, 20 * seed + 50)
        answers(resident, [token_ids], 1)
        prefixes.append((token_ids, *exported(resident, token_ids)))
    prompts, turns = [tokens(20, 480), tokens(21, 400)], itertools.count()
    expected = answers(resident, prompts, 40)

    def bring_in_another() -> None:
        turn = next(turns)
        token_ids, rows, keys = prefixes[turn % len(prefixes)]
        # Unknown to the cache by its first token.
        bring_in(spilling, ([100 + turn, *token_ids[1:]], rows, keys))

    assert answers_between(spilling, prompts, 40, bring_in_another) == expected
    for prefix in prefixes:
        bring_in(spilling, prefix)
        longer = [*prefix[0], 7]
        (output,) = spilling.generate(prompts_of([longer]), greedy(8))
        assert output.num_cached_tokens == len(prefix[0])
        assert [output.outputs[0].token_ids] == answers(resident, [longer], 8)


def test_a_full_pool_admits(resident: LLM, spilling: LLM) -> None:
    """A request refused although all pages, which hold others' rows, could be evicted."""
    cache = spilling._engine.runner.cache
    answers(spilling, [tokens(seed, 600) for seed in range(30, 33)], 1)
    push_out(spilling)
    assert cache.pool.num_free <= 1
    assert cache.residency.states.num_free_host == 0
    prompts = [tokens(34, LONGEST - 8)]
    assert answers(spilling, prompts, 8) == answers(resident, prompts, 8)


@pytest.mark.parametrize(("device_pages", "host_pages"), [(4, 0), (4, 3), (6, 2)])
def test_a_pool_of_just_one_sequence(device_pages: int, host_pages: int) -> None:
    """A prompt that has filled the pool before: the partly filled page at its end cannot be both
    copied and kept. And steps for as many tokens as the device pages allow, from the middle of a
    page on: device pages that run out."""
    geometry = kv_geometry(
        golden_config("tiny_f32"),
        row_kind="float32",
        rows_per_device=4,
        device_pages=device_pages,
        host_pages=host_pages,
        row_cache_rows=1 if host_pages else 0,
        max_model_len=4 * (device_pages + host_pages),
        max_sequences=1,
    )
    rows = max_step_rows(geometry, 12)
    assert rows == 4 * (device_pages - 3 if host_pages else 3)
    cache = KVCache(geometry, SimulatedDevice(geometry), max_step_rows=rows)
    last = 4 * (geometry.num_pages - 1)
    longest = tokens(40, last + 3)
    # The longest for the first time continues whole pages only, as it takes the one after them.
    turns = ((longest[:7], 0), (longest[:-4], 7), (longest, last - 4), (longest, last))
    for prompt, found in turns:
        assert cache.open(0, prompt, len(prompt)) == found
        for start in range(found, len(prompt), rows):
            chunk = prompt[start : start + rows]
            cache.prepare({0: len(chunk)}, staging=True)
            cache.advance(0, chunk, prompt_complete=start + rows >= len(prompt))
            cache.check_integrity()
        cache.close(0)
        cache.check_integrity()


def test_rows_written_while_their_pages_leave(resident: LLM, spilling: LLM) -> None:
    """Rows of a decode step that a copy to the host missed, as it was made before they were
    written, or of a page that grew afterwards; the same where the sequence is continued."""
    prompt = tokens(50, 100)
    (expected,) = answers(resident, [prompt], 200)
    assert answers_between(spilling, [prompt], 200, lambda: push_out(spilling)) == [expected]
    push_out(spilling)
    known = [*prompt, *expected[:-1]]
    for found, wanted in zip(exported(spilling, known), exported(resident, known), strict=True):
        np.testing.assert_array_equal(found, wanted)
    longer = [*known, *tokens(51, 100)]
    (output,) = spilling.generate(prompts_of([longer]), greedy(8))
    assert output.num_cached_tokens == len(known)
    assert [output.outputs[0].token_ids] == answers(resident, [longer], 8)


def test_pages_that_move_between_two_steps(resident: LLM, spilling: LLM) -> None:
    """A compiled step that goes on reading a row where it lay in the step before."""
    random, moved = np.random.default_rng(0), {"dropped": 0, "onloaded": 0, "leases": 0}
    residency = spilling._engine.runner.cache.residency

    def move_pages() -> None:
        if random.random() < 0.5:
            moved["dropped"] += push_out(spilling)
        else:
            for page in residency.states.pages_in(PageState.HOST).tolist()[
                : residency.states.num_free_device
            ]:
                residency.onload(page)
                moved["onloaded"] += 1
        if random.random() < 0.2:
            for slot in range(2):
                moved["leases"] += bool(residency.leased_row_cache(slot))
                residency.release_row_cache(slot)

    prompts = [tokens(60, 500), tokens(61, 400)]
    expected = answers(resident, prompts, 50)
    for prompt, answer in zip(prompts, expected, strict=True):
        assert answers_between(spilling, [prompt], 50, move_pages) == [answer]
    assert answers_between(spilling, prompts, 50, move_pages) == expected
    assert min(moved.values()) > 5, moved
    compiled: Any = spilling._engine.runner._steps.decode
    assert compiled._cache_size() == 1


def test_each_read_is_counted_once(resident: LLM, spilling: LLM) -> None:
    """Reads counted for another request or tier, twice, for padding, or without a host tier."""
    prompts = [tokens(70, 900), tokens(71, 130), tokens(72, 20)]
    for llm in (resident, spilling):
        geometry = llm._engine.runner.geometry
        outputs = llm.generate(prompts_of(prompts), greedy(10))
        for prompt, output in zip(prompts, outputs, strict=True):
            counters, positions = output.cache_counters, range(len(prompt) + 9)
            assert counters.cached_tokens == 0
            selected = sum(min(llm.config.index_topk, position + 1) for position in positions)
            away = counters.row_cache_reads + counters.staged_reads + counters.host_reads
            if llm is resident:
                assert counters.resident_reads == away == 0
            else:
                assert counters.resident_reads + away == geometry.num_index_layers * selected
                assert away > 0 or len(prompt) < 900
            assert counters.offloaded_bytes == counters.offloaded_pages * geometry.page_bytes


def test_sizes(resident: LLM, spilling: LLM) -> None:
    """Pages counted a layer or a device too often or too seldom, or beyond what was allowed."""
    config, kept, store = (
        spilling.config,
        resident._engine.runner.cache.device.store,
        spilling._engine.runner.cache.device.store,
    )
    row_bytes = 4 * (config.kv_lora_rank + config.qk_rope_head_dim)
    page_bytes = config.num_hidden_layers * PAGE * row_bytes
    assert kept.slab.nbytes == 2 * LONGEST // PAGE * page_bytes
    assert kept.host is None
    assert store.slab.nbytes == 6 * page_bytes
    assert store.host is not None
    assert store.host.slab.nbytes == int(HOST_GIB * 2**30) // page_bytes * page_bytes


def test_long_answer_on_two_devices(resident: LLM, spilling: LLM) -> None:
    """A decode that fails after some number of steps; a device that waits for the other, which
    misses other rows; a row of one device taken for one of the other."""
    prompt = tokens(80, 850)
    (output,) = spilling.generate(prompts_of([prompt]), greedy(120))
    assert [output.outputs[0].token_ids] == answers(resident, [prompt], 120)
    counters = output.cache_counters
    assert min(counters.row_cache_reads, counters.staged_reads, counters.host_reads) > 0


def test_deleting_an_engine(model: Path) -> None:
    """A large host tier that keeps its memory, or takes long to give it back, when its engine is
    deleted in the middle of a request."""
    llm = LLM(model, max_num_seqs=256, device_pages=8, host_memory_gib=0.25)
    store = llm._engine.runner.cache.device.store
    assert store.host is not None
    assert store.host.slab.nbytes > 0.24 * 2**30
    slabs = [weakref.ref(store.slab), weakref.ref(store.host.slab)]
    outputs = llm.generate_iter(prompts_of([tokens(100, 300)]), greedy(8))
    start = time.monotonic()
    del llm, store, outputs
    gc.collect()
    assert time.monotonic() - start < 10
    assert [slab() for slab in slabs] == [None, None]


def test_requests_one_after_another(resident: LLM, spilling: LLM) -> None:
    """A page or index leaked by each request, or an eviction that goes wrong now and then: the
    pool is used up many times over, by prompts that share beginnings of many lengths."""
    random = np.random.default_rng(1)
    families = [tokens(seed, LONGEST) for seed in range(110, 114)]
    prompts = [
        [*families[random.integers(4)][: random.integers(1, 600)], *tokens(200 + turn, 60)]
        for turn in range(32)
    ]
    expected = answers(resident, prompts, 4)
    cache, cached = spilling._engine.runner.cache, 0
    for prompt, answer in zip(prompts, expected, strict=True):
        (output,) = spilling.generate(prompts_of([prompt]), greedy(4))
        assert output.outputs[0].token_ids == answer
        cached += output.num_cached_tokens
        assert_idle(spilling)
    pages = sum(cache.geometry.pages_for(len(prompt)) for prompt in prompts)
    assert pages > 6 * cache.geometry.num_pages
    assert cached > 0


def test_long_requests_at_once(
    resident: LLM, spilling: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that keep each other from finishing, are computed again and again, or answer
    otherwise than alone: any two are longer than the device's part of the pool."""
    prompts = [tokens(seed, 580 + 20 * (seed - 120)) for seed in range(120, 124)]
    expected = [answers(resident, [prompt], 24)[0] for prompt in prompts]
    computed = []
    launch = ModelRunner.launch_prefill

    def counting(self: ModelRunner, chunk: PrefillChunk) -> Launched:
        computed.append(len(chunk.token_ids))
        return launch(self, chunk)

    monkeypatch.setattr(ModelRunner, "launch_prefill", counting)
    assert answers(spilling, prompts, 24) == expected
    assert sum(computed) == sum(map(len, prompts))


def test_requests_given_up(resident: LLM, spilling: LLM) -> None:
    """Pages, leases or pins kept for a request that its caller no longer wants."""
    residency = spilling._engine.runner.cache.residency
    prompts = [tokens(seed, 600) for seed in range(130, 133)]
    for steps in (1, 2, 5):
        outputs = spilling.generate_iter(prompts_of(prompts), greedy(40), stream=True)
        with contextlib.closing(outputs) as running:  # pyright: ignore[reportArgumentType]
            for _ in itertools.islice(running, steps):
                push_out(spilling)
        assert_idle(spilling)
        assert not any(residency.leased_row_cache(slot) for slot in range(2))
    assert answers(spilling, prompts, 8) == answers(resident, prompts, 8)


def test_prompts_as_long_as_something_else(resident: LLM, spilling: LLM) -> None:
    """A length that equals or exceeds the row-cache rows, a selection, a page, the device's pages
    or the longest sequence: a hang, a refusal or an off-by-one."""
    sizes = (24, 32, PAGE, 6 * PAGE)
    lengths = [1, *(size + more for size in sizes for more in (-1, 0, 1)), LONGEST - 4]
    prompts = [tokens(140 + index, length) for index, length in enumerate(lengths)]
    assert answers(spilling, prompts, 4) == answers(resident, prompts, 4)
    with pytest.raises(ValueError, match="max_model_len 1024"):
        spilling.generate(prompts_of([tokens(0, LONGEST)]), greedy(1))


def test_prompts_on_a_prefix_in_host_memory(resident: LLM, spilling: LLM) -> None:
    """A prefill that reads a staged page of the chunk, layer or sequence before, or the page that
    a decode step between two of its prompts has put there."""
    prefix = tokens(170, 510)
    prompts = [[*prefix, *tokens(seed, count)] for seed, count in ((171, 250), (172, 70), (173, 1))]
    expected = answers(resident, prompts, 40)
    answers(spilling, [prefix], 1)
    push_out(spilling)
    outputs = spilling.generate(prompts_of(prompts), greedy(40))
    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert min(output.num_cached_tokens for output in outputs) >= 509
    assert sum(output.cache_counters.staged_reads for output in outputs) > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_policy": "resident", "row_cache_rows": 64}, "row_cache_rows 64.*'resident'"),
        ({"kv_policy": "resident", "host_memory_gib": 1.0}, "host_memory_gib 1.0.*'resident'"),
        (
            {"device_pages": 8, "row_cache_rows": 6 * 64},
            "row_cache_rows 384 takes 6 of 8 pages.*most 320 ",
        ),
    ],
)
def test_options_without_effect(model: Path, options: dict[str, Any], message: str) -> None:
    """An option that is taken and then not honoured."""
    with pytest.raises(ValueError, match=message):
        LLM(model, max_model_len=LONGEST, **options)
