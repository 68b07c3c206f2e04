"""Plan of the layers: which are alike, and how they are looped over.

Layers come in two kinds twice: with an indexer or sharing a selection, and with a dense MLP or
experts. Whether a layer's kind is known when tracing is a matter of this module alone.

A layer's index into each parameter stack follows from the config: attention is stacked over all
layers, indexers over the full ones, dense MLPs and experts over theirs.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from glm53.model.config import GLMConfig

Index = int | Int[Array, ""]
"""Index into a stack, known when tracing or not."""

Flag = bool | Bool[Array, ""]
"""A layer's kind, known when tracing or not."""


@dataclasses.dataclass(frozen=True)
class LayerIndex:
    """A decoder layer's indices into the parameter stacks and the KV store, and its kind.

    Attributes:
        layer: index into the attention stack and the row slab.
        index_layer: index into the indexer stack and the index keys; of a shared layer, the index
            that the next full layer would have.
        mlp_layer: index into the stack of dense MLPs or of experts, whichever the layer has.
        full: the layer selects positions itself.
        sparse: the layer has experts.
    """

    layer: Index
    index_layer: Index
    mlp_layer: Index
    full: Flag
    sparse: Flag


@dataclasses.dataclass(frozen=True)
class Segment:
    """`layers`, run `repeats` times, each time further down the stacks."""

    layers: tuple[LayerIndex, ...]
    repeats: int


def layer_indices(config: GLMConfig) -> tuple[LayerIndex, ...]:
    """The trunk's layers, then the MTP layer where there is one."""
    full_before = dense_before = sparse_before = 0
    out = []
    kinds = list(zip(config.indexer_types, config.mlp_layer_types, strict=True))
    kinds += [("full", "sparse")] * config.num_nextn_predict_layers
    for layer, (indexer, mlp) in enumerate(kinds):
        full, sparse = indexer == "full", mlp == "sparse"
        mlp_layer = sparse_before if sparse else dense_before
        out.append(LayerIndex(layer, full_before, mlp_layer, full, sparse))
        full_before += full
        sparse_before += sparse
        dense_before += not sparse
    return tuple(out)


def index_groups(config: GLMConfig) -> tuple[int, ...]:
    """The trunk's layers by index group: a full layer, and the shared ones that follow it."""
    starts = [layer for layer, kind in enumerate(config.indexer_types) if kind == "full"]
    return tuple(
        end - start for start, end in itertools.pairwise([*starts, config.num_hidden_layers])
    )


def plan_segments(layers: Sequence[LayerIndex]) -> tuple[Segment, ...]:
    """Splits layers into runs of a repeated pattern, so that each pattern is compiled once.

    From the front, takes the pattern whose repeats save most; a layer that starts no repeated
    pattern stands alone. GLM-5.3 gives [F] x 3, [S S S F] x 18, [S] x 3.
    """
    segments, start = [], 0
    while start < len(layers):
        period, repeats = _best_pattern([(x.full, x.sparse) for x in layers[start:]])
        segments.append(Segment(tuple(layers[start : start + period]), repeats))
        start += period * repeats
    return tuple(segments)


def run_layers[State, Output](
    layers: Sequence[LayerIndex],
    full_layer: Callable[[LayerIndex, State], State],
    shared_layer: Callable[[LayerIndex, State], State],
    state: State,
    observe: Callable[[State], Output],
    *,
    single_scan: bool,
) -> tuple[State, Output]:
    """Runs layers one after another.

    Args:
        layers: the layers.
        full_layer: from a layer with an indexer and the state before it to the state after it.
        shared_layer: likewise, of a layer that shares a selection.
        state: what the first layer is given.
        observe: what to keep of the state after each layer.
        single_scan: whether all layers are one loop, in which both functions are compiled once,
            instead of a loop for each repeated pattern. It compiles in three quarters of the time;
            on a GPU the host would wait in every layer for its kind.

    Returns:
        The last state, and what was observed, stacked along a new first axis.
    """

    def run(index: LayerIndex, state: State) -> tuple[State, Output]:
        state = _run_kind(index, full_layer, shared_layer, state)
        return state, observe(state)

    if single_scan:
        return lax.scan(
            lambda state, number: run(_any_layer(layers, number), state),
            state,
            jnp.arange(len(layers)),
        )
    outputs = []
    for segment in plan_segments(layers):

        def run_pattern(
            state: State, repeat: Index, pattern: tuple[LayerIndex, ...] = segment.layers
        ) -> tuple[State, Output]:
            outputs = []
            for index in pattern:
                state, output = run(_advance(index, pattern, repeat), state)
                outputs.append(output)
            return state, jax.tree.map(lambda *x: jnp.stack(x), *outputs)

        if segment.repeats == 1:
            state, output = run_pattern(state, 0)
        else:
            state, output = lax.scan(run_pattern, state, jnp.arange(segment.repeats))
            output = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), output)
        outputs.append(output)
    return state, jax.tree.map(lambda *x: jnp.concatenate(x), *outputs)


def run_mlp[Rows](
    index: LayerIndex,
    experts: Callable[[Rows], Rows],
    dense: Callable[[Rows], Rows],
    rows: Rows,
) -> Rows:
    """Runs the MLP that a layer has on rows."""
    if isinstance(index.sparse, bool):
        return experts(rows) if index.sparse else dense(rows)
    return lax.cond(index.sparse, experts, dense, rows)


def _run_kind[State](
    index: LayerIndex,
    full_layer: Callable[[LayerIndex, State], State],
    shared_layer: Callable[[LayerIndex, State], State],
    state: State,
) -> State:
    """Runs the function of a layer's kind."""
    if isinstance(index.full, bool):
        return (full_layer if index.full else shared_layer)(index, state)
    # Loops of one turn or none, which unlike a branch update the store in place.
    full = index.full.astype(jnp.int32)
    for turns, layer in ((full, full_layer), (1 - full, shared_layer)):
        state = lax.fori_loop(0, turns, lambda _, state, layer=layer: layer(index, state), state)
    return state


def _any_layer(layers: Sequence[LayerIndex], number: jax.Array) -> LayerIndex:
    """The layer of a number that is known only when the step runs.

    What is the same for all of them is known when tracing.
    """

    def look_up(field: str) -> Any:
        values = [getattr(layer, field) for layer in layers]
        return values[0] if len(set(values)) == 1 else jnp.array(values)[number]

    return LayerIndex(*(look_up(field.name) for field in dataclasses.fields(LayerIndex)))


def _advance(index: LayerIndex, pattern: tuple[LayerIndex, ...], repeat: Index) -> LayerIndex:
    """The layer that stands for this one in a later repeat of its pattern."""
    return dataclasses.replace(
        index,
        layer=index.layer + repeat * len(pattern),
        index_layer=index.index_layer + repeat * sum(x.full for x in pattern),
        mlp_layer=index.mlp_layer + repeat * sum(x.sparse == index.sparse for x in pattern),
    )


def _best_pattern(kinds: list[tuple[Flag, Flag]]) -> tuple[int, int]:
    best = (1, 1)
    for period in range(1, len(kinds) // 2 + 1):
        repeats = 1
        while kinds[repeats * period : (repeats + 1) * period] == kinds[:period]:
            repeats += 1
        if period * (repeats - 1) > best[0] * (best[1] - 1):
            best = (period, repeats)
    return best
