"""State of the sampler for each sequence slot, kept on the device."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int, UInt32

from kvcache.cache_compiled import cache_compiled
from pallas_kernels.common.pytree import pytree_dataclass

MAX_STOP_IDS = 128
"""Most stop ids of a request."""

MAX_LOGIT_BIAS = 1024
"""Most tokens of a request with a logit bias."""

MAX_BAD_WORDS = 256
"""Most bad words of a request."""

MAX_BAD_WORD_TOKENS = 16
"""Most tokens of a bad word."""

PROMPT_MARK = -(2**31)
"""The bit of `SamplingState.history` that marks a token of the prompt."""

_ALL_BITS = 2**32 - 1
_MAX_FLOAT32 = float(np.finfo(np.float32).max)


@pytree_dataclass
class SamplingState:
    """State by sequence slot, replicated on every device and donated.

    Attributes:
        temperature: float32 [slots]; below 1e-5 sampling is greedy.
        top_p: float32 [slots]; 1 is off.
        min_p: float32 [slots]; 0 is off.
        repetition_penalty: float32 [slots]; 1 is off.
        presence_penalty: float32 [slots]; 0 is off.
        frequency_penalty: float32 [slots]; 0 is off.
        top_k: int32 [slots]; 0 is off.
        key: uint32 [slots, 2], the random key that the seed gives.
        num_output: int32 [slots], tokens sampled so far.
        min_tokens: int32 [slots].
        stop_ids: int32 [slots, MAX_STOP_IDS], -1 is none; masked while fewer than `min_tokens`
            tokens are sampled.
        bias_ids: int32 [slots, MAX_LOGIT_BIAS], -1 is none.
        bias: float32 [slots, MAX_LOGIT_BIAS], added to those tokens' logits.
        allowed: uint32 [slots, vocab / 32 rounded up]; bit t mod 32 of word t div 32
            allows token t.
        bad_words: int32 [slots, MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS], each word's tokens at the end,
            -1 before them; a word of -1 only is none.
        recent: int32 [slots, MAX_BAD_WORD_TOKENS - 1], the last output tokens, -1 before the first.
        history: int32 [slots, vocab]; the sign bit marks a token of the prompt, the others count it
            in the output.
    """

    temperature: Float[Array, " slots"]
    top_p: Float[Array, " slots"]
    min_p: Float[Array, " slots"]
    repetition_penalty: Float[Array, " slots"]
    presence_penalty: Float[Array, " slots"]
    frequency_penalty: Float[Array, " slots"]
    top_k: Int[Array, " slots"]
    key: UInt32[Array, "slots 2"]
    num_output: Int[Array, " slots"]
    min_tokens: Int[Array, " slots"]
    stop_ids: Int[Array, "slots stop_ids"]
    bias_ids: Int[Array, "slots biased"]
    bias: Float[Array, "slots biased"]
    allowed: UInt32[Array, "slots words"]
    bad_words: Int[Array, "slots bad_words word_tokens"]
    recent: Int[Array, "slots word_tokens-1"]
    history: Int[Array, "slots vocab"]

    @classmethod
    def create(cls, max_sequences: int, vocab_size: int, mesh: Mesh) -> "SamplingState":
        """State with every slot greedy, without limits and without a history."""
        greedy = SlotSampling(temperature=0.0, seed=0).as_state(vocab_size)
        return _repeat(max_sequences, mesh)(greedy)

    @classmethod
    def num_bytes(cls, max_sequences: int, vocab_size: int) -> int:
        """Bytes that `create` takes on each device."""
        greedy = SlotSampling(temperature=0.0, seed=0).as_state(vocab_size)
        return max_sequences * sum(array.nbytes for array in jax.tree.leaves(greedy))


@cache_compiled
def _repeat(count: int, mesh: Mesh) -> Callable[[SamplingState], SamplingState]:
    def repeat(one: SamplingState) -> SamplingState:
        return jax.tree.map(lambda array: jnp.repeat(array, count, axis=0), one)

    return jax.jit(repeat, out_shardings=NamedSharding(mesh, PartitionSpec()))


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlotSampling:
    """Sampling of one request, on the host, with vLLM's names and meanings.

    Attributes:
        temperature: below 1e-5 is greedy.
        top_p: mass of the most likely tokens to keep; 1 is off.
        top_k: number of most likely tokens to keep; 0 is off.
        min_p: least probability to keep, relative to the most likely token's; 0 is off.
        repetition_penalty: divides positive and multiplies negative logits of tokens of prompt and
            output; 1 is off.
        presence_penalty: taken off the logits of tokens of the output; 0 is off.
        frequency_penalty: taken off for each time a token is in the output; 0 is off.
        seed: a signed or unsigned 64-bit integer.
        min_tokens: tokens before which no stop id is sampled.
        stop_ids: the ids that `min_tokens` is about; stopping itself is the host's.
        logit_bias: what to add to the logits of tokens.
        allowed_token_ids: the only tokens to sample from; None is all.
        bad_words: token sequences that the output shall not hold.
        prompt_token_ids: tokens of the prompt, for `repetition_penalty`.

    Raises:
        ValueError: there are more stop ids, biases, bad words or tokens of a word than a slot
            holds, no token is allowed, a bias is not a finite float32, or the seed has more than 64
            bits.
    """

    seed: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: int = 0
    stop_ids: Sequence[int] = ()
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[Sequence[int]] = ()
    prompt_token_ids: Sequence[int] = ()

    def __post_init__(self) -> None:
        _check_count("stop_ids", len(self.stop_ids), MAX_STOP_IDS, "ids")
        _check_count("logit_bias", len(self.logit_bias), MAX_LOGIT_BIAS, "tokens")
        _check_count("bad_words", len(self.bad_words), MAX_BAD_WORDS, "words")
        for number, word in enumerate(self.bad_words):
            _check_count(f"bad_words[{number}]", len(word), MAX_BAD_WORD_TOKENS, "tokens")
        if self.allowed_token_ids is not None and not len(self.allowed_token_ids):
            raise ValueError(
                "allowed_token_ids is empty: it must allow a token, or be None for all"
            )
        for token, bias in self.logit_bias.items():
            if not math.isfinite(bias) or abs(bias) > _MAX_FLOAT32:
                raise ValueError(f"logit_bias of token {token} must be finite, got {bias!r}")
        if not -(2**63) <= self.seed < 2**64:
            raise ValueError(f"seed must be a 64-bit integer, got {self.seed}")

    def as_state(self, vocab_size: int, output_ids: Sequence[int] = ()) -> SamplingState:
        """The state of one slot.

        Args:
            vocab_size: tokens of the model.
            output_ids: the output so far, from which a sequence goes on as if it had never stopped.

        Raises:
            ValueError: a token id is not in the vocabulary.
        """
        self._check_ids(vocab_size, output_ids)

        def float32(value: float) -> jax.Array:
            return jax.device_put(np.array([value], np.float32))

        def int32(values: int | Sequence[int] | np.ndarray) -> jax.Array:
            return jax.device_put(np.array([values], np.int32))

        bias = np.zeros((1, MAX_LOGIT_BIAS), np.float32)
        bias[0, : len(self.logit_bias)] = list(self.logit_bias.values())
        bad_words = [[]] * (MAX_BAD_WORDS - len(self.bad_words))
        words = [
            [-1] * (MAX_BAD_WORD_TOKENS - len(word)) + list(word)
            for word in (*self.bad_words, *bad_words)
        ]
        history = np.zeros(vocab_size, np.int32)
        history[list(self.prompt_token_ids)] = PROMPT_MARK
        np.add.at(history, list(output_ids), 1)
        recent = list(output_ids[-(MAX_BAD_WORD_TOKENS - 1) :])
        return SamplingState(
            temperature=float32(self.temperature),
            top_p=float32(self.top_p),
            min_p=float32(self.min_p),
            repetition_penalty=float32(self.repetition_penalty),
            presence_penalty=float32(self.presence_penalty),
            frequency_penalty=float32(self.frequency_penalty),
            top_k=int32(self.top_k),
            key=jax.device_put(_key_of(self.seed)[None]),
            num_output=int32(len(output_ids)),
            min_tokens=int32(self.min_tokens),
            stop_ids=int32(_padded(self.stop_ids, MAX_STOP_IDS)),
            bias_ids=int32(_padded(list(self.logit_bias), MAX_LOGIT_BIAS)),
            bias=jax.device_put(bias),
            allowed=jax.device_put(_allowed_bits(self.allowed_token_ids, vocab_size)[None]),
            bad_words=int32(np.array(words)),
            recent=int32([-1] * (MAX_BAD_WORD_TOKENS - 1 - len(recent)) + recent),
            history=int32(history),
        )

    def _check_ids(self, vocab_size: int, output_ids: Sequence[int]) -> None:
        named_ids = [
            ("output_ids", output_ids),
            ("stop_ids", self.stop_ids),
            ("logit_bias", self.logit_bias),
            ("allowed_token_ids", self.allowed_token_ids or ()),
            ("prompt_token_ids", self.prompt_token_ids),
            *((f"bad_words[{number}]", word) for number, word in enumerate(self.bad_words)),
        ]
        for name, ids in named_ids:
            for token in ids:
                if not 0 <= token < vocab_size:
                    raise ValueError(
                        f"{name} holds token id {token}, which is not in 0..{vocab_size - 1}"
                    )


def assign_sampling(
    state: SamplingState, slot: Int[Array, ""], values: SamplingState
) -> SamplingState:
    """Gives a slot to a new request, whose state is the one slot of `values`; -1 is no slot."""
    slot = jnp.where(slot >= 0, slot, len(state.num_output))
    return jax.tree.map(
        lambda array, value: array.at[slot].set(value[0], mode="drop"), state, values
    )


def _check_count(name: str, count: int, limit: int, what: str) -> None:
    if count > limit:
        raise ValueError(f"{name} has {count} {what}, the limit is {limit}")


def _padded(ids: Sequence[int], size: int) -> list[int]:
    return [*ids, *[-1] * (size - len(ids))]


def _key_of(seed: int) -> np.ndarray:
    # All 64 bits count: jax.random.key keeps 32 of them unless x64 is enabled.
    return np.array([seed >> 32 & _ALL_BITS, seed & _ALL_BITS], np.uint32)


def _allowed_bits(token_ids: Sequence[int] | None, vocab_size: int) -> np.ndarray:
    num_words = -(-vocab_size // 32)
    if token_ids is None:
        return np.full(num_words, _ALL_BITS, np.uint32)
    bits = np.zeros(num_words * 32, np.bool_)
    bits[list(token_ids)] = True
    return np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32)
