"""What `make demo` runs: facts planted in 8K tokens, on a device that holds a tenth of them."""

import json
import time

from glm53 import chat
from kvcache import CacheCounters
from serving.engine_options import BUILT_IN_MODEL, model_path
from serving.llm import LLM
from serving.sampling_params import SamplingParams

_DOCUMENT = "8000-0"
_DEVICE_PAGES = 12
_QUESTIONS = 2


def main() -> None:
    """Asks for the facts planted furthest back and prints the answers beside the right ones."""
    lines = (model_path(BUILT_IN_MODEL) / "needles.jsonl").read_text(encoding="utf-8").splitlines()
    document = next(line for line in map(json.loads, lines) if line["id"] == _DOCUMENT)
    needles = sorted(document["questions"], key=lambda question: question["depth_tokens"])

    print(f"Loading the built-in model '{BUILT_IN_MODEL}' (3M parameters).")
    llm = LLM(BUILT_IN_MODEL, max_num_seqs=1, max_model_len=16384, device_pages=_DEVICE_PAGES)
    print("Compiling and reading the document. The first time this takes a minute or two.")
    for needle in needles[:_QUESTIONS]:
        message = {"role": "user", "content": f"{document['text']}\n{needle['question']}"}
        prompt = chat.render([message], add_generation_prompt=True)
        start = time.perf_counter()
        (output,) = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=32))
        seconds = time.perf_counter() - start
        num_tokens = len(output.prompt_token_ids)
        pages = -(-num_tokens // 64)
        print()
        print(f"Prompt:    {num_tokens} tokens in {pages} pages; the device holds {_DEVICE_PAGES}")
        print(f"Cached:    {output.num_cached_tokens} of them, from the question before")
        print(
            f"Question:  {needle['question']} ({num_tokens - needle['depth_tokens']} tokens back)"
        )
        print(f"Answer:    {chat.parse(output.outputs[0].text).content}")
        print(f"Planted:   {needle['answer']}")
        print(f"Rows read: {_rows_read(output.cache_counters)}")
        print(f"Time:      {seconds:.1f} s, compilation included")


def _rows_read(counters: CacheCounters) -> str:
    return (
        f"{counters.resident_reads:,} resident, {counters.hot_reads:,} hot, "
        f"{counters.staged_reads:,} staged, {counters.host_reads:,} in host memory; "
        f"{counters.cleaned_pages} pages went there"
    )


if __name__ == "__main__":
    main()
