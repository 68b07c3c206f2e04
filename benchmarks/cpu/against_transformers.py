"""Speed and peak memory on a CPU compared with Hugging Face transformers, on one checkpoint.

Both run in float32 with the same threads and token ids, in turns, each job in its own process.
First both must continue a prompt with the same greedy tokens. Then a table gives, for each case,
the median tokens per second (prefill and decode) and the median peak memory of the process. On both
sides decode starts from a cache of random numbers instead of a prefill.

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
MAX_MEMORY_RATIO = 0.5  # target ratio of peak memory
CHECK_PROMPT, CHECK_TOKENS = 300, 16  # more than the checkpoint's index_topk of 256
CASE_SEED, CHECK_SEED = 0, 1


@dataclasses.dataclass(frozen=True)
class Case:
    """One measured case.

    Attributes:
        kind: "prefill" or "decode".
        tokens: length of the prompt, or of the context.
        batch: number of sequences.
        min_speed_ratio: target ratio of tokens per second.
    """

    kind: str
    tokens: int
    batch: int
    min_speed_ratio: float

    @property
    def name(self) -> str:
        """Name in tables."""
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
    """One of the two implementations compared.

    Attributes:
        command: command line of its worker, to which the job is appended.
        decode_steps: number of steps in a decode measurement.
        environment: additional environment variables of its process.
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
    """Row of the table: one quantity of both sides, and its target ratio."""

    case: str
    ours: float
    theirs: float
    target: str

    @property
    def ratio(self) -> float:
        """Our value over theirs."""
        return self.ours / self.theirs


def run_job(side: Side, job: Mapping[str, Any]) -> dict[str, Any]:
    """Runs a job in its own process.

    Returns:
        The worker's result, with the peak memory of its process in MiB as "memory".

    Raises:
        RuntimeError: the worker failed; the reason is on standard error.
        OSError: the worker cannot be started, or the system does not report its peak memory.
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
        # The worker waits for the end of its input, which this block closes.
        return json.loads(line) | {"memory": _peak_memory(process.pid)}


def _peak_memory(process: int) -> float:
    """Returns the peak memory of a process, in MiB.

    The usage of an ended process would be wrong: it starts from that of its parent.
    """
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    raise OSError(f"/proc/{process}/status does not report VmHWM, the peak memory")


def check_agreement(ours: Side, theirs: Side, common: Mapping[str, Any]) -> None:
    """Checks that both sides generate the same greedy tokens after a prompt.

    Args:
        common: the job's checkpoint and threads.

    Raises:
        RuntimeError: they differ.
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
    """Returns the median of each quantity."""
    columns = zip(*map(dataclasses.astuple, samples), strict=True)
    return Sample(*map(statistics.median, columns))


def table_rows(case: Case, ours: Sample, theirs: Sample) -> list[Row]:
    """Returns the rows of a case: speed and peak memory."""
    return [
        Row(f"{case.name}, tokens/s", ours.speed, theirs.speed, f">= {case.min_speed_ratio:g}"),
        Row(f"{case.name}, peak MiB", ours.memory, theirs.memory, f"<= {MAX_MEMORY_RATIO:g}"),
    ]


def format_table(rows: Sequence[Row]) -> str:
    """Formats the rows in Markdown."""
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
    parser.add_argument(
        "--quick", action="store_true", help="an eighth of the context, for a first try"
    )
    parser.add_argument(
        "--checkpoint",
        type=Path,
        default=CACHE / "small-62m",
        help="directory of the checkpoint, created if missing",
    )
    parser.add_argument(
        "--transformers-python",
        type=Path,
        default=CACHE / "transformers/bin/python",
        help="Python interpreter with transformers installed",
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
    # A compilation cache would hide the time and memory that compiling takes.
    ours_environment = {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "false"}
    ours = Side((sys.executable, str(FOLDER / "glm53_worker.py")), 16, ours_environment)
    theirs_command = (str(options.transformers_python), str(FOLDER / "transformers_worker.py"))
    theirs = Side(theirs_command, 3, {"HF_HUB_OFFLINE": "1"})
    # XLA uses one thread for each CPU of the process; transformers gets the number as an option.
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
