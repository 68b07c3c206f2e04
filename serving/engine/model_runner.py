"""The device side of generation: the store, the sequences in it, and launches over them.

A launch returns before the device is done, and its results are fetched later: meanwhile the host
plans the next one. What a launch needs of the one before it, such as the token that it sampled,
stays on the device.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from glm53.model.config import GLMConfig
from glm53.model.steps import PrefillBatch, StepOutput, compiled_steps
from kvcache import CacheCounters, DeviceState, KVCache, KVGeometry
from kvcache.device.sequence_state import SequenceState
from kvcache.device.store import KVStore
from kvcache.reads import no_reads
from serving.engine.buckets import Buckets, fit
from serving.engine.compile_notice import compile_notice
from serving.engine.launched import (
    Launched,
    Scores,
    SequenceResult,
    fetch_scores,
    start_transfers,
)
from serving.requests.outputs import TokenTexts
from serving.requests.sampling_params import MAX_LOGPROBS
from serving.requests.sequence import RequestSequence
from serving.sampling.logprobs import top_logprobs
from serving.sampling.sampler import Sampler
from serving.sampling.state import SamplingState
from serving.scheduler import DecodeBatch, Plan, PrefillChunk

_SCORED_ROWS = 128
"""Rows of a prompt whose log-probabilities are found at a time."""


class ModelRunner:
    """Launches steps for sequences in numbered slots.

    Args:
        config: the model.
        params: its parameters.
        geometry: sizes of the store.
        mesh: where everything is.
        buckets: shapes of the steps.
        token_texts: the tokens' texts, or None without a tokenizer.

    Attributes:
        config: the model.
        params: its parameters.
        geometry: sizes of the store.
        buckets: shapes of the steps.
        cache: the sequences' pages.
    """

    def __init__(
        self,
        config: GLMConfig,
        params: nnx.State,
        geometry: KVGeometry,
        mesh: Mesh,
        buckets: Buckets,
        token_texts: TokenTexts | None,
    ) -> None:
        self.config, self.geometry = config, geometry
        self.params, self._mesh, self.buckets = params, mesh, buckets
        self._token_texts = token_texts
        self._steps = compiled_steps(config, geometry, mesh)
        self._sampler = Sampler(config.vocab_size, geometry.max_sequences, mesh)
        self._closed = CacheCounters()
        self._used: set[str] = set()
        self._start_empty()

    def reset(self) -> None:
        """Forgets all sequences and builds an empty store, as after a step that failed."""
        self._whole = False
        self._closed, self.cache.total = self.counters, CacheCounters()
        # Freed first: memory may not hold a second store.
        self._delete_store()
        self._start_empty()

    def delete(self) -> None:
        """Frees the memory of parameters and store; nothing can be launched any more."""
        self._whole = False
        self._delete_store()
        for array in jax.tree.leaves(self.params):
            array.delete()

    def _delete_store(self) -> None:
        self.cache.device.delete()
        for array in jax.tree.leaves(self._sampling):
            array.delete()

    def synchronize(self) -> None:
        """Waits until the device has done all that was launched."""
        self.cache.device.synchronize()
        jax.block_until_ready(self._sampling)

    @property
    def usable(self) -> bool:
        """Whether there is a store: a reset may have failed for want of memory."""
        lost = any(array.is_deleted() for array in jax.tree.leaves(self._sampling))
        return self._whole and not (lost or self.cache.device.deleted)

    @property
    def counters(self) -> CacheCounters:
        """Counters of the cache for all sequences that have ended."""
        return self._closed + self.cache.total

    @property
    def programs(self) -> list[tuple[str, Callable[[], object]]]:
        """Everything that serving may launch, by name, as launches of padding, which change nothing
        but that jax compiles what it launches. They may be called in any order."""
        buckets = self.buckets
        launches: list[tuple[str, Callable[[], object]]] = [
            (_prefill_name(rows, pages), partial(self._warm_up_prefill, rows, pages))
            for rows, pages in buckets.prefills
        ]
        launches += [
            (_decode_name(count, pages), partial(self._warm_up_decode, count, pages))
            for count in buckets.sequences
            for pages in buckets.context_pages
        ]
        return [*launches, ("cache", self._warm_up_cache)]

    def _warm_up_prefill(self, rows: int, pages: int) -> None:
        token_ids = np.zeros((1, rows), np.int32)
        output = self._prefill(_padding_slots(1), 0, token_ids, pages)
        self._warm_up_sampling(output)
        logits, size = self._head(output.hidden, 0), self._scored_rows
        for count in self._scored_counts:
            self._score(logits, jax.device_put(_padding_slots(size) + 1), (0,), [count])

    def _warm_up_decode(self, count: int, pages: int) -> None:
        self._warm_up_sampling(self._decode(_padding_slots(count), pages))

    def _warm_up_sampling(self, output: StepOutput) -> None:
        sampled = self._sample(_padding_slots(len(output.logits)), output.logits, output.next_token)
        for tokens in (sampled, output.next_token):
            for count in self._scored_counts:
                self._score(output.logits, tokens, None, [count])

    def _warm_up_cache(self) -> None:
        self._sampling = self._sampler.warm_up(self._sampling)
        self.cache.warm_up()

    def _start_empty(self) -> None:
        self.cache = KVCache(
            self.geometry,
            DeviceState(
                self.geometry,
                self._mesh,
                hidden_size=self.config.hidden_size,
                dtype=self.config.compute_dtype,
            ),
            max_step_rows=self.buckets.rows[-1],
            with_hidden=self._steps.with_mtp,
        )
        self._sampling = SamplingState.create(
            self.geometry.max_sequences, self.config.vocab_size, self._mesh
        )
        self._whole = True

    def run(self, plan: Plan[RequestSequence]) -> Launched:
        """Launches a plan, whose pages the scheduler has readied."""
        match plan:
            case PrefillChunk():
                return self.launch_prefill(plan)
            case DecodeBatch():
                return self.launch_decode(plan)

    def launch_prefill(self, chunk: PrefillChunk[RequestSequence]) -> Launched:
        """Appends a chunk to its sequence; the last one samples a token."""
        sequence, slot = chunk.sequence, chunk.slot
        if chunk.is_first and sequence.sampling is not None:
            self._sampling = self._sampler.assign(
                self._sampling, slot, sequence.sampling, sequence.output_ids
            )
        slots = np.array([slot], np.int32)
        rows = fit(self.buckets.rows, len(chunk.token_ids))
        token_ids = np.zeros((1, rows), np.int32)
        token_ids[0, : len(chunk.token_ids)] = chunk.token_ids
        context = self.buckets.prefill_context(rows, self.cache.num_pages(slot))
        output = self._prefill(slots, len(chunk.token_ids), token_ids, context)
        scores = None
        if sequence.scores_prompt:
            scores = self._score_prompt(sequence, chunk, output.hidden)
        if chunk.is_last:
            launched = self._next_tokens([sequence], slots, output)
        else:
            # Its greedy token, which is not used, shows when it is done.
            launched = start_transfers(
                Launched([sequence], slots, output.next_token, output.reads, samples=False)
            )
        return dataclasses.replace(launched, start=chunk.start, prompt_scores=scores)

    def launch_decode(self, batch: DecodeBatch[RequestSequence]) -> Launched:
        """Appends the last sampled token of each sequence, and samples the next ones."""
        sequences = batch.sequences
        slots = _padding_slots(fit(self.buckets.sequences, len(sequences)))
        slots[: len(sequences)] = list(sequences)
        max_pages = max(self.cache.num_pages(slot) for slot in sequences)
        output = self._decode(slots, fit(self.buckets.context_pages, max_pages))
        return self._next_tokens(list(sequences.values()), slots, output)

    def results(self, launched: Launched) -> list[SequenceResult]:
        """Results of a launch, in the order of its sequences; waits until the device is done.

        Launches are asked for theirs in their order.

        Raises:
            Exception: whatever went wrong on the device, in this launch or one before it.
        """
        sequences = launched.sequences
        texts = [self._token_texts if one.params.detokenize else None for one in sequences]
        tokens = np.asarray(launched.tokens)[: len(sequences)].tolist()
        logprobs = fetch_scores(launched.scores, tokens, texts)
        prompt = None
        if launched.prompt_scores is not None:
            entries = [
                fetch_scores(each, tokens, texts * len(each.counts))
                for each in launched.prompt_scores
            ]
            prompt = tuple(entry for some in entries for entry in some if entry is not None)
        if launched.reads is None:
            reads = no_reads(len(sequences))
        else:
            read = np.asarray(launched.reads)[: len(sequences)]
            reads = self.cache.note_reads(launched.slots[: len(sequences)], read)
        return [
            SequenceResult(
                sequence, token if launched.samples else None, entry, read, launched.start, prompt
            )
            for sequence, token, entry, read in zip(sequences, tokens, logprobs, reads, strict=True)
        ]

    def _prefill(
        self, slots: np.ndarray, num_rows: int, token_ids: np.ndarray, context_pages: int
    ) -> StepOutput:
        counts = np.array([num_rows], np.int32)
        batch = PrefillBatch(*jax.device_put((slots, counts, token_ids)))
        with self._first_use(_prefill_name(token_ids.shape[1], context_pages)):
            return self.cache.device.run(
                lambda store, sequences: self._steps.prefill(
                    self.params, store, sequences, batch, context_pages=context_pages
                )
            )

    def _decode(self, slots: np.ndarray, context_pages: int) -> StepOutput:
        placed = jax.device_put(slots)
        with self._first_use(_decode_name(len(slots), context_pages)):
            return self.cache.device.run(
                lambda store, sequences: self._steps.decode(
                    self.params, store, sequences, placed, context_pages=context_pages
                )
            )

    def _first_use(self, what: str) -> AbstractContextManager[None]:
        """Context of a launch, which says that the program is compiled if it may have to be."""
        if what in self._used:
            return contextlib.nullcontext()
        self._used.add(what)
        return compile_notice(what)

    def _next_tokens(
        self,
        sequences: list[RequestSequence],
        slots: np.ndarray,
        output: StepOutput,
    ) -> Launched:
        """The next token of each sequence: the step's own greedy one, or the sampler's."""
        tokens, sampled = output.next_token, _padding_slots(len(slots))
        for row, sequence in enumerate(sequences):
            if sequence.sampling is not None:
                sampled[row] = slots[row]
        if np.any(sampled >= 0):
            tokens = self._sample(sampled, output.logits, output.next_token)
        scores = self._score(
            output.logits, tokens, None, [sequence.params.logprobs for sequence in sequences]
        )
        return start_transfers(Launched(sequences, slots, tokens, output.reads, scores))

    def _sample(self, slots: np.ndarray, logits: jax.Array, greedy: jax.Array) -> jax.Array:
        def sample(
            store: KVStore, sequences: SequenceState
        ) -> tuple[jax.Array, KVStore, SequenceState]:
            tokens, self._sampling, sequences = self._sampler.sample(
                self._sampling, sequences, jax.device_put(slots), logits, greedy
            )
            return tokens, store, sequences

        with self._first_use(f"the sampler of {len(slots)}"):
            return self.cache.device.run(sample)

    def _score_prompt(
        self, sequence: RequestSequence, chunk: PrefillChunk[RequestSequence], hidden: jax.Array
    ) -> tuple[Scores, ...]:
        """Log-probabilities of the tokens after each row of a chunk."""
        first, last = chunk.start + 1, chunk.start + len(chunk.token_ids) + 1
        following, size = sequence.token_ids[first:last], self._scored_rows
        found = []
        for start in range(0, len(following), size):
            tokens = following[start : start + size]
            padded = np.zeros(size, np.int32)
            padded[: len(tokens)] = tokens
            logits = self._head(hidden, start)
            wanted = [sequence.params.prompt_logprobs] * len(tokens)
            scores = self._score(logits, jax.device_put(padded), tokens, wanted)
            assert scores is not None
            if scores.found.token_ids.shape[1] > MAX_LOGPROBS:
                # A long prompt's whole distributions would fill the device.
                scores = dataclasses.replace(scores, found=jax.device_get(scores.found))
            found.append(scores)
        return tuple(found)

    def _head(self, hidden: jax.Array, start: int) -> jax.Array:
        """Logits of some rows of a prefill step, from `start` on."""
        rows = _rows_from(hidden, np.int32(start), self._scored_rows)
        return self._steps.head(self.params, rows)

    def _score(
        self,
        logits: jax.Array,
        tokens: jax.Array,
        known: Sequence[int] | None,
        wanted: Sequence[int | None],
    ) -> Scores | None:
        """Log-probabilities of a token a row, with as many of the best as each row wants."""
        counts = [self.config.vocab_size if count == -1 else count for count in wanted]
        given = [count for count in counts if count is not None]
        if not given:
            return None
        found = top_logprobs(logits, tokens, count=fit(self._scored_counts, max(given)))
        for array in jax.tree.leaves(found):
            array.copy_to_host_async()
        return Scores(found, known, counts)

    @property
    def _scored_rows(self) -> int:
        return min(_SCORED_ROWS, self.buckets.rows[-1])

    @property
    def _scored_counts(self) -> tuple[int, ...]:
        """Numbers of best tokens that can be found: as many as may be asked for, or all."""
        vocab_size = self.config.vocab_size
        return tuple(sorted({min(MAX_LOGPROBS, vocab_size), vocab_size}))


def _prefill_name(rows: int, pages: int) -> str:
    return f"the prefill of {rows} rows, {pages} pages"


def _decode_name(count: int, pages: int) -> str:
    return f"the decode of {count}, {pages} pages"


def _padding_slots(count: int) -> np.ndarray:
    """Slots that are padding."""
    return np.full(count, -1, np.int32)


@partial(jax.jit, static_argnums=2)
def _rows_from(
    hidden: Float[Array, "1 rows width"], first: Int[Array, ""], size: int
) -> Float[Array, "size width"]:
    """`size` rows from `first` on, zeros beyond the last."""
    padded = jnp.pad(hidden[0], ((0, size), (0, 0)))
    return lax.dynamic_slice_in_dim(padded, first, size)
