"""Script that checks the kernels on an H200, run on a CPU without measuring time."""

import dataclasses
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.h200 import kernels
from benchmarks.h200.kernels import Outcome, first_difference, format_outcomes, main
from benchmarks.h200.operations import OPERATIONS
from benchmarks.h200.programs import (
    Call,
    Chain,
    Large,
    Machine,
    Operation,
    Samples,
    Work,
    scattered_bits,
)
from benchmarks.h200.staging import Overlap
from pallas_kernels.common.implementation import Implementation
from tests.helpers.bits import assert_same_bits

pytestmark = pytest.mark.compiles


def dry_run(file: Path, capsys: pytest.CaptureFixture[str], *operations: str) -> None:
    """Runs the script to its end and checks everything it prints."""
    names = operations or tuple(OPERATIONS)
    arguments = ["--dry-run", "--operations", ",".join(names), "--output", str(file)]
    assert main(arguments) == 0
    output, result = capsys.readouterr().out, json.loads(file.read_text())
    assert "RACE DETECTED" not in output
    assert (result["dry_run"], result["errors"]) == (True, [])
    assert {each["operation"] for each in result["operations"]} == set(names)
    for each in result["operations"]:
        assert f"{each['operation']} of {each['spec']}: right" in output
        assert (each["error"], each["seconds"]) == (None, None)
        assert each["bound"] > 0
    assert [each["rows"] for each in result["staging"]] == [0, 1, 2]
    assert {each["seconds"] for each in result["staging"]} == {None}
    assert set(result["overlap"].values()) == {None}
    # A time and a share of each operation, a time and a rate of each number of rows.
    unknown = 2 * len(result["operations"]) + 2 * 3 + 4 + 2
    assert output.count("not measured") == unknown
    assert "%" not in output


def test_dry_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A script that would fail on a GPU for a reason unrelated to it, or that invents numbers."""
    dry_run(tmp_path / "result.json", capsys, "stage_rows")


@pytest.mark.slow
def test_every_operation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operation that is left out, or whose operands or results do not fit."""
    cpu = Machine.cpu
    monkeypatch.setattr(Machine, "cpu", lambda implementation: cpu("reference"))
    dry_run(tmp_path / "result.json", capsys)


@pytest.mark.slow
def test_whole_dry_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As above, with kernels."""
    dry_run(tmp_path / "result.json", capsys)


def planted(operation: Operation, fault: type[Exception] | None) -> Operation:
    """An operation whose kernel fails, or gets one value wrong."""

    def call(spec: object, implementation: Implementation) -> Call:
        right = operation.call(spec, implementation)

        def wrong(*arrays: jax.Array) -> tuple[jax.Array, ...]:
            if fault:
                raise fault("a kernel that does not compile")
            (slab,) = right(*arrays)
            return (slab.at[1, 2, 3, 4].add(1),)

        return right if implementation == "reference" else wrong

    return dataclasses.replace(operation, call=call)


def test_faults_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong value that is not noticed, or a failure that ends the run."""
    file, names = tmp_path / "result.json", ("copy_pages", "append_rows", "merge_topk")
    for name, fault in zip(names, (RuntimeError, None), strict=False):
        monkeypatch.setitem(OPERATIONS, name, planted(OPERATIONS[name], fault))
    assert main(["--dry-run", "--operations", ",".join(names), "--output", str(file)]) == 1
    output = capsys.readouterr().out
    errors = [
        "copy_pages of odd_keys_fp8: RuntimeError: a kernel that does not compile",
        "append_rows of odd_fp8: result 0 differs first at [1, 2, 3, 4]: ",
    ]
    found = json.loads(file.read_text())["errors"]
    assert len(found) == 2
    for error, text in zip(found, errors, strict=True):
        assert error.startswith(text)
        assert f"error: {error}\n" in output
    assert "merge_topk of odd_short: right" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no GPU: jax runs on 'cpu'"),
        (["--dry-run", "--operations", "stage_rows,sort"], r"\['sort'\] are none of"),
        (["--dry-run", "--repeats", "0"], "--repeats must be at least 1, got 0"),
    ],
)
def test_refusals(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Kernels that run without a GPU as if on one."""
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize("large_bytes", [1, 1 << 20])
def test_first_difference(large_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Differences in a sign or a NaN, at another index than reported; rounding, infinities."""
    monkeypatch.setattr(kernels, "_LARGE_BYTES", large_bytes)
    expected = np.arange(100, dtype=np.float32).reshape(20, 5)

    def compare(found: np.ndarray, expected: np.ndarray) -> str | None:
        return first_difference(jnp.asarray(found), jnp.asarray(expected))

    assert compare(expected.copy(), expected) is None
    found = expected.copy()
    found[13, 2], found[17, 0] = -1, -2
    assert compare(found, expected) == "differs first at [13, 2]: -1.0, not 67.0"
    zeros = np.zeros(3, np.float32)
    assert compare(np.array([0, 0, -0.0], np.float32), zeros) is not None
    assert compare(zeros[:2], zeros) == "is float32(2,), not float32(3,)"
    tolerance = np.full((20, 5), 1e-3)
    assert first_difference(expected + np.float32(5e-4), expected, tolerance) is None
    for wrong in (np.nan, -np.inf, 99.002):
        found = expected.copy()
        found[19, 4] = wrong
        assert str(first_difference(found, expected, tolerance)).startswith(
            "differs first at [19, 4]"
        )
    expected[3] = -np.inf
    assert first_difference(expected.copy(), expected, tolerance) is None
    assert first_difference(np.zeros_like(expected), expected, tolerance) is not None


@pytest.mark.parametrize("name", ["stage_rows", "offload_pages", "select_topk", "index_scores"])
def test_calls_in_one_program(name: str) -> None:
    """A call that is lost, or changed by its dependency on the one before."""
    operation, rng = OPERATIONS[name], np.random.default_rng(0)
    spec, machine = operation.specs[operation.rehearsed[0]], Machine.cpu("reference")
    calls = [operation.lists(spec, rng, full) for full in (False, True, False)]
    together, alone = (Chain(machine, operation.body(spec, "reference")) for _ in range(2))
    found = together.run(together.place(calls))
    expected = [alone.run(alone.place([lists]))[0] for lists in calls]
    for some, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert_same_bits(some, other)
    for some, other in zip(together.state, alone.state, strict=True):
        assert_same_bits(some, other)


def test_scattered_bits() -> None:
    """Rows, layers or pages that are alike, so that one may be taken for another."""
    machine = Machine.cpu("reference")
    for dtype in (jnp.int32, jnp.bfloat16):
        large = Large(jax.ShapeDtypeStruct((20, 8, 7, 24), dtype), scattered_bits)
        rows = np.asarray(machine.place(large)).view(np.uint8).reshape(20 * 8 * 7, -1)
        assert len(np.unique(rows, axis=0)) == len(rows)


def test_arithmetic() -> None:
    """Means, a launch that is counted, a bound that does not bind, time that is hidden twice."""
    samples = Samples(4, one=[5.0, 1.0, 90.0], many=[13.0, 12.0, 90.0])
    assert samples.seconds == 2.0
    assert Samples(4, [], []).seconds is None
    assert Work(50_000, 43_000, 7800).bound == (1e-6, "host link, 50 GB/s")
    assert Work(50_000, 43_000_000, 7800).bound == (1e-5, "device memory, 4.3 TB/s")
    assert Work(50_000, 43_000, 78 * 10**9).bound == (1e-4, "tensor cores, 780 TFLOP/s")
    overlap = Overlap(2.0, 4.0, 6.0, 4.5)
    assert (overlap.hidden(overlap.one_stream), overlap.hidden(overlap.two_streams)) == (0, 0.75)
    outcome = Outcome("merge_topk", "glm_1m", None, 1e-6, "device memory, 4.3 TB/s", 4e-6)
    checked = Outcome("merge_topk", "odd_short")
    assert format_outcomes([checked, outcome]).splitlines()[2:] == [
        "| `merge_topk` | glm_1m | 4.0 | 1.0 | 25% | device memory, 4.3 TB/s |"
    ]
