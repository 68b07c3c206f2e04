"""The multi-token-prediction layer: a decoder layer that drafts from the trunk's hidden states.

DeepSeek-V3 (arXiv:2412.19437), section 2.2; a selection shared by drafts: z.ai/blog/glm-5.2.

The row made from the hidden state of position p and the token at p + 1 lies at position p + 1, so
that a page's bytes depend only on tokens up to its own end. Position 0 holds nothing and is never
selected.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from glm53.model.config import GLMConfig
from glm53.model.forward import Forward, Selection
from glm53.model.layer_plan import layer_indices
from glm53.model.params import GLMModel
from glm53.model.step_batch import StepBatch
from kvcache.device.store import KVStore
from kvcache.geometry import KVGeometry
from pallas_kernels.common.row_tiles import map_rows


class MTPLayer:
    """The MTP layer bound to the rows of one step."""

    def __init__(
        self, model: GLMModel, config: GLMConfig, geometry: KVGeometry, batch: StepBatch
    ) -> None:
        assert model.mtp is not None
        self.head = model.mtp
        self.forward = Forward(model, config, geometry, batch, position_lag=1)
        self.index = layer_indices(config)[-1]

    def run(
        self,
        store: KVStore,
        token_ids: Int[Array, " tokens"],
        hidden: Float[Array, "tokens hidden"],
        shared: Selection | None = None,
    ) -> tuple[Float[Array, "tokens hidden"], KVStore, Selection]:
        """Runs the layer on rows and writes their cache entries.

        Args:
            store: the KV store.
            token_ids: the token of each row.
            hidden: normalised hidden state of the position before it: the trunk's in the first
                draft step, this layer's own output in later ones.
            shared: a selection to reuse instead of running the indexer.

        Returns:
            Normalised outputs, from which the next token's logits follow; the store; the selection.
        """
        enorm, hnorm = self.head.enorm.bind(), self.head.hnorm.bind()
        eh_proj, norm = (
            self.head.eh_proj.bind(many_rows=self.forward.many_rows),
            self.head.shared_head_norm.bind_residual(),
        )

        def combine(embedded: Array, hidden: Array) -> Array:
            return eh_proj(jnp.concatenate([enorm(embedded), hnorm(hidden)], axis=-1))

        inputs = map_rows(combine, self.forward.embed(token_ids), hidden)
        state = self.forward.first_state(store, inputs)
        if shared is None:
            state = self.forward.full_layer(self.index, state)
        else:
            state = self.forward.shared_layer(self.index, state._replace(selection=shared))
        _, outputs = map_rows(norm, state.hidden, state.update)
        return outputs, state.store, state.selection
