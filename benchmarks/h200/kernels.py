"""Checks and times the kernels on an H200: one script, meant to take less than three minutes.

Every operation's kernel is compared with its reference on small odd shapes, and at GLM-5.3's true
ones, of one device of eight, where it is then timed. Bits must be the same, or, for `index_scores`,
differ by no more than it states. References run on the CPU; those of slabs of gigabytes on the GPU,
whose memory stands in for the host's, as XLA would not gather from that.

A call's time is on the device, without the launch from Python (`programs.py` says how), and is
compared with what its bytes and products take at 50 GB/s over the host link, 4.3 TB/s in the
device's memory and 780 TFLOP/s. Then staging is timed by its rows, and beside a product in the same
program.

Exits with 1 where a value is wrong or an operation fails; the others are run all the same. With
--dry-run all of it runs on a CPU, on small shapes and in Pallas' interpreter, and times nothing.

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
_LARGE_BYTES = 256 << 20  # of arrays that are compared on the device
_MOST_CPU_BYTES = 4 << 30  # of large operands that a reference on the CPU may have


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What was found of an operation on one of its specs.

    Attributes:
        operation: its name.
        spec: the spec's.
        error: what is wrong, None if nothing is.
        bound: least seconds of a call, None where the spec is not timed.
        bound_by: what binds.
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
    """The first place at which arrays differ by a bit, or by more than the tolerance, in words."""
    if (found.shape, found.dtype) != (expected.shape, expected.dtype):
        return f"is {found.dtype}{found.shape}, not {expected.dtype}{expected.shape}"
    start = 0
    if isinstance(found, jax.Array) and tolerance is None and found.nbytes >= _LARGE_BYTES:
        # Only what differs is brought to the CPU.
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
    place = tuple(int(axis) for axis in np.argwhere(wrong)[0])
    where = [start + place[0], *place[1:]] if found.ndim else []
    return f"differs first at {where}: {some[place]}, not {other[place]}"


@jax.jit
def _parts_that_differ(found: jax.Array, expected: jax.Array) -> jax.Array:
    """Whether any bit does, along the first axis."""
    bits = f"uint{8 * found.dtype.itemsize}"
    found, expected = (lax.bitcast_convert_type(each, bits) for each in (found, expected))
    return jnp.any(found != expected, axis=range(1, found.ndim))


def _differ(found: np.ndarray, expected: np.ndarray, tolerance: np.ndarray) -> np.ndarray:
    """Where they do; an infinity must be the same."""
    finite = np.isfinite(found) & np.isfinite(expected)
    error = np.abs(np.where(finite, found, 0) - np.where(finite, expected, 0))
    return np.where(finite, error > tolerance, found != expected)


class Case:
    """An operation on one of its specs.

    Args:
        machine: where its program runs.
        operation: its entry.
        spec: the spec's name.
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
        """Runs a call, and another one of the reference; says where their results differ."""
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
        """The CPU, or the device where its memory stands in for a large slab of the host's."""
        large = [each.array for each in self._chain.operands if isinstance(each, Large)]
        if sum(array.size * array.dtype.itemsize for array in large) <= _MOST_CPU_BYTES:
            return Machine.cpu("reference")
        return dataclasses.replace(self._machine, implementation="reference", host=None)

    def _results(self, chain: Chain) -> tuple[Any, ...]:
        (returned,) = chain.run(chain.place(self._lists[:1]))
        return self._operation.comparable((*chain.state, *returned))

    def time(self) -> float | None:
        """Median seconds of a call."""
        (samples,) = measure(self._machine, [(self._chain, self._lists)])
        return samples.seconds


def examine(machine: Machine, operation: str, spec: str, timed: bool) -> Outcome:
    """Checks an operation on a spec, and times it where it is right."""
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
        # Whatever goes wrong with one, the others are run.
        error = f"{type(failure).__name__}: {failure}"
    outcome = dataclasses.replace(outcome, error=error)
    print(f"{operation} of {spec}: {outcome.error or 'right'}", flush=True)
    return outcome


def format_seconds(seconds: float | None) -> str:
    """Microseconds, if there are any."""
    return NOT_MEASURED if seconds is None else f"{seconds * 1e6:.1f}"


def format_share(share: float | None) -> str:
    """Percent, if there are any."""
    return NOT_MEASURED if share is None else f"{share:.0%}"


def format_outcomes(outcomes: Sequence[Outcome]) -> str:
    """The timed ones in Markdown."""
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
    """Staging by rows, and beside a product, in Markdown."""
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
    """Runs everything and prints it; returns it for a file."""
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
    """Runs what the command line says; returns what to exit with."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dry-run", action="store_true", help="on a CPU, without times")
    parser.add_argument("--operations", default=",".join(OPERATIONS), help="some of %(default)s")
    parser.add_argument("--repeats", type=int, default=30, help="of each time")
    parser.add_argument("--output", type=Path, help="write the results here, in JSON")
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
