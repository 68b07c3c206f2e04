"""The lightning indexer: a light many-headed score that selects the positions to attend to.

DeepSeek-V3.2 (arXiv:2512.02556), equation 1: the score of a position is the sum over heads of
weight * relu(query . key).
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int, Shaped

from glm53.model.config import GLMConfig
from glm53.model.layer_plan import Index
from glm53.model.linear import Linear
from glm53.model.rope import apply_rope
from glm53.model.step_batch import StepBatch
from kvcache.device.resolve import ScoreSummary, summarize_scores
from kvcache.device.store import MESH_AXIS, KVStore
from kvcache.geometry import KVGeometry
from pallas_kernels.common.product import take
from pallas_kernels.index_scores import MAX_SEQUENCES, batched_index_scores
from pallas_kernels.select_topk import merge_topk, select_topk

_KEY_NORM_EPS = 1e-6
_ROWS_TOGETHER = 64  # rows of one sequence that share a read of its index keys
_SCORE_BYTES = 128 << 20  # scores that exist at a time, on one device


class KeyNorm(nnx.Module):
    """Layer norm of index keys, in float32."""

    def __init__(self, config: GLMConfig) -> None:
        shape = (config.num_index_layers, config.index_head_dim)
        dtype = config.compute_dtype
        self.weight = nnx.Param(jnp.zeros(shape, dtype), logical_axes=("layers", None))
        self.bias = nnx.Param(jnp.zeros(shape, dtype), logical_axes=("layers", None))

    def bind(self, index_layer: Index) -> Callable[[Array], Array]:
        """A function from keys [t, index_head_dim] to normalised float32 keys."""
        weight = take(self.weight[...], index_layer).astype(jnp.float32)
        bias = take(self.bias[...], index_layer).astype(jnp.float32)

        def apply(keys: Array) -> Array:
            keys = keys.astype(jnp.float32)
            keys = keys - jnp.mean(keys, axis=-1, keepdims=True)
            variance = jnp.mean(keys * keys, axis=-1, keepdims=True)
            return keys * lax.rsqrt(variance + _KEY_NORM_EPS) * weight + bias

        return apply


class Indexer(nnx.Module):
    """Indexer parameters of all full layers, stacked and replicated."""

    def __init__(self, config: GLMConfig) -> None:
        stack = (config.num_index_layers,)
        heads, width = config.index_n_heads, config.index_head_dim
        hidden = config.hidden_size
        self.wq_b = Linear(config, stack, (heads * width, config.q_lora_rank), ("index", "latent"))
        self.wk = Linear(config, stack, (width, hidden), ("index", "hidden"))
        self.k_norm = KeyNorm(config)
        self.weights_proj = Linear(
            config, stack, (heads, hidden), ("index", "hidden"), quantizable=False
        )
        self.config = config

    def projector(
        self, index_layer: Index, *, many_rows: bool
    ) -> Callable[..., tuple[Array, Array, Array]]:
        """A function from normalised rows [t, hidden], normalised query latents, cosines and sines
        to index queries [t, heads, width], head weights [t, heads] with all constant scales folded
        in (float32), and the index key [t, width] (float32).

        The first `qk_rope_head_dim` of the width are rotated.

        Args:
            index_layer: the indexer.
            many_rows: see `bind_together`.
        """
        config, norm = self.config, self.k_norm.bind(index_layer)
        wq_b, wk = (part.bind(index_layer, many_rows=many_rows) for part in (self.wq_b, self.wk))
        # So few outputs are one tile, in which many rows gain nothing.
        weigh_heads = self.weights_proj.bind(index_layer, dtype=jnp.float32)
        scale = (config.index_n_heads * config.index_head_dim) ** -0.5

        def rotate(values: Array, cos: Array, sin: Array) -> Array:
            pe, nope = jnp.split(values, [config.qk_rope_head_dim], axis=-1)
            return jnp.concatenate([apply_rope(pe, cos, sin), nope], axis=-1)

        def project(
            rows: Array, query_latent: Array, cos: Array, sin: Array
        ) -> tuple[Array, Array, Array]:
            query = wq_b(query_latent).reshape(-1, config.index_n_heads, config.index_head_dim)
            head_weights = weigh_heads(rows) * scale
            return rotate(query, cos, sin), head_weights, rotate(norm(wk(rows)), cos, sin)

        return project


class ScoredKeys(NamedTuple):
    """Keys that the rows of a step are scored against: the same in every layer.

    Rows are scored in chunks of one sequence each. XLA would compute these again in each layer.

    Attributes:
        position: int32 [context], position of each key of a sequence on this device.
        pages: int32 [chunks, context_pages], pages of each chunk's sequence, as far as it has any.
        num_keys: int32 [chunks], keys to score; of those from here on no row of a chunk selects.
        device: int32, this device's index along the mesh axis.
    """

    position: Int[Array, " context"]
    pages: Int[Array, "chunks context_pages"]
    num_keys: Int[Array, " chunks"]
    device: Int[Array, ""]

    @classmethod
    def of(cls, batch: StepBatch, geometry: KVGeometry, device: Int[Array, ""]) -> "ScoredKeys":
        """The keys of this device of a batch's sequences."""
        num_keys = batch.block_tables.shape[1] * geometry.rows_per_device
        positions = _in_chunks(batch, batch.flat_positions, -1)
        pages = jnp.repeat(jnp.maximum(batch.block_tables, 0), _num_chunks(batch), axis=0)
        return cls(
            jnp.arange(num_keys) * geometry.num_devices + device,
            pages,
            jnp.max(positions, axis=1) // geometry.num_devices + 1,
            device,
        )


def select_positions(
    store: KVStore,
    geometry: KVGeometry,
    batch: StepBatch,
    keys: ScoredKeys,
    index_layer: Index,
    query: Float[Array, "tokens heads width"],
    head_weights: Float[Array, "tokens heads"],
    *,
    first_position: int,
    index_topk: int,
) -> tuple[Int[Array, "tokens k"], ScoreSummary]:
    """Selects the positions with the highest index scores, exactly: each device's best, then the
    best of all devices'; inside `shard_map`.

    Args:
        store: the store, with the rows' index keys.
        geometry: its sizes.
        batch: the rows.
        keys: what they are scored against.
        index_layer: the indexer.
        query: index queries of the rows.
        head_weights: weight of each head's score.
        first_position: least position that may be selected.
        index_topk: maximum positions of a row.

    Returns:
        Positions of this device, ascending, then -1; and what the store keeps of its scores.
    """
    num_rows = batch.positions.shape[1]
    num_keys = keys.position.shape[0]

    def select(chunk: "_Chunks") -> tuple[Array, Array, ScoreSummary]:
        """Scores and positions of each row's best [chunks, rows, k], and the scores' summary."""
        scores = batched_index_scores(
            chunk.query,
            chunk.head_weights,
            store.index_keys,
            index_layer,
            chunk.pages,
            chunk.num_keys,
            geometry.index_row_format,
        )
        best_scores, positions = select_topk(
            scores.reshape(-1, num_keys),
            keys.position,
            first_position,
            chunk.positions.reshape(-1),
            index_topk,
            ordered=False,
        )
        shape = (*chunk.positions.shape, -1)
        summary = summarize_scores(store, index_layer, chunk.slots, chunk.positions, scores)
        return best_scores.reshape(shape), positions.reshape(shape), summary

    chunks = _Chunks(
        _in_chunks(batch, query),
        _in_chunks(batch, head_weights),
        _in_chunks(batch, batch.flat_positions, -1),
        keys.pages,
        keys.num_keys,
        jnp.repeat(batch.slots, _num_chunks(batch)),
    )
    bytes_of_chunk = 4 * chunks.positions.shape[1] * num_keys
    max_chunks = min(max(1, _SCORE_BYTES // bytes_of_chunk), MAX_SEQUENCES)
    scores, positions, summary = _map_batches(select, chunks, max_chunks)
    # [chunks, rows, k] to [tokens, k], without the padding at a sequence's end.
    scores, positions = (
        each.reshape(len(batch.slots), -1, each.shape[-1])[:, :num_rows].reshape(-1, each.shape[-1])
        for each in (scores, positions)
    )
    scores, positions = (lax.all_gather(each, MESH_AXIS) for each in (scores, positions))
    return merge_topk(scores, positions, keys.device), summary


def positions_of_all_devices(positions: Int[Array, "tokens k"]) -> Int[Array, "tokens k"]:
    """Selected positions of all devices, ascending, then -1, the same on every device."""
    if lax.axis_size(MESH_AXIS) == 1:
        return positions
    gathered = lax.all_gather(positions, MESH_AXIS, axis=1, tiled=True)
    last = jnp.iinfo(jnp.int32).max
    ordered = jnp.sort(jnp.where(gathered < 0, last, gathered), axis=1)[:, : positions.shape[1]]
    return jnp.where(ordered == last, -1, ordered)


class _Chunks(NamedTuple):
    """Rows of a step, cut into chunks of one sequence each that are scored together.

    Attributes:
        query: [chunks, rows, heads, width].
        head_weights: [chunks, rows, heads].
        positions: int32 [chunks, rows]; -1 is padding.
        pages: int32 [chunks, context_pages].
        num_keys: int32 [chunks].
        slots: int32 [chunks].
    """

    query: Float[Array, "chunks rows heads width"]
    head_weights: Float[Array, "chunks rows heads"]
    positions: Int[Array, "chunks rows"]
    pages: Int[Array, "chunks context_pages"]
    num_keys: Int[Array, " chunks"]
    slots: Int[Array, " chunks"]


def _num_chunks(batch: StepBatch) -> int:
    """Chunks of each sequence."""
    return -(-batch.positions.shape[1] // _ROWS_TOGETHER)


def _in_chunks(
    batch: StepBatch, array: Shaped[Array, "tokens ..."], padding: int = 0
) -> Shaped[Array, "chunks rows ..."]:
    """Rows of a batch, cut into chunks, the last of a sequence filled up."""
    num_sequences, num_rows = batch.positions.shape
    rows = min(num_rows, _ROWS_TOGETHER)
    array = array.reshape(num_sequences, num_rows, *array.shape[1:])
    missing = _num_chunks(batch) * rows - num_rows
    widths = [(0, 0), (0, missing)] + [(0, 0)] * (array.ndim - 2)
    array = jnp.pad(array, widths, constant_values=padding)
    return array.reshape(-1, rows, *array.shape[2:])


def _map_batches[Arrays, Outputs](
    function: Callable[[Arrays], Outputs], arrays: Arrays, max_size: int
) -> Outputs:
    """`function` of equal batches of at most `max_size` along the first axis, one after another."""
    size = len(jax.tree.leaves(arrays)[0])
    batch = max(number for number in range(1, min(max_size, size) + 1) if size % number == 0)
    if batch == size:
        return function(arrays)
    batches = jax.tree.map(lambda x: x.reshape(-1, batch, *x.shape[1:]), arrays)
    return jax.tree.map(lambda x: x.reshape(size, *x.shape[2:]), lax.map(function, batches))
