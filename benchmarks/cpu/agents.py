"""Concurrent agents with long contexts on a small store, under each of the three KV policies.

The workload is that of software agents on 8x H200, scaled to a CPU:

* 13 turns a conversation. A first prompt of 74,160 tokens and later ones of 753 are both divided by
  64. Answers have 16 tokens, since a 64th of 220 is too few for turns to overlap.
* A model that selects 32 rows per token, as small a share of a context as GLM-5.3's 2,048.
* A device pool that holds as many contexts as that node's (a quarter with --quick), and host memory
  in the same proportion.

Each agent sends its next turn as soon as it has its answer. Measuring begins when every agent has
had its first one.

`resident` keeps all pages on the device and recomputes those it had to evict; `swap` moves whole
sequences to the host and back; `hybrid` reads the selected rows from either memory.

With --simulate no model runs: only the scheduler and the cache's bookkeeping do, with the unscaled
workload on the store of that node. That shows how many agents run at once and how much of their
prompts is found in the cache, but gives no times.

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
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from matplotlib.figure import Figure

POLICIES: tuple[KVPolicy, ...] = ("resident", "swap", "hybrid")
SCALED = dataclasses.replace(AGENTS.scaled(64), output_tokens=16)
NODE_DEVICES, NODE_DEVICE_TOKENS, NODE_HOST_BYTES = 8, 8 * 640_000, 1 << 40
"""Store of 8x H200: the fp8 rows that fit beside the FP8 weights, and pinned host memory."""

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
    """One measurement, a row of the table."""

    kv_policy: KVPolicy
    result: Result


def node_geometry(kv_policy: KVPolicy, workload: Workload, max_sequences: int) -> KVGeometry:
    """Returns the store of 8x H200 with GLM-5.3 in FP8 and rows in fp8."""
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
        # Index keys of host pages take device memory too.
        device_bytes = device_pages * one_page.device_bytes
        device_pages, host_pages = one_page.pages_within(device_bytes, NODE_HOST_BYTES)
    geometry = dataclasses.replace(one_page, device_pages=device_pages, host_pages=host_pages)
    if kv_policy != "hybrid":
        return geometry
    return dataclasses.replace(
        geometry,
        row_cache_rows=4 * config.index_topk // NODE_DEVICES,
        staging_pages=-(-one_page.max_pages_per_sequence // one_page.num_layers),
    )


def simulate(concurrency: Sequence[int], turns_each: int, workload: Workload) -> Iterator[Row]:
    """Runs the scheduler and the cache's bookkeeping on the node's store."""
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
    """Returns the options of an engine whose store holds `1 / part` of the node's contexts."""
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
        max_num_batched_tokens=256,  # enough not to limit how many of these short turns run
        device_pages=scaled(node.device_pages),
        kv_policy=kv_policy,
        host_memory_gib=host_bytes / 2**30 or None,
    )


def measure(
    concurrency: Sequence[int], turns_each: int, workload: Workload, part: int, max_seconds: float
) -> Iterator[Row]:
    """Runs the small model, one engine for each policy and an empty store for each measurement."""
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
                        max_seconds=max_seconds,
                    ),
                )
            compiled = engine.metrics().compilations
            if compiled:
                raise RuntimeError(f"{compiled} programs were compiled while agents waited")


def format_table(rows: Sequence[Row]) -> str:
    """Formats the measurements in Markdown, with times where a model ran."""
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
            str(result.max_running),
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
    """Formats the median and the 90th percentile, in milliseconds."""
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
    "running requests (maximum)": lambda result: result.max_running,
    "preemptions": lambda result: result.preemptions,
}
_TIMED = _COUNTED | {
    "output tokens per second": lambda result: result.output_tokens / _times(result).seconds,
    "median time to first token, s": _median_first_token,
}
"""Panels of a plot: a simulation has no times to draw."""

_STYLES: Mapping[KVPolicy, tuple[str, str]] = {
    "resident": ("#d55e00", ":"),
    "swap": ("#0072b2", "--"),
    "hybrid": ("#009e73", "-"),
}
"""Colour and line style of each policy, distinct in grey too."""


def plot(rows: Sequence[Row], path: Path) -> None:
    """Draws what was counted, and timed where a model ran, against the number of agents.

    A panel of zeros is left out. Measurements cut short by the time limit have hollow markers; one
    without a turn has none. An SVG holds text as text, and its bytes follow from `rows` alone.
    """
    # Only here, since importing it takes a second.
    import matplotlib

    with matplotlib.rc_context(
        {"svg.fonttype": "none", "svg.hashsalt": "agents", "font.sans-serif": ["DejaVu Sans"]}
    ):
        _draw(rows).savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _draw(rows: Sequence[Row]) -> "Figure":
    from matplotlib.figure import Figure

    known = _TIMED if _are_timed(rows) else _SIMULATED
    panels = {
        title: value for title, value in known.items() if any(value(row.result) for row in rows)
    }
    lines = -(-len(panels) // 2)
    figure = Figure(figsize=(8, 2.7 * lines + 0.4), layout="constrained")
    grid = list(figure.subplots(lines, 2, squeeze=False).flat)
    for axes in grid[len(panels) :]:
        axes.remove()
    for axes, (title, value) in zip(grid, panels.items(), strict=False):
        for kv_policy, (color, style) in _STYLES.items():
            results = [row.result for row in rows if row.kv_policy == kv_policy]
            agents = [result.concurrency for result in results]
            values = [value(result) for result in results]
            axes.plot(agents, values, color=color, linestyle=style, label=kv_policy)
            for result, height in zip(results, values, strict=True):
                fill = "none" if result.cut else "full"
                axes.plot(result.concurrency, height, marker="o", color=color, fillstyle=fill)
        axes.set_title(title, fontsize="medium")
        axes.set(xlabel="concurrent agents", ylim=(0, None))
        axes.set_xticks(sorted({row.result.concurrency for row in rows}))
        axes.grid(alpha=0.3)
    handles, labels = grid[0].get_legend_handles_labels()
    figure.legend(handles, labels, title="kv_policy", loc="outside upper center", ncols=3)
    return figure


def as_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Returns the measurements as dicts; those of a simulation have no times."""
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
    kinds.add_argument(
        "--quick", action="store_true", help="a quarter of the store and of the agents, fewer turns"
    )
    kinds.add_argument(
        "--simulate", action="store_true", help="the whole node, without a model; takes minutes"
    )
    parser.add_argument("--json", type=Path, help="write all measurements here")
    parser.add_argument("--plot", type=Path, help="draw them here, as PNG, SVG or PDF")
    options = parser.parse_args()
    concurrency = CONCURRENCY
    if options.simulate:
        concurrency = CONCURRENCY[1::2]
        found = simulate(concurrency, 1, AGENTS)
    elif options.quick:
        concurrency = tuple(agents // _QUICK_PART for agents in CONCURRENCY)
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
