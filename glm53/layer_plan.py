"""Which layers are alike, and which are compiled once and scanned.

A layer's place in each parameter stack follows from the config: attention is stacked over all
layers, indexers over the full ones, dense MLPs and experts over theirs.
"""

import dataclasses
import itertools
from collections.abc import Sequence

import jax

from glm53.config import GLMConfig

Index = int | jax.Array
"""A place in a stack, known when tracing or not."""


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
    full: bool
    sparse: bool

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


def _best_pattern(kinds: list[tuple[bool, bool]]) -> tuple[int, int]:
    best = (1, 1)
    for period in range(1, len(kinds) // 2 + 1):
        repeats = 1
        while kinds[repeats * period : (repeats + 1) * period] == kinds[:period]:
            repeats += 1
        if period * (repeats - 1) > best[0] * (best[1] - 1):
            best = (period, repeats)
    return best
