"""Compares speed and peak memory with Hugging Face transformers, on one checkpoint and the CPU.

Both run in float32 with the same threads and token ids, each job in a process of its own, in turns.
First both must continue a prompt with the same greedy tokens. Then, for each case, a table gives
the medians of tokens a second (prefill and decode) and of the peak memory of the process. Decode
runs on a cache of random numbers on both sides, in place of a prefill.

usage: python benchmarks/cpu/against_transformers.py [--repeats N] [--json FILE] [--quick]
"""

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.small_checkpoint import ensure_checkpoint

FOLDER = Path(__file__).parent
CACHE = Path(__file__).parents[2] / ".cache"
MOST_MEMORY = 0.5  # wanted ratio of peak memory
CHECK_PROMPT, CHECK_TOKENS = 300, 16  # more than the checkpoint's index_topk of 256
CASE_SEED, CHECK_SEED = 0, 1


@dataclasses.dataclass(frozen=True)
class Case:
    """What is measured.

    Attributes:
        kind: "prefill" or "decode".
        tokens: length of the prompt, or of the context.
        batch: sequences.
        least_speed: wanted ratio of tokens a second.
    """

    kind: str
    tokens: int
    batch: int
    least_speed: float

    @property
    def name(self) -> str:
        """A name for tables."""
        if self.kind == "prefill":
            return f"prefill of {self.tokens:,} tokens"
        return f"decode at {self.tokens:,} tokens, batch {self.batch}"


CASES = (
    Case("prefill", 2048, 1, 2),
    Case("prefill", 8192, 1, 2),
    Case("decode", 8192, 1, 15),
    Case("decode", 8192, 8, 80),
)
QUICK_CASES = tuple(dataclasses.replace(case, tokens=case.tokens // 8) for case in CASES)


@dataclasses.dataclass(frozen=True)
class Side:
    """One of the two that are compared.

    Attributes:
        command: runs its worker; the job follows.
        decode_steps: steps of a decode measurement.
        environment: variables of its process besides the present ones.
    """

    command: tuple[str, ...]
    decode_steps: int
    environment: Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class Sample:
    """One measurement: tokens a second, peak memory in MiB, and seconds of compilation."""

    speed: float
    memory: float
    compilation: float


@dataclasses.dataclass(frozen=True)
class Row:
    """A line of the table: a quantity of both sides, and the ratio that is wanted."""

    case: str
    ours: float
    theirs: float
    target: str

    @property
    def ratio(self) -> float:
        """Ours over theirs."""
        return self.ours / self.theirs


def run_job(side: Side, job: Mapping[str, Any]) -> dict[str, Any]:
    """Runs a job in a process of its own.

    Returns:
        The worker's result, and the peak memory of its process in MiB as "memory".

    Raises:
        RuntimeError: the worker failed; it has told why on standard error.
        OSError: the worker cannot be started, or the system does not tell its peak memory.
    """
    with subprocess.Popen(
        [*side.command, json.dumps(job)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | side.environment,
        text=True,
    ) as process:
        assert process.stdout
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"{side.command[-1]} ended with status {process.wait()}")
        # The worker waits for the end of its input, which comes with that of this block.
        return json.loads(line) | {"memory": _peak_memory(process.pid)}


def _peak_memory(process: int) -> float:
    """The most memory that a process has held, in MiB.

    The usage of an ended process would not do: it starts with that of the process it came from.
    """
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    raise OSError(f"/proc/{process}/status does not tell VmHWM, the peak memory")


def check_agreement(ours: Side, theirs: Side, common: Mapping[str, Any]) -> None:
    """Compares the greedy tokens after a prompt.

    Args:
        common: the job's checkpoint and threads.

    Raises:
        RuntimeError: they differ, so that the two do not compute the same.
    """
    job = {
        **common,
        "kind": "generate",
        "token_ids": _token_ids(CHECK_PROMPT, CHECK_SEED),
        "steps": CHECK_TOKENS,
    }
    found, wanted = (run_job(side, job)["tokens"] for side in (ours, theirs))
    if found != wanted:
        raise RuntimeError(
            f"greedy tokens differ after {CHECK_PROMPT} of seed {CHECK_SEED}: {found} here, "
            f"{wanted} in transformers"
        )


def measure(side: Side, case: Case, common: Mapping[str, Any]) -> Sample:
    """Measures one case once; `common` is the job's checkpoint and threads."""
    count = case.tokens if case.kind == "prefill" else case.batch
    job = {
        **common,
        "kind": case.kind,
        "token_ids": _token_ids(count, CASE_SEED),
        "context": case.tokens,
        "steps": side.decode_steps,
    }
    result = run_job(side, job)
    speed = result["tokens"] / result["seconds"]
    return Sample(speed, result["memory"], result.get("compile_seconds", 0.0))


def _token_ids(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 2048, count).tolist()


def median_sample(samples: Sequence[Sample]) -> Sample:
    """The median of each quantity."""
    columns = zip(*map(dataclasses.astuple, samples), strict=True)
    return Sample(*map(statistics.median, columns))


def table_rows(case: Case, ours: Sample, theirs: Sample) -> list[Row]:
    """Speed and peak memory of a case."""
    return [
        Row(f"{case.name}, tokens/s", ours.speed, theirs.speed, f">= {case.least_speed:g}"),
        Row(f"{case.name}, peak MiB", ours.memory, theirs.memory, f"<= {MOST_MEMORY:g}"),
    ]


def format_table(rows: Sequence[Row]) -> str:
    """The rows in Markdown."""
    lines = ["| case | ours | transformers | ratio | target ratio |", "|---|---|---|---|---|"]
    lines += [
        f"| {row.case} | {row.ours:,.1f} | {row.theirs:,.1f} | {row.ratio:.2f} | {row.target} |"
        for row in rows
    ]
    return "\n".join(lines)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write medians and samples here")
    parser.add_argument("--quick", action="store_true", help="an eighth of the context, to try it")
    parser.add_argument(
        "--checkpoint", type=Path, default=CACHE / "small-62m", help="made if it is not there"
    )
    parser.add_argument(
        "--transformers-python",
        type=Path,
        default=CACHE / "transformers/bin/python",
        help="an interpreter that has transformers",
    )
    options = parser.parse_args()
    if options.repeats < 1:
        parser.error(f"--repeats must be at least 1, got {options.repeats}")
    if not options.transformers_python.is_file():
        parser.error(
            f"--transformers-python {options.transformers_python} is not there: "
            "scripts/setup_transformers.sh makes it"
        )
    return options


def main() -> None:
    """Runs the comparison."""
    options = _parse()
    ensure_checkpoint(options.checkpoint)
    # A compilation cache would hide what compiling takes.
    ours_environment = {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "false"}
    ours = Side((sys.executable, str(FOLDER / "glm53_worker.py")), 16, ours_environment)
    theirs_command = (str(options.transformers_python), str(FOLDER / "transformers_worker.py"))
    theirs = Side(theirs_command, 3, {"HF_HUB_OFFLINE": "1"})
    # XLA takes a thread for each CPU that the process may use; transformers is told the number.
    threads = len(os.sched_getaffinity(0))
    common = {"checkpoint": str(options.checkpoint), "threads": threads}

    check_agreement(ours, theirs, common)
    print(f"Both give the same {CHECK_TOKENS} greedy tokens.", file=sys.stderr)
    cases = QUICK_CASES if options.quick else CASES
    samples: dict[Case, tuple[list[Sample], list[Sample]]] = {case: ([], []) for case in cases}
    for repeat in range(options.repeats):
        for case in cases:
            for side, taken in zip((ours, theirs), samples[case], strict=True):
                taken.append(measure(side, case, common))
            print(f"repeat {repeat + 1} of {options.repeats}: {case.name}", file=sys.stderr)

    medians = {case: tuple(map(median_sample, taken)) for case, taken in samples.items()}
    rows = [row for case in cases for row in table_rows(case, *medians[case])]
    print(format_table(rows))
    print(f"\n{threads} threads, medians of {options.repeats}. Ours, before any of that, compiled:")
    for case in cases:
        print(f"* {case.name}: {medians[case][0].compilation:.1f} s")
    if options.quick:
        print("The target ratios are for the whole contexts, without --quick.")
    if options.json:
        report = {
            "threads": threads,
            "rows": [dataclasses.asdict(row) | {"ratio": row.ratio} for row in rows],
            "samples": {
                case.name: [[dataclasses.asdict(x) for x in taken] for taken in samples[case]]
                for case in cases
            },
        }
        options.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
