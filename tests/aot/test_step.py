"""The decode step of a GLM-5.3 with few layers, compiled for eight H200s."""

import pytest

from benchmarks.h200.compiled_step import (
    DecodeStep,
    copies_of_arguments,
    decode_step,
    glm_config,
    launches_by_part,
    loops_read_back,
    node_geometry,
)
from scripts.aot.aot import CompileReport


@pytest.fixture(scope="module")
def compiled() -> tuple[DecodeStep, CompileReport]:
    config = glm_config(whole=False)
    step = decode_step(config, node_geometry(config, 8, with_mtp=False), 8, 4)
    return step, step.compile()


def test_in_place(compiled: tuple[DecodeStep, CompileReport]) -> None:
    """A store or sequences that are not updated in place, or host memory that is copied."""
    step, report = compiled
    assert report.aliased_bytes == step.state_bytes
    assert report.host.aliased_bytes == report.host.argument_bytes > 1 << 30
    assert report.host.temp_bytes == 0
    assert report.host_parameters == ("store.host.slab",)
    assert copies_of_arguments(step, report) == []
    assert report.device.temp_bytes < 32 << 20
    assert report.rematerialized == ()


def test_copies(compiled: tuple[DecodeStep, CompileReport]) -> None:
    """Activations that are copied or change their layout."""
    _, report = compiled
    assert report.copies == []


def test_nothing_is_read_back(compiled: tuple[DecodeStep, CompileReport]) -> None:
    """A loop or branch that waits until the host has read its condition."""
    _, report = compiled
    assert report.branches == ()
    assert loops_read_back(report) == []


def test_launches_by_part(compiled: tuple[DecodeStep, CompileReport]) -> None:
    """A launch that is counted twice, or under another part of a layer than it is from."""
    _, report = compiled
    parts = launches_by_part(report)
    assert sum(kinds.total() for kinds in parts.values()) == report.launches
    assert parts["append"]["append_rows"] == report.launch_counts["append_rows"]
    assert parts["select"]["index_scores"] == parts["resolve"]["resolve_rows"] == 2
    assert "sort" not in parts["select"]
    assert parts["output"]["all-to-all"] == report.launch_counts["all-to-all"]


def test_launches(compiled: tuple[DecodeStep, CompileReport]) -> None:
    """A part of a layer that takes more launches than it did; rows that are computed one by one."""
    _, report = compiled
    parts = {part: kinds.total() for part, kinds in launches_by_part(report).items()}
    # Two full layers and two shared ones, of which two have experts.
    bounds = {
        "project": 64,
        "append": 8,
        "select": 18,
        "resolve": 40,
        "attend": 10,
        "output": 28,
        "experts": 20,
        "dense": 10,
        "other": 46,
    }
    assert {part: count for part, count in parts.items() if count > bounds[part]} == {}


def test_kernels(compiled: tuple[DecodeStep, CompileReport]) -> None:
    """An operation that is not its kernel, or a kernel that spills."""
    _, report = compiled
    names = (
        "append_rows index_scores matmul merge_topk per_head_matmul resolve_rows rms_norm"
        " select_topk sparse_attention stage_pages stage_rows"
    )
    experts = {f"experts_{part}" for part in ("route", "tiles", "gate_up", "down", "combine")}
    assert {kernel.name for kernel in report.kernels} == {*names.split(), *experts}
    assert all(kernel.spilled_bytes == 0 for kernel in report.kernels)
    # Four layers attend, two of which select.
    assert report.launch_counts["sparse_attention"] == 4
    assert report.launch_counts["stage_rows"] == report.launch_counts["index_scores"] == 2
