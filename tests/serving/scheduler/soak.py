"""Long random histories over the real cache.s bookkeeping, with pages moving between two tiers.

Run by `test_soak.py` in processes of their own, where types are not checked, which takes ten times
as long as the histories themselves.
"""

import dataclasses
import json
import random
import sys
from collections import Counter

import pytest

from kvcache import KVCache, KVGeometry
from pallas_kernels.common.row_format import RowFormat
from serving.scheduler import Scheduler
from tests.helpers.free_lists import use_host_list
from tests.serving.scheduler.history import History, random_arrival
from tests.serving.scheduler.mock_engine import MockEngine
from tests.serving.scheduler.two_tiers import TwoTierDevice

AGE_WEIGHT = 0.25
ROWS_PER_PAGE = 4
CHECK_EVERY = 7


@dataclasses.dataclass(frozen=True)
class Sizes:
    """A small engine."""

    device_pages: int
    host_pages: int
    max_num_seqs: int
    max_step_rows: int
    max_num_batched_tokens: int
    row_cache_pages: int
    staging_pages: int
    with_hidden: bool

    @classmethod
    def draw(cls, rng: random.Random, policy: str) -> "Sizes":
        max_step_rows = rng.choice((1, 3, 4, 8, 11))
        chunk_pages = -(-max_step_rows // ROWS_PER_PAGE)
        max_num_seqs = rng.randint(1, 6)
        return cls(
            device_pages=chunk_pages + 2 + rng.choice((0, 1, 4, 12, 30)),
            host_pages=0 if policy == "resident" else rng.choice((1, 8, 30)),
            max_num_seqs=max_num_seqs,
            max_step_rows=max_step_rows,
            max_num_batched_tokens=rng.choice((2, 8, 24)),
            row_cache_pages=rng.choice((1, 2)) if policy == "hybrid" else 0,
            staging_pages=rng.choice((0, 2)) if policy == "hybrid" else 0,
            with_hidden=rng.random() < 0.3,
        )


def start(sizes: Sizes, policy: str) -> tuple[KVCache[TwoTierDevice], int]:
    """A cache, and the most tokens that a sequence may have in it."""
    pages = sizes.device_pages + (sizes.host_pages if policy == "hybrid" else 0)
    geometry = KVGeometry(
        group_layers=(1,),
        device_pages=sizes.device_pages,
        host_pages=sizes.host_pages,
        num_devices=1,
        rows_per_device=ROWS_PER_PAGE,
        max_sequences=sizes.max_num_seqs,
        max_pages_per_sequence=pages,
        row_format=RowFormat("float32", 1, 0, 1.0),
        index_row_format=RowFormat("float32", 1, 0, 1.0),
        row_cache_rows=ROWS_PER_PAGE * sizes.row_cache_pages,
        staging_pages=sizes.staging_pages,
    )
    cache = KVCache(
        geometry,
        TwoTierDevice(geometry),
        max_step_rows=sizes.max_step_rows,
        with_hidden=sizes.with_hidden,
    )
    return cache, pages * ROWS_PER_PAGE


def make_engine(
    sizes: Sizes, policy: str, *, pipelined: bool
) -> tuple[MockEngine, KVCache[TwoTierDevice], int]:
    """An empty engine, its cache, and the most tokens that a sequence may have in it."""
    cache, max_tokens = start(sizes, policy)
    scheduler = Scheduler(
        cache,
        max_num_seqs=sizes.max_num_seqs,
        max_num_batched_tokens=sizes.max_num_batched_tokens,
        max_step_rows=sizes.max_step_rows,
        age_weight=AGE_WEIGHT,
    )
    return MockEngine(cache, cache.device, scheduler, pipelined=pipelined), cache, max_tokens


def soak(policy: str, seed: int, num_steps: int) -> dict[str, int]:
    """Histories in engines of many sizes; counts what there was."""
    rng = random.Random(f"{policy} {seed}")
    taken, seen = 0, Counter[str]()
    while taken < num_steps:
        sizes = Sizes.draw(rng, policy)
        pipelined = rng.random() < 0.9
        engine, cache, max_tokens = make_engine(sizes, policy, pipelined=pipelined)
        history = History(
            engine, max_tokens=max_tokens, age_weight=AGE_WEIGHT, check_every=CHECK_EVERY
        )
        busy = rng.choice((0.1, 0.3, 0.6))
        for _ in range(400):
            if rng.random() < busy and history.scheduler.num_waiting < 12:
                history.add(random_arrival(rng, max_new=24, max_output=32))
            if rng.random() < 0.03:
                history.abort(rng.randrange(1 << 20))
            if rng.random() < 0.002:
                # As after a step that has failed: all rows are lost.
                engine, cache, _ = make_engine(sizes, policy, pipelined=pipelined)
                engine.scheduler.counters = history.scheduler.counters
                history.restart(engine)
            history.step()
        history.drain(max_steps=100_000)
        taken += history.num_steps
        seen["preempted"] += history.scheduler.counters.preempted
        seen["dropped"] += cache.residency.pages_dropped
        seen["onloaded"] += cache.residency.pages_onloaded
        pool = cache.pool
        assert pool.num_free + pool.num_cached_only == cache.geometry.num_pages, "pages leaked"
    return dict(seen)


def main() -> None:
    """Prints what there was, in JSON: policy, seed and steps are the arguments."""
    policy, seed, num_steps = sys.argv[1:]
    use_host_list(pytest.MonkeyPatch())
    print(json.dumps(soak(policy, int(seed), int(num_steps))))


if __name__ == "__main__":
    main()
