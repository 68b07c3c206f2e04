"""The trunk, run on groups of rows of several sequences against the paged store.

Everything here runs inside one `shard_map`: arrays are one device's part, and the collectives are
written out. Queries of all heads meet the rows on the device that owns them; a global top-k and a
merge of partial attention make the result exact.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from glm53.model.config import GLMConfig
from glm53.model.layer_plan import LayerIndex, layer_indices, run_layers
from glm53.model.params import GLMModel
from glm53.model.rope import rope_angles
from glm53.model.row_tiles import map_row_tiles
from kvcache.device.pytree import pytree_dataclass
from kvcache.device.resolve import (
    MAX_ROWS_TO_RESOLVE,
    StagedPages,
    resolve_selection,
    score_row_cache,
    stage_layer,
)
from kvcache.device.store import MESH_AXIS, KVStore, append_index_keys, append_rows
from kvcache.geometry import KVGeometry
from pallas_kernels.common.implementation import default_implementation
from pallas_kernels.index_scores import MAX_SEQUENCES, batched_index_scores
from pallas_kernels.select_topk import merge_topk, select_topk
from pallas_kernels.sparse_attention import sparse_attention

_SCORED_ROWS = 64  # rows of one sequence that share a read of its index keys
_SCORE_BYTES = 128 << 20  # scores that exist at a time, on one device


@pytree_dataclass
class Rows:
    """The token rows of a step, in groups that belong to one sequence each.

    Attributes:
        positions: int32 [groups, rows], position of each row in its sequence's pages, ascending
            within a group; -1 is padding, which reads and writes nothing.
        slots: int32 [groups], slot of each group's sequence; -1 is padding.
        block_tables: int32 [groups, context_pages], the first pages of each group's sequence.
    """

    positions: Int[Array, "groups rows"]
    slots: Int[Array, " groups"]
    block_tables: Int[Array, "groups context_pages"]

    @property
    def flat_positions(self) -> Int[Array, " tokens"]:
        """Positions of all rows."""
        return self.positions.reshape(-1)

    @property
    def flat_tables(self) -> Int[Array, "tokens context_pages"]:
        """The block table of each row."""
        return jnp.repeat(self.block_tables, self.positions.shape[1], axis=0)


@pytree_dataclass
class Selection:
    """Selection of a full layer, which the shared layers after it reuse.

    Attributes:
        positions: int32 [tokens, index_topk], ascending, then -1.
        row_ids: int32 [tokens, index_topk], this device's physical rows in the same order, -1 where
            another device owns the position.
        staged: host pages that each layer stages before it attends; None without a host tier.
    """

    positions: Int[Array, "tokens k"]
    row_ids: Int[Array, "tokens k"]
    staged: StagedPages | None


@pytree_dataclass
class LayerTrace:
    """Outputs of each trunk layer.

    Attributes:
        hidden: [layers, tokens, hidden], hidden states after the layer.
        selected: int32 [layers, tokens, index_topk], positions that it attended to.
    """

    hidden: Float[Array, "layers tokens hidden"]
    selected: Int[Array, "layers tokens k"]


class Forward:
    """The model bound to its config, store geometry and the rows of one step.

    Args:
        model: parameters, this device's part.
        config: the model's configuration.
        geometry: the store's sizes.
        rows: the rows to compute.
        position_lag: RoPE position of a row is its position minus this; 1 for the MTP layer, whose
            row from token p + 1 and the hidden state of p lies in slot p + 1. Positions below it
            are never selected.
    """

    def __init__(
        self,
        model: GLMModel,
        config: GLMConfig,
        geometry: KVGeometry,
        rows: Rows,
        position_lag: int = 0,
    ) -> None:
        self.model, self.config, self.geometry, self.rows = model, config, geometry, rows
        self.first_position = position_lag
        self.device = lax.axis_index(MESH_AXIS)
        self.positions = rows.flat_positions
        self.tables = rows.flat_tables
        page_index = jnp.maximum(self.positions, 0) // geometry.rows_per_page
        self.pages = jnp.take_along_axis(
            self.tables, page_index[:, None], axis=1, mode="fill", fill_value=-1
        )[:, 0]
        self.cos, self.sin = map_row_tiles(
            lambda positions: rope_angles(positions, config.rope_theta, config.qk_rope_head_dim),
            jnp.maximum(self.positions - position_lag, 0),
        )

    def embed(self, token_ids: Int[Array, " tokens"]) -> Float[Array, "tokens hidden"]:
        """Embeddings of tokens, each read on the device that holds it."""
        table = self.model.embed_tokens.weight[...]
        local = token_ids - self.device * table.shape[0]
        held = (local >= 0) & (local < table.shape[0])
        found = jnp.where(held[:, None], table[jnp.where(held, local, 0)], 0)
        return lax.psum(found, MESH_AXIS)

    def logits(self, hidden: Float[Array, "rows hidden"]) -> Float[Array, "rows vocab"]:
        """Logits of normalised hidden states, in float32, on every device."""
        return head_logits(self.model, hidden)

    def no_selection(self) -> Selection:
        """A selection of nothing, for a layer that makes its own."""
        nothing = jnp.full((self.positions.shape[0], self.config.index_topk), -1, jnp.int32)
        staged = StagedPages.none(self.geometry) if self.geometry.reads_host else None
        return Selection(nothing, nothing, staged)

    def trunk(
        self, store: KVStore, token_ids: Int[Array, " tokens"], trace: bool = False
    ) -> tuple[Float[Array, "tokens hidden"], KVStore, LayerTrace | None]:
        """Runs all trunk layers and the final norm.

        Args:
            store: updated with the rows' cache entries.
            token_ids: one token a row.
            trace: also return what each layer gave.
        """
        state = (self.embed(token_ids), store, self.no_selection())
        layers = layer_indices(self.config)[: self.config.num_hidden_layers]

        def run(index: LayerIndex, state: tuple) -> tuple:
            state = self.layer(index, *state)
            return state, (state[0], state[2].positions) if trace else None

        # Kernels mean a GPU, where a branch would wait for the host. On a CPU it saves a third of
        # the compile time.
        state, traced = run_layers(
            layers, run, state, single_scan=default_implementation() == "reference"
        )
        hidden, store, _ = state
        hidden = map_row_tiles(self.model.norm.bind(), hidden)
        return hidden, store, LayerTrace(*traced) if traced else None

    def layer(
        self,
        index: LayerIndex,
        hidden: Float[Array, "tokens hidden"],
        store: KVStore,
        selection: Selection,
    ) -> tuple[Float[Array, "tokens hidden"], KVStore, Selection]:
        """One decoder layer: attention, then the dense MLP or the experts."""
        with jax.named_scope("project"):
            query, store, selection = self._project(index, hidden, store, selection)
        with jax.named_scope("attend"):
            store = stage_layer(store, index.layer, selection.staged)
            attended = self._attend(index, query, store, selection)
        hidden = hidden + attended
        return hidden + self._mix(index, hidden), store, selection

    def _project(
        self, index: LayerIndex, hidden: jax.Array, store: KVStore, selection: Selection
    ) -> tuple[jax.Array, KVStore, Selection]:
        """Writes the rows' cache entries and, in a full layer, selects; gives local queries."""
        layers, geometry = self.model.layers, self.geometry
        norm = layers.input_layernorm.bind(index.layer)
        project = layers.self_attn.projector(index.layer)
        project_index = layers.indexer.projector(index.index_layer) if index.full is True else None

        def run(hidden: jax.Array, cos: jax.Array, sin: jax.Array) -> tuple:
            rows = norm(hidden)
            query_latent, query, latent, key = project(rows, cos, sin)
            if geometry.row_format.kind == "fp8":
                latent = latent.astype(jnp.float32)  # quantised before it is rounded
            if project_index is not None:
                return query, latent, key, project_index(rows, query_latent, cos, sin)
            return query, latent, key, None if index.full is False else (rows, query_latent)

        query, latent, key, indexed = map_row_tiles(run, hidden, self.cos, self.sin)
        where = (self.pages, self.positions, self.device)
        store = append_rows(store, geometry, index.layer, latent, key, *where)

        def index_rows(indexed: tuple[jax.Array, ...], store: KVStore) -> tuple[KVStore, Selection]:
            index_query, weights, keys = indexed
            store = append_index_keys(store, geometry, index.index_layer, keys, *where)
            with jax.named_scope("select"):
                return self._select(index, index_query, weights, store)

        if index.full is True:
            store, selection = index_rows(indexed, store)
        elif indexed is not None:

            def index_layer(_, state: tuple[KVStore, Selection]) -> tuple[KVStore, Selection]:
                project = layers.indexer.projector(index.index_layer)
                return index_rows(map_row_tiles(project, *indexed, self.cos, self.sin), state[0])

            # A loop, which unlike a branch updates arrays in place.
            times = jnp.asarray(index.full, jnp.int32)
            store, selection = lax.fori_loop(0, times, index_layer, (store, selection))
        return query, store, selection

    def _select(
        self, index: LayerIndex, query: jax.Array, weights: jax.Array, store: KVStore
    ) -> tuple[KVStore, Selection]:
        """The exact global top-k: each device's best, then the best of all devices'.

        What it selects is found, and staged as far as it is not on the device.
        """
        geometry = self.geometry
        num_groups, num_rows = self.rows.positions.shape
        num_local = self.rows.block_tables.shape[1] * geometry.rows_per_device
        context = jnp.arange(num_local) * geometry.num_devices + self.device
        together = min(num_rows, _SCORED_ROWS)
        chunks = -(-num_rows // together)

        def split(array: jax.Array, padding: int) -> jax.Array:
            """[tokens, ...] to [groups * chunks, together, ...]."""
            array = array.reshape(num_groups, num_rows, *array.shape[1:])
            widths = [(0, 0), (0, chunks * together - num_rows)] + [(0, 0)] * (array.ndim - 2)
            array = jnp.pad(array, widths, constant_values=padding)
            return array.reshape(-1, together, *array.shape[2:])

        def join(array: jax.Array) -> jax.Array:
            """The inverse of `split`."""
            array = array.reshape(num_groups, -1, *array.shape[2:])[:, :num_rows]
            return array.reshape(-1, *array.shape[2:])

        host = store.host if num_rows <= MAX_ROWS_TO_RESOLVE else None

        def select(batch: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            """[batch, together, ...] each to the best [batch, together, k] and row-cache rows'
            scores."""
            query, weights, positions, pages, slots = batch
            num_keys = jnp.max(positions, axis=1) // geometry.num_devices + 1
            scores = batched_index_scores(
                query,
                weights,
                store.index_keys,
                index.index_layer,
                jnp.maximum(pages, 0),
                num_keys,
                geometry.index_row_format,
            )
            best = select_topk(
                scores.reshape(-1, num_local),
                context,
                self.first_position,
                positions.reshape(-1),
                self.config.index_topk,
                ordered=False,
            )
            best = tuple(each.reshape(*positions.shape, -1) for each in best)
            if host is None:
                return best
            score_entries = partial(score_row_cache, host, index.index_layer)
            by_sequence = (slots, positions, scores)
            return *best, lax.map(lambda sequence: score_entries(*sequence), by_sequence)

        tables = jnp.repeat(self.rows.block_tables, chunks, axis=0)
        slots = jnp.repeat(self.rows.slots, chunks)
        chunked = (split(query, 0), split(weights, 0), split(self.positions, -1), tables, slots)
        most = min(max(1, _SCORE_BYTES // (4 * together * num_local)), MAX_SEQUENCES)
        scores, positions, *row_cache_scores = _map_batches(select, chunked, most)
        scores, positions = join(scores), join(positions)
        best = merge_topk(lax.all_gather(scores, MESH_AXIS), lax.all_gather(positions, MESH_AXIS))
        grouped = best.reshape(num_groups, num_rows, -1)
        store, row_ids, staged = resolve_selection(
            store,
            geometry,
            index.index_layer,
            index.layer,
            self.rows.slots,
            self.rows.block_tables,
            grouped,
            row_cache_scores[0] if row_cache_scores else None,
            self.device,
        )
        return store, Selection(best, row_ids.reshape(best.shape), staged)

    def _attend(
        self, index: LayerIndex, query: jax.Array, store: KVStore, selection: Selection
    ) -> jax.Array:
        """Attention of all heads to this device's rows, merged over devices for local heads."""
        scale = self.config.qk_head_dim**-0.5
        query = lax.all_gather(query, MESH_AXIS, axis=1, tiled=True)  # [tokens, heads, values]
        mixed, lse = sparse_attention(
            query,
            store.slab,
            None if store.host is None else store.host.slab,
            index.layer,
            selection.row_ids,
            scale,
            self.geometry.row_format,
        )
        shards = self.geometry.num_devices

        def exchange(array: jax.Array) -> jax.Array:
            """[tokens, heads, ...] to [shards, tokens, local heads, ...]."""
            by_owner = array.reshape(array.shape[0], shards, -1, *array.shape[2:])
            return lax.all_to_all(by_owner, MESH_AXIS, split_axis=1, concat_axis=0)

        finish = self.model.layers.self_attn.output(index.layer)
        local = map_row_tiles(finish, exchange(mixed), exchange(lse), axis=1)
        return lax.psum(local, MESH_AXIS)

    def _mix(self, index: LayerIndex, hidden: jax.Array) -> jax.Array:
        """The dense MLP or the experts."""

        def dense(hidden: jax.Array) -> jax.Array:
            with jax.named_scope("dense"):
                return self._dense(index, hidden)

        def experts(hidden: jax.Array) -> jax.Array:
            with jax.named_scope("experts"):
                return self._experts(index, hidden)

        if isinstance(index.sparse, bool):
            return experts(hidden) if index.sparse else dense(hidden)
        return lax.cond(index.sparse, experts, dense, hidden)

    def _dense(self, index: LayerIndex, hidden: jax.Array) -> jax.Array:
        norm = self.model.layers.post_attention_layernorm.bind(index.layer)
        mlp = self.model.layers.dense_mlp.bind(index.mlp_layer)
        return lax.psum(map_row_tiles(lambda rows: mlp(norm(rows)), hidden), MESH_AXIS)

    def _experts(self, index: LayerIndex, hidden: jax.Array) -> jax.Array:
        moe = self.model.layers.moe
        norm = self.model.layers.post_attention_layernorm.bind(index.layer)
        route, shared = moe.gate.bind(index.mlp_layer), moe.shared_experts.bind(index.mlp_layer)

        def run(hidden: jax.Array) -> tuple[jax.Array, ...]:
            rows = norm(hidden)
            return rows, *route(rows), shared(rows)

        rows, experts, weights, mixed = map_row_tiles(run, hidden)
        experts = jnp.where(self.positions[:, None] >= 0, experts, moe.num_experts)
        routed = moe.run_experts(index.mlp_layer, rows, experts, weights)
        return lax.psum(routed + mixed, MESH_AXIS)


def head_logits(model: GLMModel, hidden: Float[Array, "rows hidden"]) -> Float[Array, "rows vocab"]:
    """Logits of normalised hidden states, in float32, on every device; inside `shard_map`."""
    head = model.lm_head.bind()
    local = map_row_tiles(lambda rows: head(rows).astype(jnp.float32), hidden)
    return lax.all_gather(local, MESH_AXIS, axis=1, tiled=True)


def _map_batches(
    function: Callable[[tuple[jax.Array, ...]], tuple[jax.Array, ...]],
    arrays: tuple[jax.Array, ...],
    most: int,
) -> tuple[jax.Array, ...]:
    """`function` of equal batches of at most `most` along the first axis, one after another."""
    size = arrays[0].shape[0]
    batch = max(number for number in range(1, min(most, size) + 1) if size % number == 0)
    if batch == size:
        return function(arrays)
    batches = tuple(x.reshape(-1, batch, *x.shape[1:]) for x in arrays)
    return jax.tree.map(lambda x: x.reshape(size, *x.shape[2:]), lax.map(function, batches))
