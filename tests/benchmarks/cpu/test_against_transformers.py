"""Comparison with transformers: its processes, medians and table, without measuring time."""

import ast
import sys
from pathlib import Path

import pytest

from benchmarks.common.small_checkpoint import write_checkpoint
from benchmarks.cpu.against_transformers import (
    FOLDER,
    Case,
    Row,
    Sample,
    Side,
    check_agreement,
    format_table,
    main,
    measure,
    median_sample,
    run_job,
    table_rows,
)
from benchmarks.cpu.glm53_worker import ANSWER_TOKENS, CHUNK, LATENT_NORM_EPS, generate
from glm53 import LLM, SamplingParams
from tests.benchmarks.common.test_small_checkpoint import TINY


def side(script: str) -> Side:
    """A side whose worker is a Python script that sees its job as `job`."""
    prelude = "import json, sys\njob = json.loads(sys.argv[1])\n"
    return Side((sys.executable, "-c", prelude + script), 7, {"MARK": "set"})


ANSWER = "print(json.dumps({}), flush=True)\nsys.stdin.read()"


def test_median_of_each_quantity() -> None:
    """The median run picked by its speed, with whatever memory it had."""
    samples = [Sample(1, 30, 5), Sample(2, 10, 9), Sample(9, 20, 7)]
    assert median_sample(samples) == Sample(2, 20, 7)


def test_table() -> None:
    """An inverted ratio, or the target of another case."""
    case = Case("decode", 8192, 8, 80)
    rows = table_rows(case, Sample(900, 512, 3), Sample(10, 2048, 0))
    assert rows == [
        Row("decode at 8,192 tokens, batch 8, tokens/s", 900, 10, ">= 80"),
        Row("decode at 8,192 tokens, batch 8, peak MiB", 512, 2048, "<= 0.5"),
    ]
    assert format_table(rows).splitlines()[2:] == [
        "| decode at 8,192 tokens, batch 8, tokens/s | 900.0 | 10.0 | 90.00 | >= 80 |",
        "| decode at 8,192 tokens, batch 8, peak MiB | 512.0 | 2,048.0 | 0.25 | <= 0.5 |",
    ]


def test_peak_memory_is_the_workers_own() -> None:
    """A peak that is lost once freed, or that of this larger process."""
    result = run_job(
        side(f"held = bytearray(64 << 20)\ndel held\n{ANSWER.format('{**job, "more": 1}')}"),
        {"kind": "decode"},
    )
    assert (result["kind"], result["more"]) == ("decode", 1)
    assert 64 < result["memory"] < 128


def test_job_of_a_case() -> None:
    """A measurement of another context, batch or number of steps than the table says."""
    script = f"""import os
assert os.environ["MARK"] == "set"
assert (job["kind"], job["context"], job["steps"], job["threads"]) == ("decode", 64, 7, 2)
assert len(job["token_ids"]) == 3 and all(0 <= token < 2048 for token in job["token_ids"])
{ANSWER.format('{"tokens": 21, "seconds": 0.5, "compile_seconds": 4}')}"""
    sample = measure(side(script), Case("decode", 64, 3, 1), {"threads": 2})
    assert (sample.speed, sample.compilation) == (42, 4)


def test_failed_worker() -> None:
    """A failed worker that is ignored or waited for."""
    with pytest.raises(RuntimeError, match="ended with status 3"):
        run_job(side("sys.exit(3)"), {})


def test_disagreement_stops() -> None:
    """A comparison of speed between sides that compute different things."""
    ours, theirs = (side(ANSWER.format(f'{{"tokens": [5, {last}]}}')) for last in (6, 7))
    check_agreement(ours, ours, {})
    with pytest.raises(RuntimeError, match=r"\[5, 6\] here, \[5, 7\] in transformers"):
        check_agreement(ours, theirs, {})


def test_missing_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """A missing interpreter noticed after minutes, or without naming the script that makes it."""
    checkpoint = tmp_path / "new"
    arguments = ["--transformers-python", str(tmp_path / "none"), "--checkpoint", str(checkpoint)]
    monkeypatch.setattr(sys, "argv", ["against_transformers.py", *arguments])
    with pytest.raises(SystemExit):
        main()
    assert "scripts/setup_transformers.sh" in capsys.readouterr().err
    assert not checkpoint.exists()


def test_transformers_worker_stands_alone() -> None:
    """A worker that needs glm53 or a newer Python in the environment of transformers."""
    text = (FOLDER / "transformers_worker.py").read_text()
    nodes = list(ast.walk(ast.parse(text, feature_version=(3, 11))))
    modules = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    modules += [str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)]
    imported = {module.split(".")[0] for module in modules}
    assert imported - sys.stdlib_module_names == {"torch", "transformers"}


@pytest.mark.compiles
@pytest.mark.slow
def test_worker_runs_what_llm_runs(tmp_path: Path) -> None:
    """Figures of a model that generates other tokens than LLM."""
    write_checkpoint(tmp_path, TINY)
    prompt, steps = [3, 14, 15, 9, 26, 5, 35, 8, 9, 7, 9, 32], 4
    # The store of the worker, so that the steps are compiled once for both.
    llm = LLM(
        tmp_path,
        latent_norm_eps=LATENT_NORM_EPS,
        max_num_seqs=1,
        max_num_batched_tokens=CHUNK,
        max_model_len=len(prompt) + ANSWER_TOKENS,
        device_pages=2,
    )
    wanted = llm.generate(
        {"prompt_token_ids": prompt}, SamplingParams(temperature=0, max_tokens=steps)
    )
    job = {"checkpoint": str(tmp_path), "token_ids": prompt, "steps": steps}
    assert generate(job)["tokens"] == list(wanted[0].outputs[0].token_ids)
