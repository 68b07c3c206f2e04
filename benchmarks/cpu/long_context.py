"""Long contexts of the built-in model with a twentieth of their pages on the device.

Decodes after 131,072 tokens of context, whose rows are random numbers put into the cache, and
prefills a prompt of 16,384 tokens: each with all pages on the device, and with a share of them
there and the rest in host memory. Both must generate the same tokens. Each run has its own process,
for its peak memory; runs take turns, and medians are reported.

usage: python benchmarks/cpu/long_context.py [--repeats N] [--json FILE]
"""

import argparse
import dataclasses
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvcache import KVCache
from kvcache.prefix_transfer import PrefixImport
from serving.llm import LLM
from serving.options.store_options import MIN_DEVICE_PAGES
from serving.requests.sampling_params import SamplingParams

DECODE_CONTEXT = 131_072
PREFILL_CONTEXT = 16_384
DEVICE_SHARE = 0.05
STORES = ("resident", "hybrid")
_VOCABULARY = 1500  # ids below the model's special tokens
_NEW_TOKENS = 63  # a page without the token that a step appends to a cached prompt of whole pages
_BLOCK = 4096  # tokens imported at a time


@dataclasses.dataclass(frozen=True)
class Run:
    """Result of a run.

    Attributes:
        tokens_per_second: speed of the prompt, or of the output.
        tokens: ids that the model generated.
        device_pages: number of pages on the device.
        pages: number of all pages.
        slab_bytes: device memory of rows.
        host_bytes: host memory of rows.
        key_bytes: device memory of index keys.
        peak_bytes: peak memory of the process.
        counters: `CacheCounters` of the request.
    """

    tokens_per_second: float
    tokens: list[int]
    device_pages: int
    pages: int
    slab_bytes: int
    host_bytes: int
    key_bytes: int
    peak_bytes: int
    counters: dict[str, int]


class MeasuredLLM(LLM):
    """An LLM that exposes its cache."""

    @property
    def cache(self) -> KVCache:
        """Bookkeeping of the cache."""
        return self._engine.runner.cache


def store_options(store: str, max_model_len: int, rows_per_page: int = 64) -> dict[str, Any]:
    """Returns options of an `LLM` for one sequence: "resident", or "hybrid" with a share of the
    pages on the device."""
    pages = -(-max_model_len // rows_per_page)
    sizes = {"max_num_seqs": 1, "max_model_len": max_model_len}
    if store == "resident":
        return sizes | {"kv_policy": store, "device_pages": pages}
    share = max(round(DEVICE_SHARE * pages), MIN_DEVICE_PAGES)
    return sizes | {"kv_policy": store, "device_pages": share}


def decode(llm: MeasuredLLM, context: int) -> Run:
    """Decodes the last tokens of a context whose earlier rows are random numbers."""
    tokens = _random_tokens(context - _NEW_TOKENS, seed=0)
    geometry = llm.cache.geometry
    rng = np.random.default_rng(1)
    with PrefixImport(llm.cache, tokens[:-1]) as transfer:
        for start in range(0, len(tokens) - 1, _BLOCK):
            count = min(_BLOCK, len(tokens) - 1 - start)
            rows = (count, geometry.num_layers, geometry.row_format.width)
            keys = (count, geometry.num_index_layers, geometry.index_row_format.width)
            transfer.write(*(rng.standard_normal(shape, np.float32) for shape in (rows, keys)))
        transfer.finish()
    times, counters, token_ids = [], {}, []
    prompt = {"prompt_token_ids": tokens}
    for _, output in llm.generate_iter(prompt, _greedy(_NEW_TOKENS), stream=True):
        times.append(time.perf_counter())
        counters = dataclasses.asdict(output.cache_counters)
        token_ids = output.outputs[0].token_ids
    if counters["cached_tokens"] != len(tokens) - 1:
        raise RuntimeError(f"{counters['cached_tokens']} of {len(tokens) - 1} tokens were found")
    # The first step compiles.
    seconds = statistics.median(np.diff(times)[1:].tolist())
    return _run(llm, 1 / seconds, token_ids, counters)


def prefill(llm: MeasuredLLM, context: int) -> Run:
    """Prefills a prompt, once its steps are compiled, and continues it."""
    count = context - _NEW_TOKENS
    prompts = [{"prompt_token_ids": _random_tokens(count, seed)} for seed in (1, 2)]
    for_compilation, prompt = prompts
    llm.generate(for_compilation, _greedy(1), use_tqdm=False)
    start = time.perf_counter()
    (output,) = llm.generate(prompt, _greedy(1), use_tqdm=False)
    seconds = time.perf_counter() - start
    counters = dataclasses.asdict(output.cache_counters)
    if counters["cached_tokens"]:
        raise RuntimeError(f"{counters['cached_tokens']} tokens were not computed")
    (continued,) = llm.generate(prompt, _greedy(_NEW_TOKENS), use_tqdm=False)
    return _run(llm, count / seconds, continued.outputs[0].token_ids, counters)


MEASUREMENTS: Mapping[str, tuple[Callable[[MeasuredLLM, int], Run], int]] = {
    "decode": (decode, DECODE_CONTEXT),
    "prefill": (prefill, PREFILL_CONTEXT),
}


def _random_tokens(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(_VOCABULARY, size=count).tolist()


def _greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)


def _run(
    llm: MeasuredLLM, tokens_per_second: float, tokens: Sequence[int], counters: dict[str, int]
) -> Run:
    geometry = llm.cache.geometry
    return Run(
        tokens_per_second,
        list(tokens),
        geometry.device_pages,
        geometry.num_pages,
        geometry.device_pages * geometry.page_bytes,
        geometry.host_bytes,
        geometry.num_pages * geometry.index_page_bytes,
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        counters,
    )


def compare(runs: Mapping[str, Sequence[Run]]) -> dict[str, Run]:
    """Returns one run for each store, with the median speed and peak.

    Raises:
        RuntimeError: runs differ in their tokens.
    """
    compared = {}
    expected = runs["resident"][0].tokens
    for store, repeats in runs.items():
        for run in repeats:
            if run.tokens != expected:
                raise RuntimeError(f"{store!r} gave {run.tokens}, 'resident' {expected}")
        compared[store] = dataclasses.replace(
            repeats[0],
            tokens_per_second=statistics.median(run.tokens_per_second for run in repeats),
            peak_bytes=statistics.median_low(run.peak_bytes for run in repeats),
        )
    return compared


def format_tables(results: Mapping[str, Mapping[str, Run]]) -> str:
    """Formats speed and memory, then the reads by tier, in Markdown."""
    lines = [
        "| work | store | pages on the device | tokens/s | ms a token | ratio "
        "| rows on the device, MiB | rows in host memory, MiB | index keys, MiB | peak, MiB |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    reads = [
        "| work | read on the device | row cache | staged | in host memory | missed | staged, MiB "
        "| pages copied to the host |",
        "|---|---|---|---|---|---|---|---|",
    ]
    names = ("resident_reads", "row_cache_reads", "staged_reads", "host_reads", "missed_rows")
    for work, runs in results.items():
        base = runs["resident"].tokens_per_second
        for store, run in runs.items():
            sizes = (run.slab_bytes, run.host_bytes, run.key_bytes, run.peak_bytes)
            mebibytes = " | ".join(f"{size / 2**20:,.1f}" for size in sizes)
            speed = run.tokens_per_second
            lines.append(
                f"| {work} | {store} | {run.device_pages:,} of {run.pages:,} | {speed:,.1f} "
                f"| {1e3 / speed:.2f} | {speed / base:.2f} | {mebibytes} |"
            )
        counters = runs["hybrid"].counters
        counts = " | ".join(f"{counters[name]:,}" for name in names)
        reads.append(
            f"| {work} | {counts} | {counters['staged_bytes'] / 2**20:,.1f} "
            f"| {counters['offloaded_pages']:,} |"
        )
    return "\n".join([*lines, "", *reads])


def _measure_apart(work: str, store: str) -> Run:
    command = [sys.executable, __file__, "--work", work, "--store", store]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return Run(**json.loads(output))


def main() -> None:
    """Runs the comparison, or a single run of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the medians here")
    parser.add_argument("--work", choices=MEASUREMENTS, help="measure this in this process")
    parser.add_argument("--store", choices=STORES, default="resident", help="with --work")
    options = parser.parse_args()
    if options.repeats < 1:
        parser.error(f"--repeats must be at least 1, got {options.repeats}")
    if options.work:
        measure, context = MEASUREMENTS[options.work]
        llm = MeasuredLLM(**store_options(options.store, context))
        print(json.dumps(dataclasses.asdict(measure(llm, context))))
        return
    results = {}
    for work in MEASUREMENTS:
        runs: dict[str, list[Run]] = {store: [] for store in STORES}
        for _ in range(options.repeats):
            for store in STORES:
                runs[store].append(_measure_apart(work, store))
        results[work] = compare(runs)
    print(format_tables(results))
    if options.json:
        rows = {
            work: {store: dataclasses.asdict(run) for store, run in runs.items()}
            for work, runs in results.items()
        }
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
