"""Ways in which caches that span two memories are known to fail, tried on whole engines.

An engine that spills must answer as one that keeps every page on the device, whatever happens to
its pages meanwhile.
"""

import gc
import itertools
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from glm53 import LLM, SamplingParams
from glm53.kv_geometry import kv_geometry
from glm53.sharding import make_mesh
from kvcache import KVCache, OutOfPagesError
from kvcache.page_states import PageState
from kvcache.prefix_transfer import PrefixImport, export_prefix
from serving.buckets import Buckets
from serving.model_runner import ModelRunner
from tests.support import GOLDEN, golden_config

MODEL = GOLDEN / "tiny_f32"
LONGEST = 1024
ROWS = 64  # of a page on one device, and of a prefill step


def engine(**options: Any) -> LLM:
    """One shape of each step, three slots."""
    llm = LLM(MODEL, max_model_len=LONGEST, max_num_seqs=3, **options)
    pages = llm._runner.geometry.max_pages_per_sequence
    llm._runner._buckets = Buckets((ROWS,), (3,), (pages,))
    return llm


@pytest.fixture(scope="module")
def resident() -> LLM:
    return engine(kv_policy="resident", max_num_batched_tokens=ROWS)


@pytest.fixture(scope="module")
def spilling() -> LLM:
    """30 pages, 8 of them on the device; a sequence has up to 16."""
    llm = engine(device_pages=8, host_memory_gib=0.0017, hot_rows=24, max_num_batched_tokens=ROWS)
    assert llm._runner.geometry.num_pages == 30
    return llm


@pytest.fixture(scope="module")
def two_devices() -> LLM:
    """16 pages, 4 of them on the devices; a sequence has up to 8."""
    return engine(tensor_parallel_size=2, device_pages=4, host_memory_gib=0.0019, hot_rows=24)


def tokens(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 256, count).tolist()


def greedy(count: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)


def prompts_of(token_ids: Sequence[list[int]]) -> list[dict[str, list[int]]]:
    return [{"prompt_token_ids": ids} for ids in token_ids]


def answers(llm: LLM, token_ids: Sequence[list[int]], count: int) -> list[list[int]]:
    """The next `count` tokens of each prompt, all given at once."""
    outputs = llm.generate(prompts_of(token_ids), greedy(count), use_tqdm=False)
    assert_idle(llm)
    return [output.outputs[0].token_ids for output in outputs]


def watched(
    llm: LLM, token_ids: Sequence[list[int]], count: int, interfere: Callable[[], object]
) -> list[list[int]]:
    """The same, with `interfere` called after every step."""
    found: dict[int, list[int]] = {}
    for place, output in llm.generate_iter(prompts_of(token_ids), greedy(count), stream=True):
        found[place] = output.outputs[0].token_ids
        interfere()
        llm._runner.cache.check_integrity()
    assert_idle(llm)
    return [found[place] for place in range(len(token_ids))]


def assert_idle(llm: LLM) -> None:
    """No page is in use and none is lost."""
    cache = llm._runner.cache
    cache.check_integrity()
    assert cache.pool.num_free + cache.pool.num_cached_only == cache.geometry.num_pages


def push_out(llm: LLM) -> None:
    """Copies what is sealed to host memory and takes it off the device, as far as there is room."""
    residency = llm._runner.cache.residency
    for page in sorted(residency.droppable_in(PageState.DIRTY))[: residency.num_free_host]:
        residency.clean(page)
    for page in sorted(residency.droppable_in(PageState.CLEAN)):
        residency.drop(page)


def exported(llm: LLM, token_ids: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Rows [tokens, layers, width] and index keys of a cached prefix."""
    blocks = export_prefix(llm._runner.cache, token_ids)
    rows, keys = zip(*blocks, strict=True)
    return np.concatenate(rows), np.concatenate(keys)


def test_each_layer_keeps_its_own_rows(resident: LLM, spilling: LLM) -> None:
    """Layers of a group that write over each other; a page, device place or host place that is
    taken for another of the three."""
    prompt = tokens(0, 900)
    assert answers(spilling, [prompt], 8) == answers(resident, [prompt], 8)
    push_out(spilling)
    residency = spilling._runner.cache.residency
    gone = residency.pages_in(PageState.HOST)
    assert len(gone) >= 14
    assert sum(page != residency.host_place(page) for page in gone) > len(gone) // 2
    (rows, keys), (expected_rows, expected_keys) = (
        exported(llm, prompt) for llm in (spilling, resident)
    )
    np.testing.assert_array_equal(rows, expected_rows)
    np.testing.assert_array_equal(keys, expected_keys)
    for one, other in itertools.combinations(range(rows.shape[1]), 2):
        assert (rows[:, one] != rows[:, other]).any(axis=-1).all()


def test_engines_side_by_side(resident: LLM, spilling: LLM, two_devices: LLM) -> None:
    """Engines of one process that share a pool, a lease or a compiled step's state."""
    prompts = {spilling: tokens(1, 800), two_devices: tokens(2, 800), resident: tokens(3, 800)}
    expected = answers(resident, list(prompts.values()), 30)
    streams = [
        llm.generate_iter(prompts_of([prompt]), greedy(30), stream=True)
        for llm, prompt in prompts.items()
    ]
    for outputs in zip(*streams, strict=True):
        pass
    assert [output.outputs[0].token_ids for _, output in outputs] == expected


@pytest.fixture(scope="module")
def blocks(resident: LLM) -> list[tuple[list[int], np.ndarray, np.ndarray]]:
    """Prefixes with their rows and index keys, as another process would send them."""
    prefixes = [tokens(seed, 300 + 20 * seed) for seed in range(10, 16)]
    answers(resident, prefixes, 1)
    return [(prefix, *exported(resident, prefix)) for prefix in prefixes]


def test_imports_while_decoding(
    resident: LLM, spilling: LLM, blocks: list[tuple[list[int], np.ndarray, np.ndarray]]
) -> None:
    """Imports into a store that is nearly full, between the steps of sequences that run: a launch
    that fails, a page lost, a map not yet launched when the next step reads it."""
    prompts = [tokens(20, 600), tokens(21, 500)]
    expected = answers(resident, prompts, 60)
    turns = itertools.cycle(blocks)
    known = itertools.count()
    imported: list[int] = []
    refused = []

    def bring_in() -> None:
        prefix, rows, keys = next(turns)
        try:
            # Each time another first token: a prefix that is not known yet.
            number = next(known)
            with PrefixImport(spilling._runner.cache, [number, *prefix[1:]]) as arriving:
                arriving.write(rows, keys)
                arriving.finish()
            imported.append(number)
        except OutOfPagesError as error:
            refused.append(error)

    assert watched(spilling, prompts, 60, bring_in) == expected
    assert len(imported) > 20
    assert not refused
    for prefix, rows, keys in blocks:
        with PrefixImport(spilling._runner.cache, prefix) as arriving:
            arriving.write(rows, keys)
            arriving.finish()
        (output,) = spilling.generate(prompts_of([[*prefix, 7]]), greedy(8))
        assert output.num_cached_tokens == len(prefix)
        assert [output.outputs[0].token_ids] == answers(resident, [[*prefix, 7]], 8)


def test_a_full_pool_admits(resident: LLM, spilling: LLM) -> None:
    """A request refused although all pages that hold others' rows could be given up."""
    cache = spilling._runner.cache
    answers(spilling, [tokens(seed, 600) for seed in range(30, 34)], 1)
    push_out(spilling)
    assert cache.pool.num_free <= 1
    assert cache.residency.num_free_host == 0
    prompts = [tokens(34, LONGEST - 8)]
    assert answers(spilling, prompts, 8) == answers(resident, prompts, 8)


@pytest.mark.parametrize(("device_pages", "host_pages"), [(4, 0), (4, 2)])
def test_a_prompt_that_takes_the_page_it_would_copy(device_pages: int, host_pages: int) -> None:
    """A pool that the same prompt has filled before: the partly filled page at its end cannot be
    both kept and replaced."""
    geometry = kv_geometry(
        golden_config("tiny_f32"),
        row_kind="float32",
        rows_per_device=4,
        device_pages=device_pages,
        host_pages=host_pages,
        hot_rows=1 if host_pages else 0,
        max_model_len=4 * (device_pages + host_pages),
        max_sequences=1,
    )
    cache = KVCache(geometry, make_mesh(), hidden_size=8, dtype=jnp.float32, most_step_rows=4)
    prompt = tokens(40, 4 * geometry.num_pages - 1)
    for found in (0, len(prompt) // 4 * 4):
        assert cache.open(0, prompt, len(prompt)) == found
        for start in range(found, len(prompt), 4):
            chunk = prompt[start : start + 4]
            cache.prepare({0: len(chunk)}, staging=True)
            cache.advance(0, chunk, prompt_complete=start + 4 >= len(prompt))
        cache.close(0)
        cache.check_integrity()


def test_rows_written_while_their_pages_leave(resident: LLM, spilling: LLM) -> None:
    """Rows of a decode step that a copy to the host missed, as it was made before they were
    written or of a page that grew afterwards; the same when the sequence is continued."""
    prompt = tokens(50, 100)
    (expected,) = answers(resident, [prompt], 300)
    assert watched(spilling, [prompt], 300, lambda: push_out(spilling)) == [expected]
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
    random = np.random.default_rng(0)
    cache = spilling._runner.cache
    moved = {"dropped": 0, "restored": 0, "released": 0}

    def move_pages() -> None:
        if random.random() < 0.5:
            moved["dropped"] += len(cache.residency.droppable_in(PageState.CLEAN))
            push_out(spilling)
        else:
            for page in sorted(cache.residency.pages_in(PageState.HOST)):
                if cache.residency.num_free_device > 2 and cache.pool.references(page):
                    cache.residency.restore(page)
                    moved["restored"] += 1
        if random.random() < 0.2:
            moved["released"] += bool(cache.residency.hot_places(0))
            cache.residency.release_hot(0)

    prompts = [tokens(60, 500), tokens(61, 400)]
    expected = answers(resident, prompts, 100)
    assert watched(spilling, prompts, 100, move_pages) == expected
    assert min(moved.values()) > 5, moved
    assert spilling._runner._steps.decode._cache_size() == 1


def test_each_read_is_counted_once(resident: LLM, spilling: LLM, two_devices: LLM) -> None:
    """Reads counted for another request or tier, twice, for padding, or without a host tier."""
    prompts = [tokens(70, 700), tokens(71, 130), tokens(72, 20)]
    for llm in (resident, spilling, two_devices):
        geometry = llm._runner.geometry
        for prompt, output in zip(
            prompts, llm.generate(prompts_of(prompts), greedy(10)), strict=True
        ):
            counters, positions = output.cache_counters, range(len(prompt) + 9)
            assert counters.cached_tokens == 0
            selected = sum(min(llm.config.index_topk, position + 1) for position in positions)
            away = counters.hot_reads + counters.staged_reads + counters.host_reads
            if llm is resident:
                assert counters.resident_reads == away == 0
            else:
                assert counters.resident_reads + away == geometry.num_index_layers * selected
                assert (away > 0) == (len(prompt) > 600)
                assert counters.cleaned_bytes == counters.cleaned_pages * geometry.page_bytes


def test_sizes(spilling: LLM, two_devices: LLM) -> None:
    """Pages counted a layer or a device too often or too seldom, or beyond what was allowed."""
    for llm, device_pages, gib in ((spilling, 8, 0.0017), (two_devices, 4, 0.0019)):
        geometry, store = llm._runner.geometry, llm._runner.cache.store
        assert store.host is not None
        assert geometry.device_pages == device_pages
        row_bytes = 4 * (llm.config.kv_lora_rank + llm.config.qk_rope_head_dim)
        page_bytes = llm.config.num_hidden_layers * geometry.rows_per_page * row_bytes
        assert store.slab.nbytes == device_pages * page_bytes
        assert store.host.slab.nbytes == int(gib * 2**30) // page_bytes * page_bytes
        assert len(store.device_page) == geometry.num_pages


def test_long_answers_on_two_devices(resident: LLM, two_devices: LLM) -> None:
    """A decode that fails after some number of steps; a device that waits for the other, which
    misses other rows; a place on one device taken for one on the other."""
    prompts = [tokens(80, 700)]
    assert answers(two_devices, prompts, 150) == answers(resident, prompts, 150)
    counters = two_devices.cache_counters
    assert min(counters.hot_reads, counters.staged_reads, counters.host_reads) > 0


def test_steps_that_the_device_pages_allow(resident: LLM, two_devices: LLM) -> None:
    """A prefill step for more tokens than have room on the devices."""
    llm = engine(device_pages=4, host_memory_gib=0.0017, max_num_batched_tokens=512)
    assert llm._runner.cache._most_step_rows == ROWS
    assert two_devices._runner.cache._most_step_rows == 2 * ROWS
    prompts = [tokens(90, LONGEST - 4)]
    assert answers(two_devices, prompts, 4) == answers(resident, prompts, 4)


def test_deleting_an_engine() -> None:
    """A large host tier that keeps its memory, or takes long to give it back, when its engine is
    deleted in the middle of a request."""
    llm = LLM(MODEL, max_num_seqs=64, device_pages=8, host_memory_gib=0.25)
    store = llm._runner.cache.store
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
    """A page or place leaked by each request, or an eviction that goes wrong now and then: the
    pool is used up many times over, by prompts that share beginnings of many lengths."""
    random = np.random.default_rng(1)
    families = [tokens(seed, LONGEST) for seed in range(110, 114)]
    prompts = [
        [*families[random.integers(4)][: random.integers(1, 500)], *tokens(200 + turn, 60)]
        for turn in range(60)
    ]
    expected = answers(resident, prompts, 4)
    cache, cached = spilling._runner.cache, 0
    for prompt, answer in zip(prompts, expected, strict=True):
        (output,) = spilling.generate(prompts_of([prompt]), greedy(4))
        assert output.outputs[0].token_ids == answer
        cached += output.num_cached_tokens
        assert_idle(spilling)
    pages = sum(cache.geometry.pages_for(len(prompt)) for prompt in prompts)
    assert pages > 8 * cache.geometry.num_pages
    assert cached > 0


def test_long_requests_at_once(
    resident: LLM, spilling: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that keep each other from finishing, are computed again and again, or answer
    otherwise than alone: each alone is longer than the device's part of the pool."""
    prompts = [tokens(seed, 560 + 20 * (seed - 120)) for seed in range(120, 128)]
    expected = [answers(resident, [prompt], 40)[0] for prompt in prompts]
    computed = []
    append = ModelRunner._append

    def counting(self: ModelRunner, slot: int, token_ids: list[int], *args, **kwargs):
        computed.append(len(token_ids))
        return append(self, slot, token_ids, *args, **kwargs)

    monkeypatch.setattr(ModelRunner, "_append", counting)
    assert answers(spilling, prompts, 40) == expected
    assert sum(computed) == sum(map(len, prompts))


def test_requests_given_up(resident: LLM, spilling: LLM) -> None:
    """Pages, leases or pins that a request keeps which its caller no longer wants."""
    cache = spilling._runner.cache
    prompts = [tokens(seed, 600) for seed in range(130, 133)]
    for steps in range(1, 8):
        running: Iterator = spilling.generate_iter(prompts_of(prompts), greedy(40), stream=True)
        for _ in itertools.islice(running, steps):
            push_out(spilling)
        running.close()  # pyright: ignore[reportAttributeAccessIssue]
        assert_idle(spilling)
        assert not any(cache.residency.hot_places(slot) for slot in range(3))
    assert answers(spilling, prompts, 8) == answers(resident, prompts, 8)


def test_prompts_as_long_as_something_else(resident: LLM, spilling: LLM) -> None:
    """A length that equals or exceeds the hot rows, a selection, a page, the device's pages or the
    longest sequence: a hang, a refusal or an off-by-one."""
    sizes = (24, 32, ROWS, 8 * ROWS)
    lengths = [1, *(size + more for size in sizes for more in (-1, 0, 1)), LONGEST - 4]
    prompts = [tokens(140 + length, length) for length in lengths]
    assert answers(spilling, prompts, 4) == answers(resident, prompts, 4)
    with pytest.raises(ValueError, match="max_model_len 1024"):
        spilling.generate(prompts_of([tokens(0, LONGEST)]), greedy(1))


def test_prompts_on_a_prefix_in_host_memory(resident: LLM, spilling: LLM) -> None:
    """A prefill that reads a staged page of the chunk, layer or sequence before, or the page that
    a decode step between two of its prompts has put there."""
    prefix = tokens(150, 510)
    prompts = [[*prefix, *tokens(seed, count)] for seed, count in ((151, 150), (152, 70), (153, 1))]
    expected = answers(resident, prompts, 40)
    answers(spilling, [prefix], 1)
    push_out(spilling)
    outputs = spilling.generate(prompts_of(prompts), greedy(40))
    assert [output.outputs[0].token_ids for output in outputs] == expected
    for output in outputs:
        assert output.num_cached_tokens >= 509
    assert min(output.cache_counters.staged_reads for output in outputs) > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_policy": "resident", "hot_rows": 64}, "hot_rows 64.*'resident'"),
        ({"kv_policy": "resident", "host_memory_gib": 1.0}, "host_memory_gib 1.0.*'resident'"),
        ({"device_pages": 8, "hot_rows": 6 * ROWS}, "hot_rows 384 takes 6 pages.*device_pages 8"),
    ],
)
def test_options_without_effect(options: dict[str, Any], message: str) -> None:
    """An option that is taken and then not honoured."""
    with pytest.raises(ValueError, match=message):
        LLM(MODEL, max_model_len=LONGEST, max_num_seqs=3, **options)
