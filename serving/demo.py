"""Demonstration of `make demo`: facts planted in 8K tokens, on a device that holds a tenth."""

import argparse
import importlib.util
import json
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from glm53 import chat
from kvcache import CacheCounters
from kvcache.residency_view import view_sequence
from serving.cli.process import colours_wanted, exit_code_of
from serving.engine.engine import Engine
from serving.options.engine_options import BUILT_IN_MODEL, EngineOptions, model_path
from serving.requests.request import Request
from serving.requests.sampling_params import SamplingParams
from serving.residency_strip import PLOT_FORMATS, Sample, Strip, save_plot

_DOCUMENT = "8000-0"
_DEVICE_PAGES = 12
_QUESTIONS = 2
_MAX_TOKENS = 32
_DECODE_STEPS_A_LINE = 3
_LABEL_WIDTH = len("prompt 8,192")


def main() -> int:
    """Asks for the facts planted furthest back and prints the answers beside the right ones."""
    parser = argparse.ArgumentParser(prog="python -m serving.demo", description=__doc__)
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help="draw the strips here, as PNG, SVG or PDF (default: not drawn)",
    )
    options = parser.parse_args()
    return exit_code_of(lambda: _run(options.plot))


def _run(plot: Path | None) -> int:
    if plot is not None:
        _check_plot(plot)
    lines = (model_path(BUILT_IN_MODEL) / "needles.jsonl").read_text(encoding="utf-8").splitlines()
    document = next(line for line in map(json.loads, lines) if line["id"] == _DOCUMENT)
    needles = sorted(document["questions"], key=lambda question: question["depth_tokens"])

    print(f"Loading the built-in model '{BUILT_IN_MODEL}' (3M parameters).")
    engine = Engine(
        EngineOptions(
            model=BUILT_IN_MODEL, max_num_seqs=1, max_model_len=16384, device_pages=_DEVICE_PAGES
        )
    )
    print("Reading the document.")
    parts = [
        (f"{needle['question']}", _ask(engine, document["text"], needle))
        for needle in needles[:_QUESTIONS]
    ]
    if plot is not None:
        save_plot(parts, plot)
        print(f"\nDrawn in {plot}.")
    return 0


def _check_plot(path: Path) -> None:
    """Refuses a plot that could not be drawn, before anything is computed.

    Raises:
        ValueError, OSError: naming what is missing.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib: pip install matplotlib")
    if path.suffix not in PLOT_FORMATS:
        raise ValueError(f"--plot {path} must end in {', '.join(PLOT_FORMATS)}")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"--plot {path}: there is no directory {str(path.parent)!r}")


def _ask(engine: Engine, document: str, needle: dict[str, Any]) -> list[Sample]:
    message = {"role": "user", "content": f"{document}\n{needle['question']}"}
    prompt = chat.render([message], add_generation_prompt=True)
    params = SamplingParams(temperature=0, max_tokens=_MAX_TOKENS)
    request = engine.input_processor.read("demo", prompt, params)
    num_tokens = len(request.sequences[0].token_ids)
    pages = engine.runner.geometry.pages_for(num_tokens)
    print()
    print(f"Prompt:    {num_tokens:,} tokens in {pages:,} pages; the device holds {_DEVICE_PAGES}")
    print(f"Question:  {needle['question']} ({num_tokens - needle['depth_tokens']:,} tokens back)")
    strip = Strip(
        num_pages=engine.runner.geometry.pages_for(num_tokens + _MAX_TOKENS),
        width=shutil.get_terminal_size().columns,
        label_width=_LABEL_WIDTH,
        colour=sys.stdout.isatty() and colours_wanted(),
    )
    print("\n".join(strip.legend()))
    start, samples = time.perf_counter(), []
    for sample in _samples(engine, request):
        print(strip.line(sample), flush=True)
        samples.append(sample)
    seconds = time.perf_counter() - start
    output = request.output()
    print(f"Answer:    {chat.parse(output.outputs[0].text).content}")
    print(f"Planted:   {needle['answer']}")
    print(f"Cached:    {_cached(output.num_cached_tokens)}")
    print(f"Rows read: {_rows_read(output.cache_counters)}")
    print(f"Time:      {seconds:.1f} s, compilation included")
    return samples


def _samples(engine: Engine, request: Request) -> Iterator[Sample]:
    """Runs a request; a sample after each step of the prompt, and each few of the answer."""
    engine.add(request)
    cache, slot, prompt_tokens = engine.runner.cache, 0, len(request.sequences[0].token_ids)
    while engine.has_work:
        engine.step()
        if request.finished:
            continue
        length = cache.length(slot)
        answered = length - prompt_tokens
        if answered <= 0:
            yield Sample(f"prompt {length:5,}", view_sequence(cache, slot))
        elif answered % _DECODE_STEPS_A_LINE == 1:
            yield Sample(f"answer {answered:5,}", view_sequence(cache, slot))


def _cached(num_tokens: int) -> str:
    return f"{num_tokens:,} tokens{', from the question before' if num_tokens else ''}"


def _rows_read(counters: CacheCounters) -> str:
    return (
        f"{counters.resident_reads:,} resident, {counters.row_cache_reads:,} in the row cache, "
        f"{counters.staged_reads:,} staged, {counters.host_reads:,} in host memory; "
        f"pages moved to host memory: {counters.offloaded_pages:,}"
    )


if __name__ == "__main__":
    sys.exit(main())
