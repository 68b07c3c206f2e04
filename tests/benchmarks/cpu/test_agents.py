"""Benchmark of agents: its counts and plots, and the policies without a model."""

import dataclasses
import math
import sys
from pathlib import Path

import pytest

from benchmarks.common.progress import show_progress
from benchmarks.cpu import agents
from benchmarks.cpu.agent_servers import EngineServer, SimulatedServer
from benchmarks.cpu.agent_workload import (
    AGENTS,
    Answer,
    AnswerTimes,
    Result,
    Times,
    Workload,
    run_agents,
)
from kvcache import KVGeometry
from pallas_kernels.common.row_format import RowFormat
from serving.options.engine_options import KVPolicy
from serving.requests.request import Request
from tests.helpers.terminal import terminal

PAGE = 64
WORKLOAD = Workload(turns=13, first_tokens=1280, later_tokens=12, output_tokens=16)
DEVICE_CONTEXTS, HOST_CONTEXTS = 7.4, 31  # an eighth of the node's
ROW = RowFormat("float32", 1, 0, 1.0)


def simulate(kv_policy: KVPolicy, concurrency: int, turns_each: int = 4) -> Result:
    pages = -(-WORKLOAD.context_tokens // PAGE)
    host = kv_policy != "resident"
    geometry = KVGeometry(
        group_layers=(1,),
        device_pages=round(DEVICE_CONTEXTS * pages),
        host_pages=round(HOST_CONTEXTS * pages) * host,
        num_devices=1,
        rows_per_device=PAGE,
        max_sequences=64,
        max_pages_per_sequence=pages,
        row_format=ROW,
        index_row_format=ROW,
        row_cache_rows=2 * PAGE if kv_policy == "hybrid" else 0,
        staging_pages=int(kv_policy == "hybrid"),
    )
    server = SimulatedServer(geometry, max_num_batched_tokens=128)
    result = run_agents(
        server,
        WORKLOAD,
        concurrency=concurrency,
        turns=turns_each * concurrency,
        vocab_size=1 << 16,
    )
    server.cache.check_integrity()
    assert result.turns >= turns_each * concurrency and not result.cut
    return result


def test_many_agents_on_a_small_device() -> None:
    """Agents that wait for the device although the host has room for their rows, or recompute
    cached rows."""
    results = {kv_policy: simulate(kv_policy, 36) for kv_policy in agents.POLICIES}
    for kv_policy in ("resident", "swap"):
        assert results["hybrid"].running >= 4 * results[kv_policy].running
    assert results["hybrid"].reuse >= 0.9
    assert results["resident"].reuse < 0.5


def test_agents_that_just_outnumber_both_tiers() -> None:
    """A cliff: turns that come round just after all of their pages were evicted."""
    contexts = DEVICE_CONTEXTS + HOST_CONTEXTS
    result = simulate("hybrid", int(1.15 * contexts), turns_each=8)
    assert result.reuse > 0.8


class Scripted:
    """A server that answers each turn after two steps and finds a fixed part of it cached."""

    num_running, preemptions = 3, 0

    def __init__(self) -> None:
        self.prompts: dict[int, list[list[int]]] = {}
        self._waiting: list[tuple[int, int]] = []
        self._steps = 0

    def submit(self, agent: int, token_ids: list[int], output_tokens: int) -> None:
        self.prompts.setdefault(agent, []).append(token_ids)
        self._waiting.append((agent, self._steps + 2))

    def step(self) -> list[Answer]:
        self._steps += 1
        due = [agent for agent, step in self._waiting if step <= self._steps]
        self._waiting = [entry for entry in self._waiting if entry[1] > self._steps]
        return [Answer(agent, [7, 8], 10, AnswerTimes(1.0, 3.0)) for agent in due]


def test_what_agents_say() -> None:
    """A turn without the one before it, a conversation that is too long, or a reuse that counts
    tokens that nothing could have cached."""
    server = Scripted()
    workload = Workload(turns=3, first_tokens=20, later_tokens=4, output_tokens=2)
    result = run_agents(server, workload, concurrency=2, turns=8, vocab_size=100)
    first, second, third, anew, *_ = server.prompts[0]
    assert [len(first), len(second), len(third), len(anew)] == [20, 26, 32, 20]
    assert second[:22] == [*first, 7, 8] and third[:26] == second
    assert anew != first
    assert workload.context_tokens == len(third) + 2
    # Of each agent's four turns that count: 10 of 21, of 27, and of 21 tokens, and 0 of 0.
    assert result.turns == 8
    assert result.reuse == pytest.approx(30 / 69)
    assert result.times is not None
    assert result.times.token_seconds == [3.0] * 8
    assert result.times.first_token_seconds == [1.0] * 8


def report_rows(times: Times | None) -> list[agents.Row]:
    return [
        agents.Row(
            kv_policy,
            Result(
                concurrency=concurrency,
                turns=10,
                output_tokens=40,
                times=times,
                running=running,
                max_running=9,
                reuse=0.5,
                preemptions=4,
                cut=concurrency > 4,
            ),
        )
        for kv_policy, running in zip(agents.POLICIES, (2.0, 3.0, 8.0), strict=True)
        for concurrency in (4, 8)
    ]


def drawn(rows: list[agents.Row], path: Path, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Titles of the panels, each with a line per policy and a marker per measurement."""
    figures = []
    monkeypatch.setattr(
        "matplotlib.figure.Figure.savefig", lambda self, *_, **__: figures.append(self)
    )
    agents.plot(rows, path)
    (figure,) = figures
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == list(agents.POLICIES)
    for axes in figure.axes:
        assert axes.get_xlabel()
        assert len(axes.get_lines()) == len(agents.POLICIES) + len(rows)
        hollow = [line.get_fillstyle() for line in axes.get_lines() if line.get_marker() == "o"]
        assert hollow.count("none") == sum(row.result.cut for row in rows)
        assert list(axes.get_xticks()) == [4, 8]
    return {axes.get_title() for axes in figure.axes}


COUNTED = {"running requests (mean)", "prompt tokens found in the cache, %"}


def test_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table or plot that does not show the measurements."""
    times = Times(seconds=2.0, first_token_seconds=[0.1, 0.3, 0.2], token_seconds=[0.01, 0.02])
    rows = report_rows(times)
    lines = agents.format_table(rows).splitlines()
    assert len(lines) == 2 + len(rows)
    assert lines[2].startswith("| resident | 4 | 2 | 9 | 50.0% | 4 | 10 | 20 | 200 (")
    assert "| 10 (cut) |" in lines[3]
    panels = drawn(rows, tmp_path / "plot.svg", monkeypatch)
    assert panels == COUNTED | {"output tokens per second", "median time to first token, s"}


def test_svg(tmp_path: Path) -> None:
    """A figure that differs between runs on the same rows, or whose text is drawn as curves."""
    rows = report_rows(Times(seconds=2.0, first_token_seconds=[0.1], token_seconds=[0.01]))
    first, second = tmp_path / "first.svg", tmp_path / "second.svg"
    agents.plot(rows, first)
    agents.plot(rows, second)
    assert first.read_bytes() == second.read_bytes()
    assert "concurrent agents" in first.read_text()


def test_report_of_a_simulation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Times of a simulation, which has none, in the table, the file or the plot."""
    result = simulate("hybrid", 2, turns_each=1)
    assert result.times is None
    rows = report_rows(None)
    assert "| preemptions |" in agents.format_table(rows)
    head, _, first, *_ = agents.format_table(rows).splitlines()
    assert head.count("|") == first.count("|") == 8
    assert "ms" not in head and "tokens/s" not in head
    assert "seconds" not in str(agents.as_json(rows))
    panels = drawn(rows, tmp_path / "plot.svg", monkeypatch)
    assert panels == COUNTED | {"running requests (maximum)", "preemptions"}
    calm = [
        dataclasses.replace(row, result=dataclasses.replace(row.result, preemptions=0))
        for row in rows
    ]
    assert drawn(calm, tmp_path / "plot.svg", monkeypatch) == panels - {"preemptions"}
    with pytest.raises(ValueError, match="a simulation has no times"):
        agents._TIMED["output tokens per second"](result)


def test_progress(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """Minutes without a sign of progress: no bar on a terminal, or no line per run elsewhere."""
    assert list(show_progress(iter("ab"), 2, str.upper)) == ["a", "b"]
    assert capsys.readouterr() == ("", "1 of 2: A\n2 of 2: B\n")
    with terminal(80) as shown:
        monkeypatch.setattr(sys, "stderr", shown.stream)
        assert list(show_progress(iter("ab"), 2, str.upper)) == ["a", "b"]
        assert "2/2" in shown.read() and "A" not in shown.text


def test_no_turn_in_time() -> None:
    """A time of zero where there was none."""
    rows = report_rows(Times(seconds=2.0, first_token_seconds=[], token_seconds=[]))
    assert math.isnan(agents._TIMED["median time to first token, s"](rows[0].result))
    assert "| - | - |" in agents.format_table(rows)


def test_the_node() -> None:
    """A store that is not that of 8x H200, or contexts scaled in another proportion to it."""
    node = agents.node_geometry("hybrid", AGENTS, 8)
    assert node.rows_per_page == 512
    resident = agents.node_geometry("resident", AGENTS, 8)
    assert node.device_bytes == pytest.approx(resident.device_bytes, rel=0.01)
    assert 30e9 < resident.device_bytes / 8 < 40e9
    assert node.host_bytes == pytest.approx(1 << 40, rel=0.001)
    assert AGENTS.context_tokens == 74_160 + 12 * 753 + 13 * 220
    scaled = AGENTS.scaled(64)
    assert (scaled.first_tokens, scaled.later_tokens, scaled.output_tokens) == (1159, 12, 4)


def test_requests_of_an_earlier_run() -> None:
    """A run that fails on a request left over from the one before."""

    class LeftEngine:
        def step(self) -> list[Request]:
            return [Request("left", None, [])]

    assert EngineServer(LeftEngine()).step() == []  # pyright: ignore[reportArgumentType]
