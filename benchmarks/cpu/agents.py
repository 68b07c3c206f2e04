"""Agents with long contexts on one small store: the three policies at rising concurrency.

The workload is that of software agents on 8x H200, scaled to a CPU: 13 turns, a first prompt of
74,160 tokens, later ones of 753, both divided by 64, and answers of 16 tokens, as a 64th of 220 is
too few for turns to overlap; a model that selects 32 rows a
token, which is as small a part of a context as GLM-5.3's 2,048; a device pool that holds as many
contexts as the devices of that node (--quick: a quarter), and host memory in the same proportion.
Each agent sends its next turn as soon as it has its answer. Measuring begins when every agent has
had its first one.

`resident` keeps all pages on the device and computes again what it had to give up; `swap` moves
whole sequences to the host and back; `hybrid` reads what a token selects from where it lies.

With --simulate nothing is computed: the scheduler and the account of the cache run alone, with the
unscaled workload on the store of that node, which tells how many agents run at once and how much of
their prompts is found, but no times.

usage: python benchmarks/cpu/agents.py [--quick | --simulate] [--json FILE] [--plot FILE]
"""

import argparse
import dataclasses
import json
import math
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.progress import show_progress
from benchmarks.common.small_checkpoint import small_fields, write_checkpoint
from benchmarks.cpu.agent_servers import EngineServer, SimulatedServer
from benchmarks.cpu.agent_workload import AGENTS, Result, Times, Workload, run_agents
from glm53.checkpoint.source import read_config
from glm53.model.kv_geometry import kv_geometry
from glm53.model.presets import preset
from kvcache import KVGeometry
from serving.engine.engine import Engine
from serving.options.engine_options import EngineOptions, KVPolicy

POLICIES: tuple[KVPolicy, ...] = ("resident", "swap", "hybrid")
SCALED = dataclasses.replace(AGENTS.scaled(64), output_tokens=16)
NODE_DEVICES, NODE_DEVICE_TOKENS, NODE_HOST_BYTES = 8, 8 * 640_000, 1 << 40
"""Of 8x H200: fp8 rows for which there is room beside the FP8 weights, and pinned host memory."""

CONCURRENCY = (32, 64, 128, 256)
_SLOTS = 256
_QUICK_PART = 4  # of the node
_MODEL = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "index_n_heads": 4,
    "index_topk": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
}


@dataclasses.dataclass(frozen=True)
class Row:
    """One measurement."""

    kv_policy: KVPolicy
    result: Result


def node_geometry(kv_policy: KVPolicy, workload: Workload, max_sequences: int) -> KVGeometry:
    """The store of 8x H200 with GLM-5.3 in FP8 and rows in fp8."""
    config = preset("glm-5.3")
    one_page = kv_geometry(
        config,
        row_kind="fp8",
        device_pages=1,
        max_model_len=workload.context_tokens,
        max_sequences=max_sequences,
        num_devices=NODE_DEVICES,
    )
    device_pages = NODE_DEVICE_TOKENS // one_page.rows_per_page
    host_pages = 0
    if kv_policy != "resident":
        # Index keys of pages in host memory lie on the devices too.
        device_bytes = device_pages * one_page.device_bytes
        device_pages, host_pages = one_page.pages_within(device_bytes, NODE_HOST_BYTES)
    geometry = dataclasses.replace(one_page, device_pages=device_pages, host_pages=host_pages)
    if kv_policy != "hybrid":
        return geometry
    return dataclasses.replace(
        geometry,
        hot_rows=4 * config.index_topk // NODE_DEVICES,
        staging_pages=-(-one_page.max_pages_per_sequence // one_page.num_layers),
    )


def simulate(concurrency: Sequence[int], turns_each: int, workload: Workload) -> Iterator[Row]:
    """Runs the scheduler and the account of the cache on the node's store."""
    for kv_policy in POLICIES:
        for agents in concurrency:
            geometry = node_geometry(kv_policy, workload, max(_SLOTS, agents))
            server = SimulatedServer(geometry, 8192)
            result = run_agents(
                server, workload, concurrency=agents, turns=turns_each * agents, vocab_size=1 << 17
            )
            server.cache.check_integrity()
            yield Row(kv_policy, result)


def engine_options(
    kv_policy: KVPolicy, model: Path, workload: Workload, part: int
) -> EngineOptions:
    """An engine whose store holds as many contexts as a part of the node's."""
    one_page = kv_geometry(
        read_config(model),
        row_kind="float32",
        device_pages=1,
        max_model_len=workload.context_tokens,
        max_sequences=1,
    )
    node = node_geometry(kv_policy, AGENTS, 1)

    def scaled(pages: int) -> int:
        contexts = pages * node.rows_per_page / AGENTS.context_tokens / part
        return round(contexts * workload.context_tokens / one_page.rows_per_page)

    host_bytes = scaled(node.host_pages) * one_page.page_bytes
    return EngineOptions(
        model=model,
        max_model_len=workload.context_tokens,
        max_num_seqs=_SLOTS // part,
        max_num_batched_tokens=256,  # lest they limit how many turns run, which are short
        device_pages=scaled(node.device_pages),
        kv_policy=kv_policy,
        host_memory_gib=host_bytes / 2**30 or None,
    )


def measure(
    concurrency: Sequence[int], turns_each: int, workload: Workload, part: int, most_seconds: float
) -> Iterator[Row]:
    """Runs the small model on an engine a policy, and an empty store a measurement."""
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder)
        write_checkpoint(model, small_fields(**_MODEL))
        for kv_policy in POLICIES:
            engine = Engine(engine_options(kv_policy, model, workload, part), warm_up=True)
            for agents in concurrency:
                engine.abort_all()
                yield Row(
                    kv_policy,
                    run_agents(
                        EngineServer(engine),
                        workload,
                        concurrency=agents,
                        turns=turns_each * agents,
                        vocab_size=engine.config.vocab_size,
                        most_seconds=most_seconds,
                    ),
                )
            compiled = engine.metrics().compilations
            if compiled:
                raise RuntimeError(f"{compiled} programs were compiled while agents waited")


def format_table(rows: Sequence[Row]) -> str:
    """The measurements in Markdown, with times where a model computed."""
    timed = _are_timed(rows)
    head = ["policy", "agents", "running (mean)", "running (maximum)"]
    head += ["prompt found", "preemptions", "turns"]
    if timed:
        head += ["output tokens/s", "first token, ms (90%)", "token, ms (90%)"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for row in rows:
        result = row.result
        cells = [
            row.kv_policy,
            str(result.concurrency),
            f"{result.running:.0f}",
            str(result.most_running),
            f"{result.reuse:.1%}",
            str(result.preemptions),
            f"{result.turns}{' (cut)' if result.cut else ''}",
        ]
        if timed:
            times = _times(result)
            cells.append(f"{result.output_tokens / times.seconds:.0f}")
            cells += [_spread(times.first_token_seconds), _spread(times.token_seconds)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _describe(row: Row) -> str:
    result = row.result
    return f"{row.kv_policy}, {result.concurrency} agents: {result.running:.0f} running (mean)"


def _are_timed(rows: Sequence[Row]) -> bool:
    return all(row.result.times is not None for row in rows)


def _times(result: Result) -> Times:
    if result.times is None:
        raise ValueError("a simulation has no times")
    return result.times


def _spread(seconds: Sequence[float]) -> str:
    """Median and 90th percentile, in milliseconds."""
    if len(seconds) < 2:
        return "-"
    middle, most = statistics.median(seconds), statistics.quantiles(seconds, n=10)[-1]
    return f"{1e3 * middle:.0f} ({1e3 * most:.0f})"


def _median_first_token(result: Result) -> float:
    seconds = _times(result).first_token_seconds
    return statistics.median(seconds) if seconds else math.nan


_COUNTED: Mapping[str, Callable[[Result], float]] = {
    "running requests (mean)": lambda result: result.running,
    "prompt tokens found in the cache, %": lambda result: 100 * result.reuse,
}
_SIMULATED = _COUNTED | {
    "running requests (maximum)": lambda result: result.most_running,
    "preemptions": lambda result: result.preemptions,
}
_TIMED = _COUNTED | {
    "output tokens per second": lambda result: result.output_tokens / _times(result).seconds,
    "median time to first token, s": _median_first_token,
}
"""Panels of a plot: a simulation has no times to draw."""


def plot(rows: Sequence[Row], path: Path) -> None:
    """Draws what was counted, and timed where a model computed, against concurrency.

    A panel in which all is zero is left out. Measurements that were cut short have hollow markers;
    one without a turn has none.
    """
    # Only here: it takes a second to import.
    from matplotlib.figure import Figure

    known = _TIMED if _are_timed(rows) else _SIMULATED
    panels = {
        title: value for title, value in known.items() if any(value(row.result) for row in rows)
    }
    columns = 2
    lines = -(-len(panels) // columns)
    figure = Figure(figsize=(11, 3.5 * lines), layout="constrained")
    places = list(figure.subplots(lines, columns, squeeze=False).flat)
    for axes in places[len(panels) :]:
        axes.remove()
    for axes, (title, value) in zip(places, panels.items(), strict=False):
        for kv_policy in POLICIES:
            results = [row.result for row in rows if row.kv_policy == kv_policy]
            agents = [result.concurrency for result in results]
            values = [value(result) for result in results]
            (line,) = axes.plot(agents, values, label=kv_policy)
            for result, height in zip(results, values, strict=True):
                axes.plot(
                    result.concurrency,
                    height,
                    marker="o",
                    color=line.get_color(),
                    fillstyle="none" if result.cut else "full",
                )
        axes.set(title=title, xlabel="agents", ylim=(0, None))
        axes.set_xticks(sorted({row.result.concurrency for row in rows}))
        axes.legend()
    figure.savefig(path)


def as_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The measurements as dicts; a simulation's have no times."""
    found = [dataclasses.asdict(row) for row in rows]
    for row in found:
        if row["result"]["times"] is None:
            del row["result"]["times"]
    return found


def main() -> None:
    """Runs the measurement."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--quick", action="store_true", help="two concurrencies, a few turns")
    kinds.add_argument("--simulate", action="store_true", help="the node, without a model: minutes")
    parser.add_argument("--json", type=Path, help="write all measurements here")
    parser.add_argument("--plot", type=Path, help="draw them here, as PNG, SVG or PDF")
    options = parser.parse_args()
    concurrency = CONCURRENCY
    if options.simulate:
        concurrency = CONCURRENCY[1::2]
        found = simulate(concurrency, 1, AGENTS)
    elif options.quick:
        concurrency = tuple(agents // _QUICK_PART for agents in CONCURRENCY[1::2])
        found = measure(concurrency, 3, SCALED, _QUICK_PART, 30.0)
    else:
        found = measure(concurrency, 8, SCALED, 1, 120.0)
    rows = list(show_progress(found, len(POLICIES) * len(concurrency), _describe))
    print(format_table(rows))
    if options.json:
        options.json.write_text(json.dumps(as_json(rows), indent=1))
    if options.plot:
        plot(rows, options.plot)


if __name__ == "__main__":
    main()
