"""Measurement of glm53 for `against_transformers.py`: one job, in its own process.

Takes a job as JSON, prints its result as a line of JSON, and waits for the end of standard input,
so that the peak memory of the process can be read.

usage: python benchmarks/cpu/glm53_worker.py JOB
"""

import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.common.sequences import (
    fill_randomly,
    float32_geometry,
    open_sequences,
    set_sequences,
)
from glm53.checkpoint import load_hugging_face
from glm53.model.config import GLMConfig
from glm53.model.sharding import make_mesh
from glm53.model.steps import PrefillBatch, Steps
from serving.engine.buckets import Buckets, fit

CHUNK = 512  # rows of a prefill step, the default of LLM
ANSWER_TOKENS = 64  # of a sequence, beyond its prompt
LATENT_NORM_EPS = 1e-6  # as in transformers


class Runner:
    """Model, an empty sequence in every slot, and steps compiled ahead of their use.

    Args:
        checkpoint: directory of the checkpoint.
        num_sequences: number of sequence slots.
        prompt_tokens: maximum length of a sequence, without its answer.

    Attributes:
        compile_seconds: time spent compiling so far.
    """

    def __init__(self, checkpoint: str, num_sequences: int, prompt_tokens: int) -> None:
        config = GLMConfig.from_pretrained(checkpoint).replace(latent_norm_eps=LATENT_NORM_EPS)
        mesh = make_mesh()
        self._params = load_hugging_face(checkpoint, config, mesh)
        geometry = float32_geometry(config, num_sequences, prompt_tokens + ANSWER_TOKENS)
        self._steps = Steps(config, geometry, mesh)
        self._buckets = Buckets.for_geometry(geometry, CHUNK)
        self._store, self._sequences = open_sequences(self._steps)
        self._compiled: dict[tuple, Callable] = {}
        self.compile_seconds = 0.0

    def fill(self, length: int, last_tokens: Sequence[int]) -> None:
        """Sets every sequence to `length` random rows and the token that follows them."""
        self._store = fill_randomly(self._store)
        self.restart(length, last_tokens)

    def restart(self, length: int, last_tokens: Sequence[int]) -> None:
        """Sets the length of every sequence and the token that follows, leaving the store as it
        is."""
        tokens = jnp.asarray(last_tokens, jnp.int32)
        self._sequences = set_sequences(self._sequences, length, tokens)

    def compile_prefill(self, token_ids: Sequence[int]) -> None:
        """Compiles the steps of a prompt."""
        for batch, length in self._chunks(token_ids):
            self._compile(self._steps.prefill, batch, length)

    def prefill(self, token_ids: Sequence[int]) -> int:
        """Prefills the empty sequence of slot 0 and returns the token that follows."""
        next_tokens = [self._run(self._steps.prefill, *chunk) for chunk in self._chunks(token_ids)]
        return int(next_tokens[-1][0])

    def decode(self, slots: Sequence[int], length: int) -> list[int]:
        """Appends each sequence's last token and returns the next.

        Args:
            slots: slots of the sequences.
            length: maximum of their lengths, which decides the bucket of context.
        """
        next_tokens = self._run(self._steps.decode, jnp.asarray(slots, jnp.int32), length)
        return np.asarray(next_tokens).tolist()

    def _chunks(self, token_ids: Sequence[int]) -> list[tuple[PrefillBatch, int]]:
        """Returns the steps of a prompt, each with the sequence's length after it."""
        chunks, done = [], 0
        while done < len(token_ids):
            rows = self._buckets.chunk(len(token_ids) - done)
            ids = token_ids[done : done + rows]
            padded = np.zeros((1, rows), np.int32)
            padded[0, : len(ids)] = ids
            done += len(ids)
            slots, counts = (jnp.asarray([number], jnp.int32) for number in (0, len(ids)))
            chunks.append((PrefillBatch(slots, counts, jnp.asarray(padded)), done))
        return chunks

    def _run(self, step: Any, batch: PrefillBatch | jax.Array, length: int) -> jax.Array:
        """Launches a step and returns its next tokens, which may still be in flight."""
        run = self._compile(step, batch, length)
        output, self._store, self._sequences = run(
            self._params, self._store, self._sequences, batch
        )
        return output.next_token

    def _compile(self, step: Any, batch: PrefillBatch | jax.Array, length: int) -> Callable:
        """Compiles a jitted step for a batch, in the bucket of a context of `length` tokens."""
        pages = fit(self._buckets.context_pages, self._steps.geometry.pages_for(length))
        shape = (step, pages, *(array.shape for array in jax.tree.leaves(batch)))
        if shape not in self._compiled:
            start = time.perf_counter()
            state = (self._params, self._store, self._sequences)
            self._compiled[shape] = step.lower(*state, batch, context_pages=pages).compile()
            self.compile_seconds += time.perf_counter() - start
        return self._compiled[shape]


def generate(job: dict[str, Any]) -> dict[str, Any]:
    """Returns the greedy tokens after a prompt."""
    prompt, steps = job["token_ids"], job["steps"]
    runner = Runner(job["checkpoint"], 1, len(prompt))
    tokens = [runner.prefill(prompt)]
    while len(tokens) < steps:
        tokens += runner.decode([0], len(prompt) + steps)
    return {"tokens": tokens}


def prefill(job: dict[str, Any]) -> dict[str, Any]:
    """Times a prefill, after a warm-up chunk."""
    prompt = job["token_ids"]
    runner = Runner(job["checkpoint"], 1, len(prompt))
    runner.compile_prefill(prompt)
    runner.prefill(prompt[:CHUNK])
    runner.restart(0, [0])
    start = time.perf_counter()
    runner.prefill(prompt)
    return {
        "seconds": time.perf_counter() - start,
        "tokens": len(prompt),
        "compile_seconds": runner.compile_seconds,
    }


def decode(job: dict[str, Any]) -> dict[str, Any]:
    """Times decode steps on a random cache, after a warm-up step."""
    context, last_tokens, steps = job["context"], job["token_ids"], job["steps"]
    slots = range(len(last_tokens))
    runner = Runner(job["checkpoint"], len(slots), context)
    runner.fill(context, last_tokens)
    longest = context + 1 + steps
    runner.decode(slots, longest)
    start = time.perf_counter()
    for _ in range(steps):
        runner.decode(slots, longest)
    return {
        "seconds": time.perf_counter() - start,
        "tokens": steps * len(slots),
        "compile_seconds": runner.compile_seconds,
    }


def main() -> None:
    """Runs the job given on the command line."""
    job = json.loads(sys.argv[1])
    measure = {"generate": generate, "prefill": prefill, "decode": decode}[job["kind"]]
    print(json.dumps(measure(job)), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
