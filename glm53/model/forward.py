"""Forward pass of the decoder layers: the rows of a step against the paged store.

Everything here runs inside one `shard_map`: arrays are one device's part, and the collectives are
written out. Queries of all heads meet the rows on the device that owns them; a global top-k and a
merge of partial attention make the result exact.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from glm53.model.config import GLMConfig
from glm53.model.indexer import ScoredKeys, positions_of_all_devices, select_positions
from glm53.model.layer_plan import LayerIndex, layer_indices, run_layers, run_mlp
from glm53.model.params import GLMModel
from glm53.model.rope import rope_angles
from glm53.model.step_batch import StepBatch
from kvcache.device.attend import attend_rows
from kvcache.device.resolve import ResolvedRows, ScoreSummary, resolve_selection
from kvcache.device.store import MESH_AXIS, KVStore, append_index_keys, append_rows
from kvcache.geometry import KVGeometry
from pallas_kernels.common.pytree import pytree_dataclass
from pallas_kernels.common.row_tiles import map_row_tiles


@pytree_dataclass
class Selection:
    """Selection of a full layer, which the shared layers after it reuse.

    Attributes:
        positions: int32 [tokens, index_topk], those on this device, ascending, then -1.
        rows: where the store has them.
    """

    positions: Int[Array, "tokens k"]
    rows: ResolvedRows


class LayerState(NamedTuple):
    """State that a layer takes and gives.

    Attributes:
        hidden: [tokens, hidden], the residual stream.
        store: the KV store.
        selection: the newest selection.
    """

    hidden: Float[Array, "tokens hidden"]
    store: KVStore
    selection: Selection


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
        batch: the rows to compute.
        position_lag: RoPE position of a row is its position minus this; 1 for the MTP layer, whose
            row from token p + 1 and the hidden state of p lies at position p + 1. Positions below
            this are never selected.
    """

    def __init__(
        self,
        model: GLMModel,
        config: GLMConfig,
        geometry: KVGeometry,
        batch: StepBatch,
        position_lag: int = 0,
    ) -> None:
        self.model, self.config, self.geometry, self.batch = model, config, geometry, batch
        self.first_position = position_lag
        self.device = lax.axis_index(MESH_AXIS)
        self.positions = batch.flat_positions
        self.scored_keys = ScoredKeys.of(batch, geometry, self.device)
        page_index = jnp.maximum(self.positions, 0) // geometry.rows_per_page
        pages = jnp.take_along_axis(
            batch.flat_tables, page_index[:, None], axis=1, mode="fill", fill_value=-1
        )[:, 0]
        self.targets = (pages, self.positions, self.device)  # of the rows' cache entries
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
        return Selection(nothing, ResolvedRows.of_nothing(nothing, self.geometry))

    def trunk(
        self,
        store: KVStore,
        token_ids: Int[Array, " tokens"],
        *,
        single_scan: bool,
        trace: bool = False,
    ) -> tuple[Float[Array, "tokens hidden"], KVStore, LayerTrace | None]:
        """Runs all trunk layers and the final norm.

        Args:
            store: updated with the rows' cache entries.
            token_ids: one token a row.
            single_scan: see `run_layers`.
            trace: also return what each layer gave.
        """

        def observe(state: LayerState) -> tuple[Array, Array] | None:
            if not trace:
                return None
            return state.hidden, positions_of_all_devices(state.selection.positions)

        state, traced = run_layers(
            layer_indices(self.config)[: self.config.num_hidden_layers],
            self.full_layer,
            self.shared_layer,
            LayerState(self.embed(token_ids), store, self.no_selection()),
            observe,
            single_scan=single_scan,
        )
        hidden = map_row_tiles(self.model.norm.bind(), state.hidden)
        return hidden, state.store, LayerTrace(*traced) if traced else None

    def full_layer(self, index: LayerIndex, state: LayerState) -> LayerState:
        """Decoder layer that attends to what its own indexer selects.

        DeepSeek sparse attention: DeepSeek-V3.2 (arXiv:2512.02556), equations 1 and 2.
        """
        hidden, store, _ = state
        indexer = self.model.layers.indexer.projector(index.index_layer)
        query, kv_latent, k_pe, *indexed = self.project(index, hidden, indexer)
        index_query, head_weights, index_key = indexed
        store = self.append(index, store, kv_latent, k_pe)
        store = self.append_index_key(index, store, index_key)
        positions, summary = self.select(index, store, index_query, head_weights)
        store, selection = self.resolve(index, store, positions, summary)
        store, attn_output, lse = self.attend(index, store, query, selection)
        hidden = hidden + self.output(index, attn_output, lse)
        return LayerState(hidden + self.mlp(index, hidden), store, selection)

    def shared_layer(self, index: LayerIndex, state: LayerState) -> LayerState:
        """Decoder layer that attends to what the full layer before it selected.

        IndexShare (arXiv:2603.12201).
        """
        hidden, store, selection = state
        query, kv_latent, k_pe = self.project(index, hidden)
        store = self.append(index, store, kv_latent, k_pe)
        store, attn_output, lse = self.attend(index, store, query, selection)
        hidden = hidden + self.output(index, attn_output, lse)
        return LayerState(hidden + self.mlp(index, hidden), store, selection)

    @jax.named_scope("project")
    def project(
        self,
        index: LayerIndex,
        hidden: Float[Array, "tokens hidden"],
        indexer: Callable[..., tuple[Array, ...]] | None = None,
    ) -> tuple[Array, ...]:
        """Queries of local heads [tokens, heads, values], the KV latent [tokens, kv_lora_rank] and
        the rotated key [tokens, rope]; then what `Indexer.projector` gives, if there is one."""
        norm = self.model.layers.input_layernorm.bind(index.layer)
        project = self.model.layers.self_attn.projector(index.layer)

        def project_tile(hidden: Array, cos: Array, sin: Array) -> tuple[Array, ...]:
            rows = norm(hidden)
            query_latent, query, kv_latent, k_pe = project(rows, cos, sin)
            if self.geometry.row_format.kind == "fp8":
                kv_latent = kv_latent.astype(jnp.float32)  # quantised before it is rounded
            indexed = indexer(rows, query_latent, cos, sin) if indexer is not None else ()
            return query, kv_latent, k_pe, *indexed

        return map_row_tiles(project_tile, hidden, self.cos, self.sin)

    @jax.named_scope("append")
    def append(
        self,
        index: LayerIndex,
        store: KVStore,
        kv_latent: Float[Array, "tokens latent"],
        k_pe: Float[Array, "tokens rope"],
    ) -> KVStore:
        """Writes the rows' cache entries of a layer."""
        return append_rows(store, self.geometry, index.layer, kv_latent, k_pe, *self.targets)

    @jax.named_scope("append")
    def append_index_key(
        self, index: LayerIndex, store: KVStore, index_key: Float[Array, "tokens width"]
    ) -> KVStore:
        """Writes the rows' index keys of a full layer."""
        where = (index.index_layer, index_key, *self.targets)
        return append_index_keys(store, self.geometry, *where)

    @jax.named_scope("select")
    def select(
        self,
        index: LayerIndex,
        store: KVStore,
        query: Float[Array, "tokens heads width"],
        head_weights: Float[Array, "tokens heads"],
    ) -> tuple[Int[Array, "tokens k"], ScoreSummary]:
        """The positions that a full layer attends to, and what the store keeps of the scores."""
        return select_positions(
            store,
            self.geometry,
            self.batch,
            self.scored_keys,
            index.index_layer,
            query,
            head_weights,
            first_position=self.first_position,
            index_topk=self.config.index_topk,
        )

    @jax.named_scope("resolve")
    def resolve(
        self,
        index: LayerIndex,
        store: KVStore,
        positions: Int[Array, "tokens k"],
        summary: ScoreSummary,
    ) -> tuple[KVStore, Selection]:
        """Where the store has selected positions, for a full layer and those that share it."""
        store, rows = resolve_selection(
            store,
            self.geometry,
            index.index_layer,
            index.layer,
            self.batch.slots,
            self.batch.block_tables,
            positions.reshape(*self.batch.positions.shape, -1),
            summary,
            self.device,
        )
        return store, Selection(positions, rows)

    @jax.named_scope("attend")
    def attend(
        self,
        index: LayerIndex,
        store: KVStore,
        query: Float[Array, "tokens local_heads values"],
        selection: Selection,
    ) -> tuple[KVStore, Float[Array, "tokens heads latent"], Float[Array, "tokens heads"]]:
        """Attention of all heads to this device's selected rows, with its log-sum-exp."""
        query = lax.all_gather(query, MESH_AXIS, axis=1, tiled=True)
        scale = self.config.qk_head_dim**-0.5
        return attend_rows(store, self.geometry, index.layer, query, selection.rows, scale)

    @jax.named_scope("output")
    def output(
        self,
        index: LayerIndex,
        attn_output: Float[Array, "tokens heads latent"],
        lse: Float[Array, "tokens heads"],
    ) -> Float[Array, "tokens hidden"]:
        """Local heads' attention, merged over the devices that own the rows, and projected."""

        def exchange(array: Array) -> Array:
            """[tokens, heads, ...] to [devices, tokens, local heads, ...]."""
            by_device = array.reshape(
                array.shape[0], self.geometry.num_devices, -1, *array.shape[2:]
            )
            return lax.all_to_all(by_device, MESH_AXIS, split_axis=1, concat_axis=0)

        project = self.model.layers.self_attn.output(index.layer)
        return lax.psum(
            map_row_tiles(project, exchange(attn_output), exchange(lse), axis=1), MESH_AXIS
        )

    def mlp(
        self, index: LayerIndex, hidden: Float[Array, "tokens hidden"]
    ) -> Float[Array, "tokens hidden"]:
        """The dense MLP or the experts of a layer."""
        return run_mlp(index, partial(self._experts, index), partial(self._dense, index), hidden)

    @jax.named_scope("dense")
    def _dense(
        self, index: LayerIndex, hidden: Float[Array, "tokens hidden"]
    ) -> Float[Array, "tokens hidden"]:
        norm = self.model.layers.post_attention_layernorm.bind(index.layer)
        mlp = self.model.layers.dense_mlp.bind(index.mlp_layer)
        return lax.psum(map_row_tiles(lambda rows: mlp(norm(rows)), hidden), MESH_AXIS)

    @jax.named_scope("experts")
    def _experts(
        self, index: LayerIndex, hidden: Float[Array, "tokens hidden"]
    ) -> Float[Array, "tokens hidden"]:
        moe = self.model.layers.moe
        norm = self.model.layers.post_attention_layernorm.bind(index.layer)
        route, shared = moe.gate.bind(index.mlp_layer), moe.shared_experts.bind(index.mlp_layer)

        def route_tile(hidden: Array) -> tuple[Array, ...]:
            rows = norm(hidden)
            return rows, *route(rows), shared(rows)

        rows, experts, weights, shared_output = map_row_tiles(route_tile, hidden)
        experts = jnp.where(self.positions[:, None] >= 0, experts, moe.num_experts)
        routed_output = moe.run_experts(index.mlp_layer, rows, experts, weights)
        return lax.psum(routed_output + shared_output, MESH_AXIS)


def head_logits(model: GLMModel, hidden: Float[Array, "rows hidden"]) -> Float[Array, "rows vocab"]:
    """Logits of normalised hidden states, in float32, on every device; inside `shard_map`."""
    head = model.lm_head.bind()
    local = map_row_tiles(lambda rows: head(rows).astype(jnp.float32), hidden)
    return lax.all_gather(local, MESH_AXIS, axis=1, tiled=True)
