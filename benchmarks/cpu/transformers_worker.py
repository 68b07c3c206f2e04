"""Measurement of transformers for `against_transformers.py`: one job, in its own process.

Runs in an environment without glm53. Takes a job as JSON, prints its result as a line of JSON, and
waits for the end of standard input, so that the peak memory of the process can be read.

usage: .cache/transformers/bin/python benchmarks/cpu/transformers_worker.py JOB
"""

import json
import sys
import time
from typing import Any

# Installed by scripts/setup_transformers.sh, in a separate environment.
import torch  # pyright: ignore[reportMissingImports]
from transformers import (  # pyright: ignore[reportMissingImports]
    AutoModelForCausalLM,
    DynamicCache,
)

WARM_UP_TOKENS = 512


def load(checkpoint: str) -> Any:
    """Loads the model in float32."""
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()


def step(model: Any, token_ids: Any, cache: Any) -> tuple[Any, Any]:
    """Appends tokens [batch, tokens]; returns the greedy next tokens [batch, 1] and the cache."""
    output = model(token_ids, cache=cache, use_cache=True, logits_to_keep=1)
    return output.logits[:, -1:].argmax(-1), output.cache


def random_cache(config: Any, batch: int, length: int) -> Any:
    """Returns a cache of normal numbers, the size of normalised latents and keys."""
    cache = DynamicCache(config=config)
    for layer, kind in enumerate(config.indexer_types):
        latent = torch.randn(batch, 1, length, config.kv_lora_rank)
        rope = torch.randn(batch, 1, length, config.qk_rope_head_dim)
        cache.update(latent, rope, layer)
        if kind == "full":
            cache.update_indexer(torch.randn(batch, length, config.index_head_dim), layer)
    return cache


def generate(job: dict[str, Any]) -> dict[str, Any]:
    """Returns the greedy tokens after a prompt."""
    model = load(job["checkpoint"])
    token, cache = step(model, torch.tensor([job["token_ids"]]), None)
    tokens = [int(token)]
    while len(tokens) < job["steps"]:
        token, cache = step(model, token, cache)
        tokens.append(int(token))
    return {"tokens": tokens}


def prefill(job: dict[str, Any]) -> dict[str, Any]:
    """Times a prefill, after a short warm-up prompt."""
    model = load(job["checkpoint"])
    prompt = torch.tensor([job["token_ids"]])
    step(model, prompt[:, :WARM_UP_TOKENS], None)
    start = time.perf_counter()
    step(model, prompt, None)
    return {"seconds": time.perf_counter() - start, "tokens": prompt.numel()}


def decode(job: dict[str, Any]) -> dict[str, Any]:
    """Times decode steps on a random cache, after a warm-up step."""
    model = load(job["checkpoint"])
    token = torch.tensor(job["token_ids"])[:, None]
    cache = random_cache(model.config, len(token), job["context"])
    token, cache = step(model, token, cache)
    start = time.perf_counter()
    for _ in range(job["steps"]):
        token, cache = step(model, token, cache)
    return {"seconds": time.perf_counter() - start, "tokens": job["steps"] * len(token)}


def main() -> None:
    """Runs the job given on the command line."""
    job = json.loads(sys.argv[1])
    torch.set_num_threads(job["threads"])
    measure = {"generate": generate, "prefill": prefill, "decode": decode}[job["kind"]]
    with torch.inference_mode():
        result = measure(job)
    print(json.dumps(result), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
