"""Time of a decode step with pages in host memory, against stores with all pages on the device.

Runs the 62M-parameter checkpoint on one cache of random numbers in four variants:

* without a host tier;
* with one, but all pages on the device;
* with only the newest pages on the device, and every other selected row in the row cache;
* the same, but with a share of those rows dropped from the row cache before each step, which must
  stage them again.

The last three run the same compiled step. Each variant repeats one step, so all of them select the
same rows, and their logits must be equal. Variants take turns; medians and quartiles are reported.

usage: python benchmarks/cpu/hybrid_decode.py [--repeats N] [--miss-share X] [--json FILE]
"""

import argparse
import dataclasses
import json
import operator
import statistics
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Int

from benchmarks.common.sequences import float32_geometry, set_sequences
from benchmarks.common.small_checkpoint import ensure_checkpoint
from glm53.checkpoint import load_hugging_face
from glm53.model.config import GLMConfig
from glm53.model.sharding import make_mesh
from glm53.model.steps import StepOutput, Steps
from kvcache import KVGeometry, KVStore, SequenceState
from kvcache.device.transitions import compiled_transitions
from kvcache.reads import Reads

CHECKPOINT = Path(__file__).parents[2] / ".cache" / "small-62m"
CONTEXTS = (8192, 16384)
BATCHES = (1, 4)
VARIANTS = ("no host tier", "all on the device", "all cached", "some missed")
NEWEST_PAGES = 2  # on the device, of a sequence whose other pages are in host memory
HOT_SELECTIONS = 4  # selections that fit in a sequence's row cache
MISS_SHARE = 0.05
_WARM_STEPS = 2


@dataclasses.dataclass(frozen=True)
class Timing:
    """Milliseconds of a decode step, by variant.

    Attributes:
        batch: number of sequences.
        context: tokens of each, including the one that the step appends.
        missed: share of the selected rows that the last variant stages.
        samples: milliseconds of each repeat, by variant.
    """

    batch: int
    context: int
    missed: float
    samples: Mapping[str, Sequence[float]]

    def median(self, variant: str) -> float:
        """Returns the median of a variant."""
        return statistics.median(self.samples[variant])

    def ratio(self, variant: str, base: str) -> float:
        """Returns the median of one variant over that of another."""
        return self.median(variant) / self.median(base)


class Decoder:
    """Store with a sequence in every slot, and a repeatable decode step of them.

    Args:
        steps: steps of a float32 model whose store can hold all sequences on the device.
        params: parameters of the model.
        context: tokens of each sequence, including the one that the step appends.
        resident_pages: number of newest pages of each sequence that lie on the device; the others
            are in the host tier only, and each slot has a row cache.
    """

    def __init__(self, steps: Steps, params: nnx.State, context: int, resident_pages: int) -> None:
        self._steps, self._params, self._context = steps, params, context
        geometry, config = steps.geometry, steps.config
        self._slots = jnp.arange(geometry.max_sequences, dtype=jnp.int32)
        shape = (geometry.max_sequences, geometry.max_pages_per_sequence)
        pages = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
        sequences = SequenceState.create(
            geometry, config.hidden_size, config.compute_dtype, steps.mesh
        )
        tables = jax.device_put(pages, sequences.block_table.sharding)
        self._sequences = dataclasses.replace(sequences, block_table=tables)
        self._store = self._fill(pages, resident_pages)

    def step(self) -> tuple[StepOutput, float]:
        """Runs the step; returns its output and its milliseconds."""
        no_tokens = jnp.zeros_like(self._sequences.last_token)
        self._sequences = set_sequences(self._sequences, self._context - 1, no_tokens)
        jax.block_until_ready((self._store, self._sequences))
        pages = self._steps.geometry.pages_for(self._context)
        start = time.perf_counter()
        output, self._store, self._sequences = self._steps.decode(
            self._params, self._store, self._sequences, self._slots, context_pages=pages
        )
        jax.block_until_ready((output, self._store, self._sequences))
        return output, (time.perf_counter() - start) * 1e3

    def reads(self) -> Reads[int]:
        """Returns the rows that steps have read since the store was made, summed over slots."""
        assert self._store.host is not None
        return Reads.unpack(np.asarray(self._store.host.reads).sum(0))

    def forget(self, count: int, seed: int) -> None:
        """Drops `count` random cached rows that the last step read, of each slot and index
        group."""
        host = self._store.host
        assert host is not None
        row = host.row_cache.row
        kept = jax.device_put(_forget(row, jax.random.key(seed), count), row.sharding)
        row_cache = dataclasses.replace(host.row_cache, row=kept)
        host = dataclasses.replace(host, row_cache=row_cache)
        self._store = dataclasses.replace(self._store, host=host)

    def _fill(self, pages: Int[np.ndarray, "slots pages"], resident_pages: int) -> KVStore:
        """Returns a store with pages assigned, full of normal numbers, the size of latents and
        keys."""
        geometry, shape = self._steps.geometry, pages.shape
        store = KVStore.create(geometry, self._steps.mesh)
        newest = np.arange(shape[1]) >= geometry.pages_for(self._context) - resident_pages
        indices = {
            "device_page_index": np.where(newest, pages, -1),
            "host_page_index": np.where(newest, -1, pages),
        }
        for name, assigned in indices.items():
            everywhere = np.full(geometry.num_pages, -1, np.int32)
            everywhere[: pages.size] = assigned.reshape(-1)
            sharding = getattr(store, name).sharding
            store = dataclasses.replace(store, **{name: jax.device_put(everywhere, sharding)})
        transitions = compiled_transitions(geometry, self._steps.mesh)
        rows = (geometry.num_layers, geometry.row_format.width)
        keys = (geometry.num_index_layers, geometry.index_row_format.width)
        for slot, listed in enumerate(pages):
            rng = np.random.default_rng(slot)
            drawn = (
                rng.standard_normal((shape[1], geometry.rows_per_page, *sizes), np.float32)
                for sizes in (rows, keys)
            )
            store = transitions.write(store, listed, *drawn)
        if not newest.all():
            leased_row_cache = pages.size + np.arange(
                shape[0] * geometry.row_cache_pages, dtype=np.int32
            )
            slots = np.arange(shape[0], dtype=np.int32)
            store = transitions.lease(store, slots, leased_row_cache.reshape(shape[0], -1))
        return store


@partial(jax.jit, static_argnums=2)
def _forget(row: Int[Array, "slots groups entries"], key: jax.Array, count: int) -> jax.Array:
    """Drops random rows of those in use, which repeats of one step all read."""
    drawn = jnp.where(row >= 0, jax.random.uniform(key, row.shape), -1.0)
    _, rows = lax.top_k(drawn, count)
    slots, groups = (jnp.arange(size) for size in row.shape[:2])
    return row.at[slots[:, None, None], groups[None, :, None], rows].set(-1)


class HybridBench:
    """Variants at one shape, warmed up.

    Args:
        config: a float32 model.
        params: its parameters.
        batch: number of sequences.
        context: tokens of each, including the one that the step appends.
        miss_share: share of the selected rows that the last variant stages.

    Raises:
        RuntimeError: variants differ in their logits, or read other rows than they should.
    """

    def __init__(
        self, config: GLMConfig, params: nnx.State, batch: int, context: int, miss_share: float
    ) -> None:
        resident = float32_geometry(config, batch, context)
        hybrid = _with_host_tier(resident, config.index_topk)
        plain, tiered = (Steps(config, geometry, make_mesh()) for geometry in (resident, hybrid))
        pages = resident.pages_for(context)
        self._decoders = {
            "no host tier": Decoder(plain, params, context, pages),
            "all on the device": Decoder(tiered, params, context, pages),
            "all cached": Decoder(tiered, params, context, NEWEST_PAGES),
        }
        # One store for both: the step that misses rows stages them again before the other reads
        # them.
        self._decoders["some missed"] = self._decoders["all cached"]
        self._forgotten = round(miss_share * config.index_topk)
        self._cells = batch * resident.num_index_layers
        self._seed = 0
        self.missed = self._forgotten / config.index_topk
        for decoder in self._decoders.values():
            for _ in range(_WARM_STEPS):
                decoder.step()
        self._check_logits()

    def step(self, variant: str) -> float:
        """Returns the milliseconds of a variant's step.

        Raises:
            RuntimeError: it read other rows than the variant should.
        """
        decoder = self._decoders[variant]
        if variant == "no host tier":
            return decoder.step()[1]
        if variant == "some missed":
            self._seed += 1
            decoder.forget(self._forgotten, self._seed)
        before = decoder.reads()
        _, milliseconds = decoder.step()
        found = jax.tree.map(operator.sub, decoder.reads(), before)
        missed = self._forgotten * self._cells if variant == "some missed" else 0
        in_host = variant != "all on the device"
        if (found.missed, found.staged, found.host) != (missed, missed, 0) or (
            found.row_cache > 0
        ) != in_host:
            raise RuntimeError(f"{variant!r} read {found}; {missed} rows should be missed")
        return milliseconds

    def _check_logits(self) -> None:
        logits = {}
        for name, decoder in self._decoders.items():
            if name == "some missed":
                decoder.forget(self._forgotten, self._seed)
            logits[name] = np.asarray(decoder.step()[0].logits)
        for name, found in logits.items():
            difference = np.abs(found - logits["no host tier"]).max()
            if difference:
                raise RuntimeError(f"logits of {name!r} differ by {difference}")


def _with_host_tier(resident: KVGeometry, index_topk: int) -> KVGeometry:
    """Returns a store that can hold all pages in either tier, and a row cache for each sequence."""
    tiered = dataclasses.replace(
        resident, host_pages=resident.device_pages, row_cache_rows=HOT_SELECTIONS * index_topk
    )
    row_cache_pages = resident.max_sequences * tiered.row_cache_pages
    return dataclasses.replace(tiered, device_pages=resident.device_pages + row_cache_pages)


def measure(bench: HybridBench, batch: int, context: int, repeats: int) -> Timing:
    """Times all variants in turns, beginning with another one in each repeat."""
    samples: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    for repeat in range(repeats):
        first = repeat % len(VARIANTS)
        for variant in (*VARIANTS[first:], *VARIANTS[:first]):
            samples[variant].append(bench.step(variant))
    return Timing(batch, context, bench.missed, samples)


def format_table(timings: Sequence[Timing]) -> str:
    """Formats medians, quartiles and the two ratios in Markdown."""
    lines = [
        f"| batch | context | {', ms | '.join(VARIANTS)}, ms | missed | all on the device, ratio "
        "| all cached, added | missed, added |",
        "|---|---|" + "---|" * (len(VARIANTS) + 4),
    ]
    for timing in timings:
        cells = []
        for variant in VARIANTS:
            low, middle, high = statistics.quantiles(timing.samples[variant], n=4)
            cells.append(f"{middle:.2f} ({low:.2f} to {high:.2f})")
        added = [timing.ratio(variant, VARIANTS[1]) - 1 for variant in VARIANTS[2:]]
        lines.append(
            f"| {timing.batch} | {timing.context:,} | {' | '.join(cells)} | {timing.missed:.1%} "
            f"| {timing.ratio(VARIANTS[1], VARIANTS[0]):.3f} | {added[0]:+.1%} | {added[1]:+.1%} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Runs the measurement."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--miss-share", type=float, default=MISS_SHARE)
    parser.add_argument("--json", type=Path, help="write the medians here")
    options = parser.parse_args()
    if options.repeats < 2:
        parser.error(f"--repeats must be at least 2, got {options.repeats}")
    if not 0 < options.miss_share <= 1:
        parser.error(f"--miss-share must be above 0 and at most 1, got {options.miss_share}")
    ensure_checkpoint(CHECKPOINT)
    config = GLMConfig.from_pretrained(CHECKPOINT)
    params = load_hugging_face(CHECKPOINT, config, make_mesh())
    timings = []
    for batch in BATCHES:
        for context in CONTEXTS:
            bench = HybridBench(config, params, batch, context, options.miss_share)
            timings.append(measure(bench, batch, context, options.repeats))
    print(format_table(timings))
    if options.json:
        rows = [
            {"batch": timing.batch, "context": timing.context, "missed": timing.missed}
            | {variant: timing.median(variant) for variant in VARIANTS}
            for timing in timings
        ]
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
