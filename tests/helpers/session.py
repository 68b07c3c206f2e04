"""A store and its sequences, driven step by step, with every size of a step under control."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from glm53.model.config import GLMConfig
from glm53.model.kv_geometry import kv_geometry
from glm53.model.sharding import make_mesh
from glm53.model.steps import DraftOutput, PrefillBatch, StepOutput, Steps, compiled_steps
from kvcache import KVStore, PagePool, SequenceState
from kvcache.device.sequence_state import assign_slot
from pallas_kernels.common.row_format import RowKind

_TAKEN_PAGES = 3


class Session:
    """A store and its sequences, driven step by step."""

    def __init__(
        self,
        config: GLMConfig,
        params: nnx.State,
        *,
        num_devices: int = 1,
        row_kind: RowKind = "float32",
        rows_per_device: int = 8,
        max_model_len: int = 512,
        max_sequences: int = 4,
        with_mtp: bool = False,
    ) -> None:
        pages = _TAKEN_PAGES + max_sequences * max_model_len // (rows_per_device * num_devices)
        geometry = kv_geometry(
            config,
            num_devices=num_devices,
            row_kind=row_kind,
            device_pages=pages,
            max_model_len=max_model_len,
            max_sequences=max_sequences,
            rows_per_device=rows_per_device,
            with_mtp=with_mtp,
        )
        self.steps = compiled_steps(config, geometry, make_mesh(num_devices))
        self.config, self.params, self.geometry = config, params, self.steps.geometry
        self.store = KVStore.create(self.geometry, self.steps.mesh)
        self.sequences = SequenceState.create(
            self.geometry, config.hidden_size, config.compute_dtype, self.steps.mesh
        )
        self.pool = PagePool(self.geometry.num_pages, lambda page: None)
        # A few pages taken first, so that no page of a sequence has the number of its position.
        self.pool.allocate(_TAKEN_PAGES)
        # Device pages in the opposite order, so that hardly any page is its own index.
        device_page_index = np.arange(self.geometry.device_pages, dtype=np.int32)[::-1]
        self.store = dataclasses.replace(
            self.store,
            device_page_index=jax.device_put(
                device_page_index, self.store.device_page_index.sharding
            ),
        )

    def open(self, slot: int, num_tokens: int) -> None:
        """Gives a sequence its pages, in an order that is not ascending."""
        pages = self.pool.allocate(self.geometry.pages_for(num_tokens))[::-1]
        table = np.full(self.geometry.max_pages_per_sequence, -1, np.int32)
        table[: len(pages)] = pages
        self.sequences = assign_slot(
            self.sequences, jnp.int32(slot), jnp.asarray(table), jnp.int32(0)
        )

    def append(
        self,
        tokens: dict[int, np.ndarray],
        *,
        rows: int | None = None,
        groups: int | None = None,
        context_pages: int | None = None,
        all_logits: bool = True,
        trace: bool = False,
    ) -> StepOutput:
        """One prefill step for several slots, with the logits [groups, rows, vocab] of all rows."""
        rows = rows or max(len(ids) for ids in tokens.values())
        groups = groups or len(tokens)
        slots = np.full(groups, -1, np.int32)
        counts = np.zeros(groups, np.int32)
        token_ids = np.zeros((groups, rows), np.int32)
        for group, (slot, ids) in enumerate(tokens.items()):
            slots[group], counts[group] = slot, len(ids)
            token_ids[group, : len(ids)] = ids
        batch = PrefillBatch(jnp.asarray(slots), jnp.asarray(counts), jnp.asarray(token_ids))
        output, self.store, self.sequences = self.steps.prefill(
            self.params,
            self.store,
            self.sequences,
            batch,
            context_pages=context_pages or self.geometry.max_pages_per_sequence,
            trace=trace,
        )
        return with_all_logits(self.steps, self.params, output) if all_logits else output

    def decode(self, *slots: int, context_pages: int | None = None) -> StepOutput:
        """One decode step; -1 is padding."""
        output, self.store, self.sequences = self.steps.decode(
            self.params,
            self.store,
            self.sequences,
            jnp.asarray(slots, jnp.int32),
            context_pages=context_pages or self.geometry.max_pages_per_sequence,
        )
        return output

    def draft(self, *slots: int, num_drafts: int) -> DraftOutput:
        output, self.store, self.sequences = self.steps.draft(
            self.params,
            self.store,
            self.sequences,
            jnp.asarray(slots, jnp.int32),
            context_pages=self.geometry.max_pages_per_sequence,
            num_drafts=num_drafts,
        )
        return output

    def set_last_token(self, slot: int, token: int) -> None:
        """Overrides the token that the next decode step appends."""
        last_token = self.sequences.last_token.at[slot].set(token)
        self.sequences = dataclasses.replace(self.sequences, last_token=last_token)


def with_all_logits(steps: Steps, params: nnx.State, output: StepOutput) -> StepOutput:
    """The output of a prefill with the logits of every row, not only of each group's last."""
    *groups, width = output.hidden.shape
    logits = steps.head(params, output.hidden.reshape(-1, width))
    return dataclasses.replace(output, logits=logits.reshape(*groups, -1))
