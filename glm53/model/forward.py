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
from pallas_kernels.common.row_tiles import map_rows


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
        update: [tokens, hidden], what is to be added to it: the next norm does.
        store: the KV store.
        selection: the newest selection.
    """

    hidden: Float[Array, "tokens hidden"]
    update: Float[Array, "tokens hidden"]
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
        self.many_rows = batch.kind == "prefill"
        self.device = lax.axis_index(MESH_AXIS)
        self.positions = batch.flat_positions
        self.scored_keys = ScoredKeys.of(batch, geometry, self.device)
        page_index = jnp.maximum(self.positions, 0) // geometry.rows_per_page
        pages = jnp.take_along_axis(
            batch.flat_tables, page_index[:, None], axis=1, mode="fill", fill_value=-1
        )[:, 0]
        self.targets = (pages, self.positions, self.device)  # of the rows' cache entries
        self.cos, self.sin = map_rows(
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

    def first_state(self, store: KVStore, hidden: Float[Array, "tokens hidden"]) -> LayerState:
        """State of a layer that selects for itself."""
        return LayerState(hidden, jnp.zeros_like(hidden), store, self.no_selection())

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
            positions = positions_of_all_devices(state.selection.positions)
            return state.hidden + state.update, positions

        state, traced = run_layers(
            layer_indices(self.config)[: self.config.num_hidden_layers],
            self.full_layer,
            self.shared_layer,
            self.first_state(store, self.embed(token_ids)),
            observe,
            single_scan=single_scan,
        )
        _, hidden = map_rows(self.model.norm.bind_residual(), state.hidden, state.update)
        return hidden, state.store, LayerTrace(*traced) if traced else None

    def full_layer(self, index: LayerIndex, state: LayerState) -> LayerState:
        """Decoder layer that attends to what its own indexer selects.

        DeepSeek sparse attention: DeepSeek-V3.2 (arXiv:2512.02556), equations 1 and 2.
        """
        hidden, update, store, _ = state
        indexer = self.model.layers.indexer.projector(index.index_layer, many_rows=self.many_rows)
        hidden, query, kv_latent, k_pe, *indexed = self.project(index, hidden, update, indexer)
        index_query, head_weights, index_key = indexed
        store = self.append(index, store, kv_latent, k_pe)
        store = self.append_index_key(index, store, index_key)
        positions, summary = self.select(index, store, index_query, head_weights)
        store, selection = self.resolve(index, store, positions, summary)
        store, attended = self.attend(index, store, query, selection)
        hidden, update = self.mlp(index, hidden, self.output(index, attended))
        return LayerState(hidden, update, store, selection)

    def shared_layer(self, index: LayerIndex, state: LayerState) -> LayerState:
        """Decoder layer that attends to what the full layer before it selected.

        IndexShare (arXiv:2603.12201).
        """
        hidden, update, store, selection = state
        hidden, query, kv_latent, k_pe = self.project(index, hidden, update)
        store = self.append(index, store, kv_latent, k_pe)
        store, attended = self.attend(index, store, query, selection)
        hidden, update = self.mlp(index, hidden, self.output(index, attended))
        return LayerState(hidden, update, store, selection)

    @jax.named_scope("project")
    def project(
        self,
        index: LayerIndex,
        hidden: Float[Array, "tokens hidden"],
        update: Float[Array, "tokens hidden"],
        indexer: Callable[..., tuple[Array, ...]] | None = None,
    ) -> tuple[Array, ...]:
        """The updated residual stream; queries of local heads [tokens, heads, values], the KV
        latent [tokens, kv_lora_rank] and the rotated key [tokens, rope]; then what
        `Indexer.projector` gives, if there is one."""
        norm = self.model.layers.input_layernorm.bind_residual(index.layer)
        attention = self.model.layers.self_attn
        project = attention.projector(
            index.layer, self.geometry.row_format, many_rows=self.many_rows
        )

        def project_tile(hidden: Array, update: Array, *angles: Array) -> tuple[Array, ...]:
            hidden, rows = norm(hidden, update)
            query_latent, query, kv_latent, k_pe = project(rows, *angles)
            if self.geometry.row_format.kind == "fp8":
                kv_latent = kv_latent.astype(jnp.float32)  # quantised before it is rounded
            indexed = indexer(rows, query_latent, *angles) if indexer is not None else ()
            return hidden, query, kv_latent, k_pe, *indexed

        return map_rows(project_tile, hidden, update, self.cos, self.sin)

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
    ) -> tuple[KVStore, Float[Array, "devices tokens local_heads width"]]:
        """Attention of all heads to this device's selected rows, by the device of the heads."""
        query = lax.all_gather(query, MESH_AXIS)
        scale = self.config.qk_head_dim**-0.5
        return attend_rows(store, self.geometry, index.layer, query, selection.rows, scale)

    @jax.named_scope("output")
    def output(
        self, index: LayerIndex, attended: Float[Array, "devices tokens local_heads width"]
    ) -> Float[Array, "tokens hidden"]:
        """Local heads' attention, merged over the devices that own the rows, and projected."""
        attended = lax.all_to_all(attended, MESH_AXIS, split_axis=0, concat_axis=0)
        attention = self.model.layers.self_attn
        project = attention.output(index.layer, self.geometry.row_format, many_rows=self.many_rows)
        return lax.psum(map_rows(project, attended, axis=1), MESH_AXIS)

    def mlp(
        self,
        index: LayerIndex,
        hidden: Float[Array, "tokens hidden"],
        update: Float[Array, "tokens hidden"],
    ) -> tuple[Float[Array, "tokens hidden"], Float[Array, "tokens hidden"]]:
        """The dense MLP or the experts of a layer: the updated residual stream, and the update that
        they make to it."""
        experts, dense = partial(self._experts, index), partial(self._dense, index)
        return run_mlp(index, experts, dense, (hidden, update))

    @jax.named_scope("dense")
    def _dense(self, index: LayerIndex, state: tuple[Array, Array]) -> tuple[Array, Array]:
        norm = self.model.layers.post_attention_layernorm.bind_residual(index.layer)
        mlp = self.model.layers.dense_mlp.bind(index.mlp_layer, many_rows=self.many_rows)

        def run_tile(hidden: Array, update: Array) -> tuple[Array, Array]:
            hidden, rows = norm(hidden, update)
            return hidden, mlp(rows)

        hidden, update = map_rows(run_tile, *state)
        return hidden, lax.psum(update, MESH_AXIS)

    @jax.named_scope("experts")
    def _experts(self, index: LayerIndex, state: tuple[Array, Array]) -> tuple[Array, Array]:
        moe = self.model.layers.moe
        norm = self.model.layers.post_attention_layernorm.bind_residual(index.layer)
        score = moe.gate.bind(index.mlp_layer, many_rows=self.many_rows)

        def score_tile(hidden: Array, update: Array) -> tuple[Array, Array, Array]:
            hidden, rows = norm(hidden, update)
            return hidden, rows, score(rows)

        hidden, rows, scores = map_rows(score_tile, *state)
        kind = self.batch.kind
        update = moe.run(index.mlp_layer, rows, scores, self.positions, kind)
        return hidden, lax.psum(update, MESH_AXIS)


def head_logits(model: GLMModel, hidden: Float[Array, "rows hidden"]) -> Float[Array, "rows vocab"]:
    """Logits of normalised hidden states, in float32, on every device; inside `shard_map`."""
    head = model.lm_head.bind()
    local = map_rows(lambda rows: head(rows).astype(jnp.float32), hidden)
    return lax.all_gather(local, MESH_AXIS, axis=1, tiled=True)
