"""Correctness and speed of the kernels on an H200, in less than three minutes.

The kernel of each operation is compared with its reference on small odd shapes and at the true
shapes of GLM-5.3 on one device of eight, where it is then timed. Bits must be equal; `index_scores`
may differ by the error bound it states. References run on the CPU. Those of slabs of gigabytes run
on the GPU, whose memory stands in for the host's, since XLA would not gather from host memory.

The time of a call is on the device, without the launch from Python (see `programs.py`). It is
compared with the time of its bytes and products at 50 GB/s over the host link, 4.3 TB/s in device
memory and 780 TFLOP/s. Then staging is timed by number of rows, and beside a matrix product in the
same program.

Exits with 1 if a value is wrong or an operation fails, after running all others. With --dry-run
everything runs on a CPU, on small shapes and in Pallas' interpreter, and nothing is timed.

usage: python benchmarks/h200/kernels.py [--dry-run] [--operations NAME,...] [--repeats N]
           [--output FILE]
"""

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import SingleDeviceSharding

from benchmarks.h200.operations import OPERATIONS
from benchmarks.h200.programs import Chain, Large, Machine, Operation, measure
from benchmarks.h200.staging import (
    GLM_PRODUCT,
    SMALL_PRODUCT,
    Overlap,
    Staging,
    measure_overlap,
    measure_staging,
)

NOT_MEASURED = "not measured"
_LARGE_BYTES = 256 << 20  # arrays of this size are compared on the device
_MAX_CPU_BYTES = 4 << 30  # of large operands, for a reference on the CPU


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Result of an operation on one of its specs.

    Attributes:
        operation: name of the operation.
        spec: name of the spec.
        error: description of the error, None if there is none.
        bound: minimum seconds of a call, None where the spec is not timed.
        bound_by: resource that limits it.
        seconds: median seconds of a call, None where it was not measured.
    """

    operation: str
    spec: str
    error: str | None = None
    bound: float | None = None
    bound_by: str | None = None
    seconds: float | None = None


def first_difference(
    found: jax.Array | np.ndarray,
    expected: jax.Array | np.ndarray,
    tolerance: np.ndarray | None = None,
) -> str | None:
    """Describes the first index at which arrays differ by a bit, or by more than the tolerance."""
    if (found.shape, found.dtype) != (expected.shape, expected.dtype):
        return f"is {found.dtype}{found.shape}, not {expected.dtype}{expected.shape}"
    start = 0
    if isinstance(found, jax.Array) and tolerance is None and found.nbytes >= _LARGE_BYTES:
        # Only parts that differ are copied to the CPU.
        on_device = SingleDeviceSharding(*found.sharding.device_set)
        found, expected = (jax.device_put(each, on_device) for each in (found, expected))
        wrong = np.asarray(_parts_that_differ(found, expected))
        if not wrong.any():
            return None
        start = int(np.argmax(wrong))
        found, expected = found[start : start + 1], expected[start : start + 1]
    found, expected = np.asarray(found), np.asarray(expected)
    some, other = np.atleast_1d(found, expected)
    if tolerance is None:
        bits = f"u{found.itemsize}"
        wrong = np.ascontiguousarray(some).view(bits) != np.ascontiguousarray(other).view(bits)
    else:
        wrong = _differ(some, other, np.atleast_1d(tolerance))
    if not wrong.any():
        return None
    index = tuple(int(axis) for axis in np.argwhere(wrong)[0])
    where = [start + index[0], *index[1:]] if found.ndim else []
    return f"differs first at {where}: {some[index]}, not {other[index]}"


@jax.jit
def _parts_that_differ(found: jax.Array, expected: jax.Array) -> jax.Array:
    """Returns, along the first axis, whether any bit differs."""
    bits = f"uint{8 * found.dtype.itemsize}"
    found, expected = (lax.bitcast_convert_type(each, bits) for each in (found, expected))
    return jnp.any(found != expected, axis=range(1, found.ndim))


def _differ(found: np.ndarray, expected: np.ndarray, tolerance: np.ndarray) -> np.ndarray:
    """Returns where arrays differ; infinities must be equal."""
    finite = np.isfinite(found) & np.isfinite(expected)
    error = np.abs(np.where(finite, found, 0) - np.where(finite, expected, 0))
    return np.where(finite, error > tolerance, found != expected)


class Case:
    """Operation on one of its specs.

    Args:
        machine: where its program runs.
        operation: the operation.
        spec: name of the spec.
        full: whether its lists are full.
    """

    def __init__(self, machine: Machine, operation: Operation, spec: str, full: bool) -> None:
        self._machine, self._operation = machine, operation
        self._spec = operation.specs[spec]
        rng = np.random.default_rng(0)
        number = 1 + machine.extra_calls if full else 1
        self._lists = [operation.lists(self._spec, rng, full) for _ in range(number)]
        self._chain = Chain(machine, operation.body(self._spec, machine.implementation))

    def check(self) -> str | None:
        """Runs a call and its reference; describes where their results differ, None if nowhere."""
        found = self._results(self._chain)
        reference = self._reference()
        body = self._operation.body(self._spec, reference.implementation)
        expected = self._results(Chain(reference, body))
        tolerance = None
        if self._operation.tolerance:
            kept = map(reference.keep, body.kept)
            operands = map(np.asarray, (*kept, *self._lists[0]))
            tolerance = self._operation.tolerance(self._spec, *operands)
        for number, (some, other) in enumerate(zip(found, expected, strict=True)):
            if difference := first_difference(some, other, tolerance):
                return f"result {number} {difference}"
        return None

    def _reference(self) -> Machine:
        """Returns the CPU, or the device where its memory stands in for a large slab of the
        host's."""
        large = [each.array for each in self._chain.operands if isinstance(each, Large)]
        if sum(array.size * array.dtype.itemsize for array in large) <= _MAX_CPU_BYTES:
            return Machine.cpu("reference")
        return dataclasses.replace(self._machine, implementation="reference", host=None)

    def _results(self, chain: Chain) -> tuple[Any, ...]:
        (returned,) = chain.run(chain.place(self._lists[:1]))
        return self._operation.comparable((*chain.state, *returned))

    def time(self) -> float | None:
        """Times a call and returns its median seconds."""
        (samples,) = measure(self._machine, [(self._chain, self._lists)])
        return samples.seconds


def examine(machine: Machine, operation: str, spec: str, timed: bool) -> Outcome:
    """Checks an operation on a spec, and times it if it is right."""
    entry, outcome, error = OPERATIONS[operation], Outcome(operation, spec), None
    try:
        if timed:
            bound, bound_by = entry.work(entry.specs[spec]).bound
            outcome = dataclasses.replace(outcome, bound=bound, bound_by=bound_by)
        case = Case(machine, entry, spec, full=timed)
        error = case.check()
        if timed and not error:
            outcome = dataclasses.replace(outcome, seconds=case.time())
    except Exception as failure:
        # The others are run even if one fails.
        error = f"{type(failure).__name__}: {failure}"
    outcome = dataclasses.replace(outcome, error=error)
    print(f"{operation} of {spec}: {outcome.error or 'right'}", flush=True)
    return outcome


def format_seconds(seconds: float | None) -> str:
    """Formats seconds as microseconds."""
    return NOT_MEASURED if seconds is None else f"{seconds * 1e6:.1f}"


def format_share(share: float | None) -> str:
    """Formats a share in percent."""
    return NOT_MEASURED if share is None else f"{share:.0%}"


def format_outcomes(outcomes: Sequence[Outcome]) -> str:
    """Formats the timed outcomes in Markdown."""
    lines = [
        "| operation | shapes | time, us | bound, us | of the bound | bound by |",
        "|---|---|---|---|---|---|",
    ]
    for each in outcomes:
        if each.bound is None:
            continue
        share = each.bound / each.seconds if each.seconds else None
        lines.append(
            f"| `{each.operation}` | {each.spec} | {format_seconds(each.seconds)}"
            f" | {format_seconds(each.bound)} | {format_share(share)} | {each.bound_by} |"
        )
    return "\n".join(lines)


def format_staging(staging: Sequence[Staging], overlap: Overlap | None) -> str:
    """Formats staging by rows, and beside a product, in Markdown."""
    lines = ["| rows staged | bytes | time, us | GB/s |", "|---|---|---|---|"]
    for each in staging:
        rate = f"{each.num_bytes / each.seconds / 1e9:.1f}" if each.seconds else NOT_MEASURED
        lines.append(
            f"| {each.rows:,} | {each.num_bytes:,} | {format_seconds(each.seconds)} | {rate} |"
        )
    if overlap:
        lines += ["", "| staging and a product | time, us | hidden |", "|---|---|---|"]
        for name, seconds in dataclasses.asdict(overlap).items():
            together = name in ("one_stream", "two_streams")
            hidden = format_share(overlap.hidden(seconds)) if together else ""
            lines.append(f"| {name.replace('_', ' ')} | {format_seconds(seconds)} | {hidden} |")
    return "\n".join(lines)


def run(machine: Machine, operations: Sequence[str], dry: bool) -> dict[str, Any]:
    """Runs and prints everything; returns it for a JSON file."""
    outcomes = []
    for name in operations:
        entry = OPERATIONS[name]
        specs = [(spec, False) for spec in (() if dry else entry.checked)]
        specs += [(spec, True) for spec in (entry.rehearsed if dry else entry.timed)]
        outcomes += [examine(machine, name, spec, timed) for spec, timed in specs]
    errors = [f"{each.operation} of {each.spec}: {each.error}" for each in outcomes if each.error]
    staging, overlap = [], None
    if "stage_rows" in operations:
        entry = OPERATIONS["stage_rows"]
        (spec,) = entry.rehearsed if dry else entry.timed
        try:
            staging = measure_staging(machine, spec)
            overlap = measure_overlap(machine, spec, SMALL_PRODUCT if dry else GLM_PRODUCT)
        except Exception as failure:
            errors.append(f"staging: {type(failure).__name__}: {failure}")
    print(f"\n{format_outcomes(outcomes)}\n\n{format_staging(staging, overlap)}\n")
    return {
        "errors": errors,
        "operations": [dataclasses.asdict(each) for each in outcomes],
        "staging": [dataclasses.asdict(each) for each in staging],
        "overlap": dataclasses.asdict(overlap) if overlap else None,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dry-run", action="store_true", help="run on a CPU, without times")
    parser.add_argument(
        "--operations",
        default=",".join(OPERATIONS),
        help="comma-separated names out of %(default)s",
    )
    parser.add_argument("--repeats", type=int, default=30, help="measurements of each time")
    parser.add_argument("--output", type=Path, help="write the results to this JSON file")
    options = parser.parse_args(arguments)
    operations = options.operations.split(",")
    if unknown := set(operations) - set(OPERATIONS):
        parser.error(f"--operations: {sorted(unknown)} are none of {list(OPERATIONS)}")
    if options.repeats < 1:
        parser.error(f"--repeats must be at least 1, got {options.repeats}")
    platform = jax.default_backend()
    if not options.dry_run and platform != "gpu":
        parser.error(
            f"no GPU: jax runs on {platform!r}. Install jax[cuda13] on a machine with an H200, or"
            " give --dry-run"
        )
    try:
        jax.devices("cpu")
    except RuntimeError as error:
        parser.error(f"no CPU for the references: unset JAX_PLATFORMS, or add cpu to it ({error})")
    if options.dry_run:
        machine = Machine.cpu("interpreter")
    else:
        machine = Machine.with_kernels(jax.devices()[0], options.repeats)
    start = time.perf_counter()
    result = {
        "device": machine.kind,
        "jax": jax.__version__,
        "dry_run": options.dry_run,
        **run(machine, operations, options.dry_run),
        "seconds": time.perf_counter() - start,
    }
    if options.output:
        options.output.write_text(json.dumps(result, indent=1))
    for error in result["errors"]:
        print(f"error: {error}")
    print(f"{machine.kind}, jax {jax.__version__}, {result['seconds']:.0f} s")
    return 1 if result["errors"] else 0


if __name__ == "__main__":
    sys.exit(main())
