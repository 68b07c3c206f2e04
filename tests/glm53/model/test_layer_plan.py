import functools
import itertools
import json
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm53.model.config import GLMConfig
from glm53.model.layer_plan import (
    LayerIndex,
    Segment,
    layer_indices,
    plan_segments,
    run_layers,
    run_mlp,
)
from glm53.model.presets import preset, preset_names
from glm53.model.sharding import make_mesh
from glm53.model.steps import Steps
from tests.helpers.cached_session import CachedSession, StoredRows, as_bytes
from tests.helpers.golden import GOLDEN
from tests.helpers.random_models import micro_config, preset_params, random_tokens

# A public pattern for GLM-5 with no period.
IRREGULAR = "FFSFSSSFSSFFFSSSFFFSFSSSSSSFFSFFSFFSSFFFFFFSFFFFFSFFSSSSSSFSFFFSFSSSFSFFSFFSSS"

KIND = st.tuples(st.booleans(), st.booleans())
# Random kinds, repeated blocks between them, and few enough kinds for chance repeats.
KINDS = st.lists(
    st.builds(lambda block, times: block * times, st.lists(KIND, max_size=5), st.integers(1, 6)),
    max_size=5,
).map(lambda blocks: [kind for block in blocks for kind in block][:90])


def with_kinds(kinds: Sequence[tuple[bool, bool]], mtp_layers: int = 0) -> GLMConfig:
    """A config whose layers are (full, sparse); layer 0 is made full."""
    return preset("test-small").replace(
        num_hidden_layers=len(kinds),
        num_nextn_predict_layers=mtp_layers,
        indexer_types=("full", *("full" if full else "shared" for full, _ in kinds[1:])),
        mlp_layer_types=tuple("sparse" if sparse else "dense" for _, sparse in kinds),
    )


def expand(segments: Sequence[Segment]) -> list[LayerIndex]:
    """The layers that segments stand for, each repeat a whole pattern further down the stacks."""
    layers = []
    for segment in segments:
        pattern = segment.layers
        for repeat in range(segment.repeats):
            for x in pattern:
                layers.append(
                    LayerIndex(
                        layer=x.layer + repeat * len(pattern),
                        index_layer=x.index_layer + repeat * sum(y.full for y in pattern),
                        mlp_layer=x.mlp_layer + repeat * sum(y.sparse == x.sparse for y in pattern),
                        full=x.full,
                        sparse=x.sparse,
                    )
                )
    return layers


def shape(segments: Sequence[Segment]) -> list[tuple[str, int]]:
    """Each segment's indexers as letters, and its repeats."""
    return [("".join("SF"[x.full] for x in part.layers), part.repeats) for part in segments]


def check_indices(config: GLMConfig) -> None:
    """Compares each layer's indices with a count of the layers before it."""
    full = [kind == "full" for kind in config.indexer_types]
    sparse = [kind == "sparse" for kind in config.mlp_layer_types]
    full += [True] * config.num_nextn_predict_layers
    sparse += [True] * config.num_nextn_predict_layers
    layers = layer_indices(config)
    assert len(layers) == config.num_layers
    for n, layer in enumerate(layers):
        mlp_layer = sum(kind == sparse[n] for kind in sparse[:n])
        assert layer == LayerIndex(n, sum(full[:n]), mlp_layer, full[n], sparse[n])
    assert sum(layer.full for layer in layers) == config.num_index_layers
    assert sum(layer.sparse for layer in layers) == config.num_sparse_layers
    assert sum(not layer.sparse for layer in layers) == config.num_dense_layers


@given(kinds=KINDS.filter(bool), mtp_layers=st.integers(0, 1))
def test_indices(kinds: list[tuple[bool, bool]], mtp_layers: int) -> None:
    """A layer that reads another layer's parameters or cache."""
    check_indices(with_kinds(kinds, mtp_layers))


def test_indices_of_presets() -> None:
    """A released model's layer that reads another layer's parameters or cache."""
    for name in preset_names():
        check_indices(preset(name))


@given(kinds=KINDS.filter(bool), start=st.integers(0, 3))
def test_segments_stand_for_the_layers(kinds: list[tuple[bool, bool]], start: int) -> None:
    """A layer that is left out, run twice, or given another's index, and a repeat not used."""
    layers = layer_indices(with_kinds(kinds))[start:]
    segments = plan_segments(layers)
    assert expand(segments) == list(layers)
    for segment in segments:
        assert segment.repeats >= 1
        assert segment.layers and (segment.repeats > 1 or len(segment.layers) == 1)
    # Neighbours that are alike are never compiled twice.
    alone = [segment.layers[0] for segment in segments if segment.repeats == 1]
    for first, second in itertools.pairwise(alone):
        alike = (first.full, first.sparse) == (second.full, second.sparse)
        assert not alike or second.layer != first.layer + 1


@given(block=st.lists(KIND, min_size=1, max_size=6), times=st.integers(2, 12))
def test_repeats_are_found(block: list[tuple[bool, bool]], times: int) -> None:
    """A pattern, repeated to the end, of which more layers are compiled than it has."""
    layers = [LayerIndex(n, 0, 0, *kind) for n, kind in enumerate(block * times)]
    compiled = sum(len(segment.layers) for segment in plan_segments(layers))
    assert compiled <= len(block)


def test_released_plans() -> None:
    """A released model that compiles more layers than it has kinds."""
    for name, plan in {
        "glm-5.3": [("F", 3), ("SSSF", 18), ("S", 3)],
        "glm-5.2": [("F", 3), ("SSSF", 18), ("S", 3)],
        "glm-5": [("F", 3), ("F", 75)],
    }.items():
        config = preset(name)
        segments = plan_segments(layer_indices(config)[: config.num_hidden_layers])
        assert shape(segments) == plan
        assert [x.sparse for x in segments[0].layers] == [False]
    assert plan_segments([]) == ()


def test_irregular_plan() -> None:
    """A pattern without a period that is refused, or planned into other layers."""
    schedule = {"num_hidden_layers": 78, "index_topk_pattern": IRREGULAR, "mlp_layer_types": None}
    others = dict.fromkeys(("indexer_types", "index_topk_freq", "index_skip_topk_offset"))
    fields = json.loads((GOLDEN / "tiny_mtp" / "config.json").read_text(encoding="utf-8"))
    config = GLMConfig.from_hf(fields | others | schedule)
    check_indices(config)
    layers = layer_indices(config)[:78]
    segments = plan_segments(layers)
    assert expand(segments) == list(layers)
    assert "".join(letters * repeats for letters, repeats in shape(segments)) == IRREGULAR
    assert sum(len(segment.layers) for segment in segments) < len(IRREGULAR)


@pytest.mark.compiles
@pytest.mark.parametrize("single_scan", [True, False])
@pytest.mark.parametrize("letters", ["FFFSSSFS", "FFSFSFS", "FSFS", "FFF"])
def test_run_layers(letters: str, single_scan: bool) -> None:
    """A layer run in another's place, or an output at another's, in either form."""
    kinds = [(letter == "F", number > 2) for number, letter in enumerate(letters)]
    layers = layer_indices(with_kinds(kinds))[: len(kinds)]

    def layer(full: bool, index: LayerIndex, state: jax.Array) -> jax.Array:
        sparse = run_mlp(index, lambda _: jnp.int32(1), lambda _: jnp.int32(0), jnp.int32(-1))
        found = [index.layer, index.index_layer, index.mlp_layer, full, sparse]
        return jnp.stack([state[0] + 1, *(jnp.asarray(each, jnp.int32) for each in found)])

    state, outputs = run_layers(
        layers,
        functools.partial(layer, True),
        functools.partial(layer, False),
        jnp.full(6, -1, jnp.int32),
        lambda state: state,
        single_scan=single_scan,
    )
    assert state[0] == len(layers) - 1
    expected = [
        [x.layer, x.layer, x.index_layer, x.mlp_layer, x.full, x.sparse]  # in their order
        for x in layers
    ]
    np.testing.assert_array_equal(outputs, np.array(expected, np.int32))


@pytest.mark.compiles
def test_both_forms_give_the_same_bits() -> None:
    """One loop over all layers, which runs on CPUs, that does other than the loops of GPUs: in a
    model with a repeated pattern and a layer besides, and a cache with rows in each tier."""
    config = micro_config().replace(
        num_hidden_layers=5,
        indexer_types=("full", "shared", "full", "shared", "shared"),
        mlp_layer_types=("dense", "sparse", "dense", "sparse", "sparse"),
    )
    tokens, found = random_tokens(config, 70), []
    for single_scan in (True, False):
        session = CachedSession(
            config,
            preset_params(config, 1),
            max_step_rows=16,
            row_kind="float32",
            rows_per_device=4,
            device_pages=8,
            host_pages=14,
            row_cache_rows=8,
            staging_pages=1,
            max_sequences=1,
            max_model_len=72,
        )
        session.steps = Steps(config, session.geometry, make_mesh(), single_scan=single_scan)
        session.cache.open(0, tokens[:48].tolist(), 70)
        results, reads = [], []
        for start, rows in [
            *((start, 16) for start in range(0, 48, 16)),
            *((n, 2) for n in range(48, 70, 2)),
        ]:
            output, read = session.append(
                {0: tokens[start : start + rows]}, rows=rows, staging=rows > 2
            )
            assert output.trace is not None
            results += [output.logits, output.trace.hidden, output.trace.selected]
            reads.append(read)
        stored = StoredRows.of(session.cache.device.store)
        found.append(([as_bytes(each).tobytes() for each in results], reads, stored))
    (results, reads, stored), (others, other_reads, other_stored) = found
    assert results == others
    assert reads == other_reads
    for name in ("row_cache", "staged", "host"):
        assert sum(getattr(read, name) for read in reads) > 0
    held = stored.device_page_index >= 0
    np.testing.assert_array_equal(stored.device_page_index, other_stored.device_page_index)
    indices = stored.device_page_index[held]
    np.testing.assert_array_equal(stored.device[:, indices], other_stored.device[:, indices])
