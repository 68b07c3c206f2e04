"""Speed of the built-in model by size of the row tile, each size in its own process.

Prints for each size the seconds of a prefill and the milliseconds of a decode step at several batch
sizes, and their ratio to the size in use. Repeats are interleaved, and medians are reported.

usage: python benchmarks/cpu/row_tile_sizes.py [--repeats N] [--json FILE]
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

import pallas_kernels.common.row_tiles

SIZES = (4, 8, 16, 32)
BATCHES = (1, 4, 8)
PROMPT_TOKENS = 4096
CONTEXT_TOKENS = 900  # together with the steps, within one bucket of context
STEPS = 32


def measure(row_tile: int) -> dict[str, float]:
    """Returns the seconds of a prefill, and the milliseconds of a decode step by batch size."""
    # Set before the modules that read it are imported.
    pallas_kernels.common.row_tiles.ROW_TILE = row_tile
    from glm53 import LLM, SamplingParams

    llm = LLM(max_num_seqs=max(BATCHES), max_model_len=PROMPT_TOKENS + 64)
    rng = np.random.default_rng(0)

    def run(batch: int, prompt_tokens: int, max_tokens: int) -> float:
        ids = rng.integers(0, 1500, (batch, prompt_tokens)).tolist()
        prompts = [{"prompt_token_ids": row} for row in ids]
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        start = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - start

    run(1, PROMPT_TOKENS, 1)
    result = {"prefill_s": run(1, PROMPT_TOKENS, 1)}
    for batch in BATCHES:
        run(batch, CONTEXT_TOKENS, 2)
        whole, prefill = run(batch, CONTEXT_TOKENS, STEPS + 1), run(batch, CONTEXT_TOKENS, 1)
        result[f"decode_{batch}_ms"] = (whole - prefill) / STEPS * 1e3
    return result


def main() -> None:
    """Runs the comparison, or a single size of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the medians here")
    parser.add_argument("--size", type=int, help="measure this size in this process")
    options = parser.parse_args()
    if options.size:
        print(json.dumps(measure(options.size)))
        return
    samples: dict[int, list[dict[str, float]]] = {size: [] for size in SIZES}
    for _ in range(options.repeats):
        for size in SIZES:
            command = [sys.executable, __file__, "--size", str(size)]
            output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            samples[size].append(json.loads(output))
    medians = {
        size: {name: statistics.median(run[name] for run in runs) for name in runs[0]}
        for size, runs in samples.items()
    }
    used = medians[pallas_kernels.common.row_tiles.ROW_TILE]
    print("| tile | " + " | ".join(f"{name} (ratio)" for name in used) + " |")
    print("|---|" + "---|" * len(used))
    for size, row in medians.items():
        cells = [f"{value:.2f} ({value / used[name]:.2f})" for name, value in row.items()]
        print(f"| {size} | " + " | ".join(cells) + " |")
    if options.json:
        options.json.write_text(json.dumps(medians, indent=1))


if __name__ == "__main__":
    main()
