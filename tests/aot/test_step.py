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
    assert report.device.temp_bytes < 256 << 20
    assert report.rematerialized == ()


def test_copies(compiled: tuple[DecodeStep, CompileReport]) -> None:
    """Activations that are copied or change their layout, but for attention's, which is no kernel
    yet: two loops over layers turn what it gives by device, and its loop fills a copy of zeros."""
    _, report = compiled
    turned = [copy for copy in report.copies if " transpose(" in copy]
    assert len(turned) <= 2
    assert all("f32[8,1,32,8,512]" in copy and "/attend/" in copy for copy in turned)
    others = [copy for copy in report.copies if copy not in turned]
    assert len(others) <= 1
    assert all(" = f32[32,64,512]" in copy and " copy(" in copy for copy in others)


def test_nothing_is_read_back(compiled: tuple[DecodeStep, CompileReport]) -> None:
    """A loop or branch that waits until the host has read its condition.

    Experts, which are no kernel yet, loop over the tiles that hold a token.
    """
    _, report = compiled
    assert report.branches == ()
    waiting = loops_read_back(report)
    assert waiting
    assert all("/experts/" in loop.origin for loop in waiting)


def test_launches_by_part(compiled: tuple[DecodeStep, CompileReport]) -> None:
    """A launch that is counted twice, or under another part of a layer than it is from."""
    _, report = compiled
    parts = launches_by_part(report)
    assert sum(kinds.total() for kinds in parts.values()) == report.launches
    assert parts["append"]["append_rows"] == report.launch_counts["append_rows"]
    assert parts["select"]["index_scores"] == parts["resolve"]["resolve_rows"] == 2
    # Two layers select. Nothing is sorted or waits for a loop.
    assert parts["select"].total() + parts["resolve"].total() <= 2 * 28
    assert "sort" not in parts["select"]
    assert parts["output"]["all-to-all"] == report.launch_counts["all-to-all"]


def test_kernels(compiled: tuple[DecodeStep, CompileReport]) -> None:
    """An operation on the store that is not its kernel, or a kernel that spills."""
    _, report = compiled
    writing = "append_rows fetch_rows stage_pages stage_rows"
    names = f"{writing} index_scores merge_topk resolve_rows select_topk"
    assert {kernel.name for kernel in report.kernels} == set(names.split())
    assert all(kernel.spilled_bytes == 0 for kernel in report.kernels)
    # Four layers attend, two of which select; 32 rows are attended to one by one.
    assert report.launch_counts["fetch_rows"] == 4 * 32
    assert report.launch_counts["stage_rows"] == report.launch_counts["index_scores"] == 2
