"""Time of a decode step by length of the context, on the 62M-parameter checkpoint.

A cache of random numbers stands for the context. Scoring and selection, which read every index key,
are also timed on their own, over all layers with an indexer; the rest of a step reads `index_topk`
rows whatever the context. Repeats over the contexts are interleaved, and medians are reported.

usage: python benchmarks/cpu/decode_by_context.py [--repeats N] [--json FILE]
"""

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from benchmarks.common.sequences import (
    fill_randomly,
    float32_geometry,
    open_sequences,
    set_sequences,
)
from benchmarks.common.small_checkpoint import ensure_checkpoint
from glm53.checkpoint import load_hugging_face
from glm53.model.config import GLMConfig
from glm53.model.sharding import make_mesh
from glm53.model.steps import Steps
from kvcache import KVStore, SequenceState
from kvcache.device.store import MESH_AXIS
from pallas_kernels.index_scores import index_scores
from pallas_kernels.select_topk import merge_topk, select_topk

CHECKPOINT = Path(__file__).parents[2] / ".cache" / "small-62m"
CONTEXTS = (8192, 16384, 32768, 65536)
BATCHES = (1, 4)
MEMORY_SHARE = 0.5  # of the free memory, for a store


@dataclasses.dataclass(frozen=True)
class Timing:
    """Median milliseconds of a decode step.

    Attributes:
        batch: number of sequences.
        context: tokens of each, including the one that the step appends.
        step: time of the whole step.
        selection: time of scoring and selection in all layers.
    """

    batch: int
    context: int
    step: float
    selection: float

    @property
    def rest(self) -> float:
        """Time of the step without scoring and selection."""
        return self.step - self.selection


class DecodeBench:
    """Model with a random cache, its decode step and its selection compiled for each shape.

    Args:
        config: a float32 model.
        params: its parameters.
        num_sequences: number of sequence slots.
        num_tokens: maximum tokens of a sequence.
    """

    def __init__(
        self, config: GLMConfig, params: nnx.State, num_sequences: int, num_tokens: int
    ) -> None:
        geometry = float32_geometry(config, num_sequences, num_tokens)
        self._steps = Steps(config, geometry, make_mesh())
        self._params = params
        store, self._sequences = open_sequences(self._steps)
        self._store = fill_randomly(store)
        self._select = jax.jit(
            partial(_sharded_select, self._steps), static_argnames="context_pages"
        )

    def step(self, batch: int, context: int) -> float:
        """Returns the milliseconds of a decode step after which `batch` sequences have `context`
        tokens."""
        self._sequences = self._at(context - 1)
        slots = jnp.arange(batch, dtype=jnp.int32)
        pages = self._steps.geometry.pages_for(context)

        def run() -> jax.Array:
            output, self._store, self._sequences = self._steps.decode(
                self._params, self._store, self._sequences, slots, context_pages=pages
            )
            return output.next_token

        return _milliseconds(run)

    def selection(self, batch: int, context: int) -> float:
        """Returns the milliseconds of such a step's scoring and selection, with random queries."""
        config, sequences = self._steps.config, self._at(context - 1)
        shape = (config.num_index_layers, batch, config.index_n_heads, config.index_head_dim)
        query = jax.block_until_ready(jax.random.normal(jax.random.key(0), shape))
        weights = jax.block_until_ready(jax.random.normal(jax.random.key(1), shape[:-1]))
        pages = self._steps.geometry.pages_for(context)
        return _milliseconds(
            lambda: self._select(self._store, sequences, query, weights, context_pages=pages)
        )

    def _at(self, length: int) -> SequenceState:
        sequences = set_sequences(
            self._sequences, length, jnp.zeros_like(self._sequences.last_token)
        )
        return jax.block_until_ready(sequences)


def _milliseconds(run: Callable[[], jax.Array]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(run())
    return (time.perf_counter() - start) * 1e3


def _sharded_select(
    steps: Steps,
    store: KVStore,
    sequences: SequenceState,
    query: Float[Array, "index_layers batch heads key_dim"],
    weights: Float[Array, "index_layers batch heads"],
    context_pages: int,
) -> Int[Array, "index_layers batch k"]:
    """Selects positions for one row of each sequence, in every layer with an indexer."""
    everywhere = PartitionSpec()
    return jax.shard_map(
        partial(_select, steps, context_pages),
        mesh=steps.mesh,
        in_specs=(KVStore.specs(steps.geometry), everywhere, everywhere, everywhere),
        out_specs=everywhere,
        check_vma=False,
    )(store, sequences, query, weights)


def _select(
    steps: Steps,
    context_pages: int,
    store: KVStore,
    sequences: SequenceState,
    query: jax.Array,
    weights: jax.Array,
) -> jax.Array:
    """Scores and selects as a decode step does in layers with an indexer, given queries and
    keys."""
    geometry = steps.geometry
    num_local = context_pages * geometry.rows_per_device
    context = jnp.arange(num_local) * geometry.num_devices + lax.axis_index(MESH_AXIS)

    def select_layer(layer: tuple[jax.Array, ...]) -> jax.Array:
        index_layer, query, weights = layer

        def select_row(row: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
            query, weights, position, pages = row
            scores = index_scores(
                query[None],
                weights[None],
                store.index_keys,
                index_layer,
                pages,
                position // geometry.num_devices + 1,
                geometry.index_row_format,
            )
            k = steps.config.index_topk
            return select_topk(scores, context, 0, position[None], k, ordered=False)

        tables = sequences.block_table[: query.shape[0], :context_pages]
        rows = (query, weights, sequences.length[: query.shape[0]], tables)
        scores, positions = (found[:, 0] for found in lax.map(select_row, rows))
        scores, positions = (lax.all_gather(each, MESH_AXIS) for each in (scores, positions))
        return merge_topk(scores, positions, lax.axis_index(MESH_AXIS))

    return lax.map(select_layer, (jnp.arange(query.shape[0]), query, weights))


def measure(
    bench: DecodeBench, shapes: Sequence[tuple[int, int]], repeats: int
) -> tuple[Timing, ...]:
    """Returns median timings of shapes (batch, context), compiled beforehand."""
    for shape in shapes:
        bench.step(*shape)
        bench.selection(*shape)
    taken = [
        [(bench.step(*shape), bench.selection(*shape)) for shape in shapes] for _ in range(repeats)
    ]
    return tuple(
        Timing(*shape, *map(statistics.median, zip(*samples, strict=True)))
        for shape, samples in zip(shapes, zip(*taken, strict=True), strict=True)
    )


def format_table(timings: Sequence[Timing]) -> str:
    """Formats the timings in Markdown; a batch's rest is compared with that of its first
    context."""
    lines = [
        "| batch | context | step, ms | scoring and selection, ms | rest, ms | rest, ratio |",
        "|---|---|---|---|---|---|",
    ]
    first: dict[int, float] = {}
    for timing in timings:
        ratio = timing.rest / first.setdefault(timing.batch, timing.rest)
        lines.append(
            f"| {timing.batch} | {timing.context:,} | {timing.step:.2f} | {timing.selection:.2f} "
            f"| {timing.rest:.2f} | {ratio:.2f} |"
        )
    return "\n".join(lines)


def fitting_batches(config: GLMConfig, num_tokens: int) -> tuple[int, ...]:
    """Returns the batches whose store fits in the memory that is free now.

    Raises:
        OSError: the system does not report its free memory.
    """
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    room = int(fields["MemAvailable"].split()[0]) * 1024 * MEMORY_SHARE
    token_bytes = float32_geometry(config, 1, 1).token_bytes
    return tuple(batch for batch in BATCHES if batch * num_tokens * token_bytes <= room)


def main() -> None:
    """Runs the measurement."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json", type=Path, help="write the medians here")
    options = parser.parse_args()
    if options.repeats < 1:
        parser.error(f"--repeats must be at least 1, got {options.repeats}")
    ensure_checkpoint(CHECKPOINT)
    longest = max(CONTEXTS)
    config = GLMConfig.from_pretrained(CHECKPOINT).replace(max_position_embeddings=longest)
    batches = fitting_batches(config, longest)
    if not batches:
        parser.error(f"no memory for one sequence of {longest} tokens")
    bench = DecodeBench(
        config, load_hugging_face(CHECKPOINT, config, make_mesh()), max(batches), longest
    )
    shapes = [(batch, context) for batch in batches for context in CONTEXTS]
    timings = measure(bench, shapes, options.repeats)
    print(format_table(timings))
    for batch in sorted(set(BATCHES) - set(batches)):
        print(f"Batch {batch} was left out: its store takes too much memory.")
    if options.json:
        rows = [dataclasses.asdict(timing) | {"rest": timing.rest} for timing in timings]
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
