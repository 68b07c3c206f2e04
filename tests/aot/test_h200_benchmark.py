"""The programs that benchmarks/h200/kernels.py times, as it compiles them on a GPU."""

import dataclasses

import jax
import numpy as np
import pytest

from benchmarks.h200.operations import OPERATIONS
from benchmarks.h200.programs import Body, Large, Machine, Operand, Operands, program
from benchmarks.h200.staging import GLM_PRODUCT, overlap_bodies
from scripts.aot.aot import CompileReport, compile_for_h200
from scripts.aot.hlo_program import HloProgram

pytestmark = pytest.mark.slow
CALLS = 2
KERNELS = {"select_topk": 2}
"""Kernels that a call launches, where it is more than one."""
BESIDE_XLA = ("resolve_rows",)
"""Operations with state of which XLA does a part."""


def compiled(body: Body, calls: list[Operands], machine: Machine | None = None) -> CompileReport:
    """A program of several calls, on one H200 if not on another machine."""
    machine = machine or Machine.with_kernels(jax.devices()[0])

    def shapes(operands: Operands) -> tuple[jax.ShapeDtypeStruct, ...]:
        return tuple(map(shape, operands))

    def shape(operand: Operand) -> jax.ShapeDtypeStruct:
        array = operand.array if isinstance(operand, Large) else operand
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=machine.memory(operand))

    state = shapes(body.state)
    lists = tuple(map(shapes, calls))
    zero = shape(np.zeros((), np.int32))
    report = compile_for_h200(
        program(machine, body),
        (state, shapes(body.kept), lists, zero),
        compiler_options=body.compiler_options,
    )
    assert all(kernel.spilled_bytes == 0 for kernel in report.kernels)
    assert report.aliased_bytes == sum(array.size * array.dtype.itemsize for array in state)
    return report


@pytest.mark.parametrize("name", OPERATIONS)
def test_timed_calls(name: str) -> None:
    """A call that XLA leaves out since nothing tells it from another, a slab that is copied: times
    of something else; a program that no longer compiles."""
    operation, rng = OPERATIONS[name], np.random.default_rng(0)
    spec = operation.specs[operation.timed[-1]]
    calls = [operation.lists(spec, rng, True) for _ in range(CALLS)]
    body = operation.body(spec, "mosaic_gpu")
    report = compiled(body, calls)
    # What lies in host memory is used there.
    large = [each for each in (*body.state, *body.kept) if isinstance(each, Large)]
    assert len(report.host_parameters) == sum(each.in_host for each in large)
    assert report.loops == ()
    (kernel,) = {kernel.name for kernel in report.kernels}
    assert report.launch_counts[kernel] == CALLS * KERNELS.get(name, 1)
    if body.state and name not in BESIDE_XLA:
        assert report.launch_counts == {name: CALLS}
        assert report.copies == []
        assert report.temp_bytes == 0


def test_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Staging that is not started apart from the product, and a slab that is copied for it."""
    programs: list[HloProgram] = []
    parse = HloProgram.parse

    def kept(text: str) -> HloProgram:
        programs.append(parse(text))
        return programs[-1]

    monkeypatch.setattr(HloProgram, "parse", kept)
    operation, rng = OPERATIONS["stage_rows"], np.random.default_rng(0)
    (name,) = operation.timed
    calls = [operation.lists(operation.specs[name], rng, True) for _ in range(CALLS)]
    staging, product, *both = (
        compiled(body, calls)
        for body in overlap_bodies(Machine.with_kernels(jax.devices()[0]), name, GLM_PRODUCT)
    )
    assert staging.launch_counts == {"stage_rows": CALLS}
    assert product.launch_counts == {"fusion": CALLS}
    for report in both:
        assert report.launch_counts == {"stage_rows": CALLS, "fusion": CALLS}
        assert report.copies == []
    apart = [
        sum(each.opcode == "call-start" for each in program.computations[program.entry])
        for program in programs
    ]
    assert apart == [0, 0, 0, CALLS]


def test_values_at_true_sizes() -> None:
    """A slab that cannot be filled in host memory, or a reference that XLA does not compile where
    device memory stands in for it."""
    operation, rng = OPERATIONS["stage_rows"], np.random.default_rng(0)
    spec = operation.specs[operation.timed[0]]
    machine = Machine.with_kernels(jax.devices()[0])
    (host,) = operation.kept(spec)
    assert isinstance(host, Large)
    num_bytes = host.array.size * host.array.dtype.itemsize
    filled = compile_for_h200(machine.filling(host), ())
    assert filled.host.output_bytes == num_bytes
    on_device = dataclasses.replace(machine, implementation="reference", host=None)
    body = operation.body(spec, on_device.implementation)
    report = compiled(body, [operation.lists(spec, rng, True)], on_device)
    assert report.host_parameters == ()
    assert report.kernels == ()
    assert report.device.argument_bytes > num_bytes
