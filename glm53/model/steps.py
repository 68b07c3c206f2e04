"""The jitted steps: prefill, decode and draft.

Each is one `shard_map` over the mesh with its collectives inside and jit with donation outside.
Shapes come from buckets: the number of sequences and rows of a step, and `context_pages`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from glm53.model.config import GLMConfig
from glm53.model.forward import Forward, LayerTrace, Selection, head_logits
from glm53.model.indexer import positions_of_all_devices
from glm53.model.mtp import MTPLayer
from glm53.model.params import GLMModel, abstract_model
from glm53.model.sharding import check_mesh, parameter_specs
from glm53.model.step_batch import StepBatch
from kvcache.cache_compiled import cache_compiled
from kvcache.device.sequence_state import SequenceState
from kvcache.device.store import MESH_AXIS, KVStore, in_host, on_device
from kvcache.geometry import KVGeometry
from pallas_kernels.common.compiler_options import gpu_options
from pallas_kernels.common.pytree import make_unchecked, pytree_dataclass

# A step compiles in three quarters of the time, and runs no slower.
_CPU_COMPILER_OPTIONS = {"xla_backend_optimization_level": 1}

_EVERYWHERE = PartitionSpec()


@pytree_dataclass
class PrefillBatch:
    """Tokens to append to sequences.

    Attributes:
        slots: int32 [sequences], their slots, -1 for padding.
        num_rows: int32 [sequences], how many of each one's tokens count.
        token_ids: int32 [sequences, rows].
    """

    slots: Int[Array, " sequences"]
    num_rows: Int[Array, " sequences"]
    token_ids: Int[Array, "sequences rows"]


@pytree_dataclass
class StepOutput:
    """Results of a step for the host.

    Attributes:
        next_token: int32 [sequences], the greedy token after each one's last row.
        logits: float32 [sequences, vocab] of that row.
        hidden: [sequences, rows, hidden], the normalised hidden state of every row; `Steps.head`
            makes logits of them.
        reads: int32 [sequences, reads], `HostTier.reads` of each one's slot, which count what the
            step has read, each device's own; None where steps read no host pages.
        trace: what each trunk layer gave, if asked for.
    """

    next_token: Int[Array, " sequences"]
    logits: Float[Array, "sequences *rows vocab"]
    hidden: Float[Array, "sequences rows hidden"]
    reads: Int[Array, "sequences reads"] | None
    trace: LayerTrace | None


STEP_OUTPUT = make_unchecked(
    StepOutput,
    next_token=_EVERYWHERE,
    logits=_EVERYWHERE,
    hidden=_EVERYWHERE,
    reads=PartitionSpec(None, MESH_AXIS),
    trace=_EVERYWHERE,
)
"""Shardings of a `StepOutput` on the mesh."""


@pytree_dataclass
class DraftOutput:
    """Drafted tokens of each sequence.

    Attributes:
        token_ids: int32 [sequences, drafts], greedy.
        logits: float32 [sequences, drafts, vocab].
        selected: int32 [sequences, k], positions that the first draft row selected, ascending, then
            -1.
    """

    token_ids: Int[Array, "sequences drafts"]
    logits: Float[Array, "sequences drafts vocab"]
    selected: Int[Array, "sequences k"]


class PrefillStep(Protocol):
    """Step that appends tokens to sequences and returns the greedy token after each one's last."""

    def __call__(
        self,
        params: nnx.State,
        store: KVStore,
        sequences: SequenceState,
        batch: PrefillBatch,
        /,
        *,
        context_pages: int,
        trace: bool = False,
    ) -> tuple[StepOutput, KVStore, SequenceState]:
        """Runs the step."""
        ...


class DecodeStep(Protocol):
    """Step that appends each sequence's last sampled token and returns the next greedy one."""

    def __call__(
        self,
        params: nnx.State,
        store: KVStore,
        sequences: SequenceState,
        slots: Int[Array, " sequences"],
        /,
        *,
        context_pages: int,
    ) -> tuple[StepOutput, KVStore, SequenceState]:
        """Runs the step."""
        ...


class DraftStep(Protocol):
    """Step that drafts the tokens after each sequence's last sampled one, greedily."""

    def __call__(
        self,
        params: nnx.State,
        store: KVStore,
        sequences: SequenceState,
        slots: Int[Array, " sequences"],
        /,
        *,
        context_pages: int,
        num_drafts: int,
    ) -> tuple[DraftOutput, KVStore, SequenceState]:
        """Runs the step."""
        ...


class Steps:
    """The compiled steps of one model on one mesh.

    Store and sequences are donated to a step, which returns them changed. `context_pages` bounds
    the pages of every sequence in the step, the tokens it appends included.

    Args:
        config: the model's configuration.
        geometry: the store's sizes.
        mesh: where they run.
        single_scan: see `run_layers`; None is True on CPUs.

    Attributes:
        prefill: appends tokens to sequences.
        decode: appends a token to each sequence.
        draft: drafts tokens with the MTP layer.
        head: logits [rows, vocab] of normalised hidden states [rows, hidden].

    Raises:
        ValueError: the mesh does not divide a sharded axis, or is not the geometry's.
    """

    def __init__(
        self,
        config: GLMConfig,
        geometry: KVGeometry,
        mesh: Mesh,
        *,
        single_scan: bool | None = None,
    ) -> None:
        check_mesh(config, mesh)
        if mesh.size != geometry.num_devices:
            raise ValueError(
                f"num_devices {geometry.num_devices} of the KV geometry differs from the mesh's "
                f"{mesh.size} devices"
            )
        self.config, self.geometry, self.mesh = config, geometry, mesh
        self.graph, abstract = abstract_model(config)
        self.param_specs = parameter_specs(abstract)
        self.with_mtp = geometry.num_layers == config.num_layers > config.num_hidden_layers

        on_cpu = mesh.devices.flat[0].platform == "cpu"
        self._single_scan = on_cpu if single_scan is None else single_scan
        options = _CPU_COMPILER_OPTIONS if on_cpu else gpu_options(mesh)

        def jit(step: Callable, output: PartitionSpec | StepOutput, *static: str) -> Callable:
            return jax.jit(
                functools.partial(self._sharded, step, output),
                static_argnames=static,
                donate_argnums=(1, 2),
                out_shardings=(None, KVStore.shardings(geometry, mesh), None),
                compiler_options=options,
            )

        self.prefill: PrefillStep = jit(self._prefill, STEP_OUTPUT, "context_pages", "trace")
        self.decode: DecodeStep = jit(self._decode, STEP_OUTPUT, "context_pages")
        self.draft: DraftStep = jit(self._draft, _EVERYWHERE, "context_pages", "num_drafts")
        self.head: Callable[
            [nnx.State, Float[Array, "rows hidden"]], Float[Array, "rows vocab"]
        ] = jax.jit(self._head, compiler_options=options)

    def _head(
        self, params: nnx.State, hidden: Float[Array, "rows hidden"]
    ) -> Float[Array, "rows vocab"]:
        return jax.shard_map(
            lambda params, hidden: head_logits(nnx.merge(self.graph, params), hidden),
            mesh=self.mesh,
            in_specs=(self.param_specs, _EVERYWHERE),
            out_specs=_EVERYWHERE,
            check_vma=False,
        )(params, hidden)

    def _sharded(
        self,
        step: Callable,
        output: PartitionSpec | StepOutput,
        params: nnx.State,
        store: KVStore,
        sequences: SequenceState,
        batch: PrefillBatch | Int[Array, " sequences"],
        **static: object,
    ) -> tuple[StepOutput | DraftOutput, KVStore, SequenceState]:
        def local(params, store, sequences, batch):
            model = nnx.merge(self.graph, params)
            store = on_device(store)
            host = store.host
            if not self.geometry.reads_host:
                store = dataclasses.replace(store, host=None)
            output, store, sequences = step(model, store, sequences, batch, **static)
            if not self.geometry.reads_host:
                store = dataclasses.replace(store, host=host)
            return output, in_host(store), sequences

        return jax.shard_map(
            local,
            mesh=self.mesh,
            in_specs=(self.param_specs, KVStore.specs(self.geometry), _EVERYWHERE, _EVERYWHERE),
            out_specs=(output, KVStore.specs(self.geometry), _EVERYWHERE),
            check_vma=False,
        )(params, store, sequences, batch)

    def _prefill(
        self,
        model: GLMModel,
        store: KVStore,
        sequences: SequenceState,
        batch: PrefillBatch,
        *,
        context_pages: int,
        trace: bool = False,
    ) -> tuple[StepOutput, KVStore, SequenceState]:
        """Appends tokens to sequences and gives the greedy token after each one's last."""
        step_batch, slots = self._step_batch(
            sequences, batch.slots, batch.num_rows, batch.token_ids, context_pages
        )
        forward = Forward(model, self.config, self.geometry, step_batch)
        flat, store, traced = forward.trunk(
            store, batch.token_ids.reshape(-1), single_scan=self._single_scan, trace=trace
        )
        hidden = flat.reshape(*batch.token_ids.shape, -1)
        if self.with_mtp:
            # Row i of `before` is the hidden state before row i. A gather, so that the MTP layer's
            # writes wait for the trunk's reads even where a sequence has one row: else XLA copies
            # the store.
            states = jnp.concatenate([sequences.last_hidden[slots][:, None], hidden], axis=1)
            offsets = jnp.arange(batch.token_ids.shape[1])
            previous = jnp.minimum(offsets, batch.num_rows[:, None])
            before = jnp.take_along_axis(states, previous[..., None], axis=1)
            known = sequences.hidden_known[slots][:, None] | (offsets > 0)
            positions = jnp.where(known, step_batch.positions, -1)
            mtp_batch = dataclasses.replace(step_batch, positions=positions)
            mtp = MTPLayer(model, self.config, self.geometry, mtp_batch)
            _, store, _ = mtp.run(store, batch.token_ids.reshape(-1), before.reshape(flat.shape))
        last = jnp.maximum(batch.num_rows - 1, 0)[:, None, None]
        last_hidden = jnp.take_along_axis(hidden, last, axis=1)[:, 0]
        logits = forward.logits(last_hidden)
        next_token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        counted = (batch.slots >= 0) & (batch.num_rows > 0)
        target = jnp.where(counted, batch.slots, sequences.length.shape[0])
        sequences = dataclasses.replace(
            sequences,
            length=sequences.length.at[target].add(batch.num_rows, mode="drop"),
            last_token=sequences.last_token.at[target].set(next_token, mode="drop"),
            last_hidden=sequences.last_hidden.at[target].set(last_hidden, mode="drop"),
            hidden_known=sequences.hidden_known.at[target].set(True, mode="drop"),
        )
        reads = None if store.host is None else store.host.reads[slots]
        return StepOutput(next_token, logits, hidden, reads, traced), store, sequences

    def _decode(
        self,
        model: GLMModel,
        store: KVStore,
        sequences: SequenceState,
        slots: Int[Array, " sequences"],
        *,
        context_pages: int,
    ) -> tuple[StepOutput, KVStore, SequenceState]:
        """Appends each sequence's last sampled token and gives the next."""
        token_ids = sequences.last_token[jnp.maximum(slots, 0)][:, None]
        batch = PrefillBatch(slots, (slots >= 0).astype(jnp.int32), token_ids)
        return self._prefill(model, store, sequences, batch, context_pages=context_pages)

    def _draft(
        self,
        model: GLMModel,
        store: KVStore,
        sequences: SequenceState,
        slots: Int[Array, " sequences"],
        *,
        context_pages: int,
        num_drafts: int,
    ) -> tuple[DraftOutput, KVStore, SequenceState]:
        """Drafts the tokens after each sequence's last sampled one, greedily.

        The rows that drafts write beyond the sequence's length are overwritten when its tokens are
        known. With `index_share_for_mtp_iteration` the first row's selection serves all drafts.
        """
        token_ids = sequences.last_token[jnp.maximum(slots, 0)]
        hidden = sequences.last_hidden[jnp.maximum(slots, 0)]
        shared: Selection | None = None
        first: Selection | None = None
        tokens, logits = [], []
        for step in range(num_drafts):
            ones = jnp.ones_like(slots)[:, None]
            batch, _ = self._step_batch(
                sequences, slots, ones[:, 0], ones, context_pages, ahead=step
            )
            mtp = MTPLayer(model, self.config, self.geometry, batch)
            hidden, store, selection = mtp.run(store, token_ids, hidden, shared)
            first = selection if first is None else first
            if self.config.index_share_for_mtp_iteration:
                shared = first
            logits.append(mtp.forward.logits(hidden))
            token_ids = jnp.argmax(logits[-1], axis=-1).astype(jnp.int32)
            tokens.append(token_ids)
        assert first is not None
        selected = positions_of_all_devices(first.positions)
        output = DraftOutput(jnp.stack(tokens, 1), jnp.stack(logits, 1), selected)
        return output, store, sequences

    def _step_batch(
        self,
        sequences: SequenceState,
        slots: Int[Array, " sequences"],
        num_rows: Int[Array, " sequences"],
        token_ids: Int[Array, "sequences rows"],
        context_pages: int,
        ahead: int = 0,
    ) -> tuple[StepBatch, Int[Array, " sequences"]]:
        """Rows that follow each sequence's computed tokens, `ahead` further; and slots to read."""
        readable = jnp.maximum(slots, 0)
        offsets = jnp.arange(token_ids.shape[1], dtype=jnp.int32)
        positions = sequences.length[readable][:, None] + ahead + offsets
        counted = (offsets < num_rows[:, None]) & (slots >= 0)[:, None]
        tables = sequences.block_table[readable, :context_pages]
        return StepBatch(jnp.where(counted, positions, -1), slots, tables), readable


compiled_steps = cache_compiled(Steps)
"""`Steps` that are shared by all engines of the same config, geometry and mesh in a process."""
