"""Plan of the layers: which are alike, and which are compiled once and scanned.

A layer's place in each parameter stack follows from the config: attention is stacked over all
layers, indexers over the full ones, dense MLPs and experts over theirs.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from glm53.model.config import GLMConfig

Index = int | jax.Array
"""A place in a stack, known when tracing or not."""

Flag = bool | jax.Array
"""A layer's kind, known when tracing or not."""


@dataclasses.dataclass(frozen=True)
class LayerIndex:
    """A decoder layer's place in the parameter stacks and in the KV store.

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

    def as_shared(self) -> "LayerIndex":
        """The same layer reusing a selection instead of making its own."""
        return dataclasses.replace(self, full=False)


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
    run: Callable[[LayerIndex, State], tuple[State, Output]],
    state: State,
    *,
    single_scan: bool,
) -> tuple[State, Output]:
    """Runs layers one after another.

    Args:
        layers: the layers.
        run: from a layer and the state before it to the state after it and an output.
        state: what the first layer is given.
        single_scan: whether all layers are one loop that is compiled once and branches by their
            kinds, instead of a loop for each repeated pattern, where kinds are known when tracing.

    Returns:
        The last state, and the layers' outputs, stacked along a new first axis.
    """
    if single_scan:

        def run_any(state: State, number: jax.Array) -> tuple[State, Output]:
            return run(_any_layer(layers, number), state)

        return lax.scan(run_any, state, jnp.arange(len(layers)))
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


def _any_layer(layers: Sequence[LayerIndex], number: jax.Array) -> LayerIndex:
    """The layer of a number that is known only when the step runs.

    What is the same for all of them is known when tracing.
    """

    def look_up(field: str) -> Any:
        values = [getattr(layer, field) for layer in layers]
        return values[0] if len(set(values)) == 1 else jnp.array(values)[number]

    return LayerIndex(*(look_up(field.name) for field in dataclasses.fields(LayerIndex)))


def _advance(index: LayerIndex, pattern: tuple[LayerIndex, ...], repeat: Index) -> LayerIndex:
    """The layer that takes this one's place in a later repeat of its pattern."""
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
