"""The device side of generation: the store, the sequences in it, and the steps over them."""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from glm53.config import GLMConfig
from glm53.steps import PrefillBatch, StepOutput, compiled_steps
from kvcache import CacheCounters, DeviceState, KVCache, KVGeometry
from serving.buckets import Buckets, fit
from serving.outputs import TokenLogprobs
from serving.request import Continuation
from serving.sampling.logprobs import top_logprobs
from serving.sampling.sampler import Sampler
from serving.sampling.state import SamplingState
from serving.sampling_params import MAX_LOGPROBS


class ModelRunner:
    """Runs steps for sequences in numbered slots.

    Args:
        config: the model.
        params: its parameters.
        geometry: sizes of the store.
        mesh: where everything is.
        buckets: shapes of the steps.
        decode_token: gives a token's text, or None without a tokenizer.

    Attributes:
        config: the model.
        params: its parameters.
        geometry: sizes of the store.
        cache: the sequences' pages.
    """

    def __init__(
        self,
        config: GLMConfig,
        params: nnx.State,
        geometry: KVGeometry,
        mesh: Mesh,
        buckets: Buckets,
        decode_token: Callable[[int], str] | None,
    ) -> None:
        self.config, self.geometry = config, geometry
        self.params, self._mesh, self._buckets = params, mesh, buckets
        self._decode_token = decode_token
        self._steps = compiled_steps(config, geometry, mesh)
        self._sampler = Sampler(config.vocab_size, geometry.max_sequences, mesh)
        self._closed = CacheCounters()
        self._start_empty()

    def reset(self) -> None:
        """Forgets all sequences and builds an empty store, as after a step that failed."""
        self._closed, self.cache.total = self.counters, CacheCounters()
        # Given up first: memory may not hold a second store.
        self.cache.device.delete()
        for array in jax.tree.leaves(self._sampling):
            array.delete()
        self._start_empty()

    @property
    def usable(self) -> bool:
        """Whether there is a store: a reset may have failed for want of memory."""
        lost = any(array.is_deleted() for array in jax.tree.leaves(self._sampling))
        return not (lost or self.cache.device.deleted)

    @property
    def counters(self) -> CacheCounters:
        """What the cache did for all sequences that have ended."""
        return self._closed + self.cache.total

    def _start_empty(self) -> None:
        self.cache = KVCache(
            self.geometry,
            DeviceState(
                self.geometry,
                self._mesh,
                hidden_size=self.config.hidden_size,
                dtype=self.config.compute_dtype,
            ),
            most_step_rows=self._buckets.rows[-1],
            with_hidden=self._steps.with_mtp,
        )
        self._sampling = SamplingState.create(
            self.geometry.max_sequences, self.config.vocab_size, self._mesh
        )

    def open(self, slot: int, sequence: Continuation) -> None:
        """Starts a sequence, with what the cache holds of its prompt and room for all of it.

        Raises:
            OutOfPagesError: the cache has too few free pages.
        """
        self.cache.open(
            slot,
            sequence.token_ids,
            sequence.most_cached_tokens,
            # Log-probabilities of the prompt need all its rows computed.
            use_prefix=sequence.params.prompt_logprobs is None,
        )
        if sequence.sampling is not None:
            self._sampling = self._sampler.assign(self._sampling, slot, sequence.sampling)

    def close(self, slot: int, sequence: Continuation) -> None:
        """Ends a sequence; its pages may serve others."""
        sequence.cache_counters = self.cache.close(slot)

    def prefill(self, slot: int, sequence: Continuation) -> tuple[int, TokenLogprobs | None]:
        """Computes what is left of a prompt, a chunk a step, and returns the token that follows.

        The log-probabilities of the prompt's tokens go to the sequence, if asked for.
        """
        wanted = sequence.params.prompt_logprobs
        found: list[TokenLogprobs | None] = [None]
        token_ids, done = sequence.token_ids, self.cache.length(slot)
        while True:
            rows = self._buckets.chunk(len(token_ids) - done)
            chunk = token_ids[done : done + rows]
            output = self._append(slot, chunk, rows, all_logits=wanted is not None)
            is_last = done + len(chunk) == len(token_ids)
            self.cache.advance(slot, chunk, prompt_complete=is_last)
            logits = output.logits
            if wanted is not None:
                following = token_ids[done + 1 : done + len(chunk) + 1]
                found += self._logprobs(logits[0], following, [wanted] * len(following))
                logits = logits[:, len(chunk) - 1]
            done += len(chunk)
            if is_last:
                break
        if wanted is not None:
            sequence.prompt_logprobs = found
        slots = np.array([slot], np.int32)
        return self._choose({slot: sequence}, slots, logits, output.next_token)[0]

    def _append(
        self, slot: int, token_ids: list[int], rows: int, *, all_logits: bool
    ) -> StepOutput:
        padded = np.zeros((1, rows), np.int32)
        padded[0, : len(token_ids)] = token_ids
        self.cache.prepare({slot: len(token_ids)}, staging=True)
        batch = PrefillBatch(
            jnp.array([slot], jnp.int32),
            jnp.array([len(token_ids)], jnp.int32),
            jnp.asarray(padded),
        )
        output, self.cache.device.store, self.cache.device.sequences = self._steps.prefill(
            self.params,
            self.cache.device.store,
            self.cache.device.sequences,
            batch,
            context_pages=self._context_pages([slot]),
            all_logits=all_logits,
        )
        return output

    def decode(
        self, sequences: Mapping[int, Continuation]
    ) -> list[tuple[int, TokenLogprobs | None]]:
        """Appends the last chosen token of the sequence in each slot, and returns the next ones."""
        slots = np.full(fit(self._buckets.sequences, len(sequences)), -1, np.int32)
        slots[: len(sequences)] = list(sequences)
        self.cache.prepare(dict.fromkeys(sequences, 1))
        output, self.cache.device.store, self.cache.device.sequences = self._steps.decode(
            self.params,
            self.cache.device.store,
            self.cache.device.sequences,
            jnp.asarray(slots),
            context_pages=self._context_pages(list(sequences)),
        )
        for slot, sequence in sequences.items():
            self.cache.advance(slot, sequence.output_ids[-1:])
        return self._choose(sequences, slots, output.logits, output.next_token)

    def _choose(
        self,
        sequences: Mapping[int, Continuation],
        slots: np.ndarray,
        logits: jax.Array,
        greedy: jax.Array,
    ) -> list[tuple[int, TokenLogprobs | None]]:
        """The next token of each sequence: the step's own greedy choice, or the sampler's."""
        chosen = greedy
        sampled = np.full_like(slots, -1)
        for row, (slot, sequence) in enumerate(sequences.items()):
            if sequence.sampling is not None:
                sampled[row] = slot
        if np.any(sampled >= 0):
            drawn, self._sampling, self.cache.device.sequences = self._sampler.sample(
                self._sampling, self.cache.device.sequences, jnp.asarray(sampled), logits
            )
            chosen = jnp.where(sampled >= 0, drawn, greedy)
        tokens = np.asarray(chosen)[: len(sequences)].tolist()
        wanted = [sequence.params.logprobs for sequence in sequences.values()]
        return list(zip(tokens, self._logprobs(logits, tokens, wanted), strict=True))

    def _logprobs(
        self, logits: jax.Array, tokens: list[int], wanted: list[int | None]
    ) -> list[TokenLogprobs | None]:
        """Log-probabilities of a token a row, with as many of the best as each row wants."""
        counts = [self.config.vocab_size if count == -1 else count for count in wanted]
        given = [count for count in counts if count is not None]
        if not given:
            return [None] * len(tokens)
        most = fit((min(MAX_LOGPROBS, self.config.vocab_size), self.config.vocab_size), max(given))
        padded = np.zeros(logits.shape[0], np.int32)
        padded[: len(tokens)] = tokens
        found = jax.device_get(top_logprobs(logits, jnp.asarray(padded), count=most))
        return [
            None
            if count is None
            else TokenLogprobs(
                token,
                float(found.chosen[row]),
                int(found.rank[row]),
                found.token_ids[row, :count],
                found.logprobs[row, :count],
                self._decode_token,
            )
            for row, (token, count) in enumerate(zip(tokens, counts, strict=True))
        ]

    def _context_pages(self, slots: list[int]) -> int:
        most_pages = max(len(self.cache.pages_of(slot)) for slot in slots)
        return fit(self._buckets.context_pages, most_pages)
