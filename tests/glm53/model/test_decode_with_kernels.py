"""A decode step with every kernel there is, in Mosaic's interpreter."""

import dataclasses
import functools
from collections import Counter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import NamedSharding, PartitionSpec

from glm53.model import steps as steps_module
from glm53.model.config import GLMConfig
from glm53.model.kv_geometry import kv_geometry
from glm53.model.presets import preset
from glm53.model.sharding import make_mesh
from glm53.model.steps import STEP_OUTPUT, PrefillBatch, StepOutput, Steps
from kvcache import KVGeometry, KVStore, SequenceState
from kvcache.device.host_tier import HostTier
from kvcache.reads import Reads
from pallas_kernels.common.implementation import override_implementation
from pallas_kernels.common.row_format import RowFormat
from tests.helpers.random_models import preset_params

pytestmark = pytest.mark.compiles
LENGTH, PAGES = 150, 5  # tokens of each sequence, and the pages that they fill
LEASED, UNLEASED = 0, 2  # slots of the sequences
KERNELS = {
    "append_rows",
    "fetch_rows",
    "index_scores",
    "resolve_rows",
    "select_topk",
    "stage_pages",
    "stage_rows",
}


class State(NamedTuple):
    """What a step takes and gives back."""

    store: KVStore
    sequences: SequenceState


def small_config() -> GLMConfig:
    """A dense and a sparse layer, the second of which shares the first's selection; as wide as
    kernels ask for."""
    return preset("test-small").replace(
        num_hidden_layers=2,
        indexer_types=("full", "shared"),
        mlp_layer_types=("dense", "sparse"),
        num_nextn_predict_layers=0,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        index_n_heads=8,
        index_head_dim=128,
    )


def small_geometry(config: GLMConfig) -> KVGeometry:
    return kv_geometry(
        config,
        row_kind="fp8",
        device_pages=16,
        host_pages=8,
        row_cache_rows=256,
        staging_pages=1,
        max_model_len=192,
        max_sequences=3,
        rows_per_device=32,
    )


def random_rows(row: RowFormat, rng: np.random.Generator, *shape: int) -> jax.Array:
    latent, rope = (
        jnp.asarray(rng.normal(size=(*shape, width)), jnp.float32)
        for width in (row.latent_dim, row.rope_dim)
    )
    return jax.jit(row.pack)(latent, rope)


def random_state(config: GLMConfig, geometry: KVGeometry) -> State:
    """Two sequences with their last two pages on the device and the others in host memory. One has
    row-cache rows, in the device's last pages."""
    mesh, rng = make_mesh(), np.random.default_rng(0)
    store = KVStore.create(geometry, mesh)
    sequences = SequenceState.create(geometry, config.hidden_size, config.compute_dtype, mesh)
    assert store.host is not None
    pages = rng.permutation(geometry.num_pages)[: 2 * PAGES].reshape(2, PAGES).astype(np.int32)
    tables = np.full(sequences.block_table.shape, -1, np.int32)
    tables[[LEASED, UNLEASED], :PAGES] = pages
    device_page, host_page = (np.full(geometry.num_pages, -1, np.int32) for _ in range(2))
    device_page[pages[:, -2:]] = rng.permutation(8)[:4].reshape(2, 2)
    host_page[pages[:, :-2]] = rng.permutation(geometry.host_pages)[:6].reshape(2, 3)
    row_cache_page = np.full(store.host.row_cache.page.shape, -1, np.int32)
    row_cache_page[LEASED] = rng.permutation(8) + 8
    lengths, tokens = np.zeros((2, geometry.max_sequences), np.int32)
    lengths[[LEASED, UNLEASED]] = LENGTH, LENGTH - 3
    row, rows = geometry.row_format, geometry.rows_per_page
    host = dataclasses.replace(
        store.host,
        slab=random_rows(row, rng, geometry.host_pages, rows, geometry.num_layers),
        row_cache=dataclasses.replace(store.host.row_cache, page=jnp.asarray(row_cache_page)),
    )
    state = State(
        dataclasses.replace(
            store,
            slab=random_rows(row, rng, geometry.num_layers, geometry.device_pages, rows),
            index_keys=random_rows(geometry.index_row_format, rng, *store.index_keys.shape[:3]),
            device_page_index=jnp.asarray(device_page),
            host_page_index=jnp.asarray(host_page),
            host=host,
        ),
        dataclasses.replace(
            sequences,
            block_table=jnp.asarray(tables),
            length=jnp.asarray(lengths),
            last_token=jnp.asarray(tokens),
        ),
    )
    # Where steps leave it, so that the second is not compiled anew.
    return jax.device_put(state, NamedSharding(mesh, PartitionSpec()))


def run(steps: Steps, params: Any, state: State) -> tuple[list[StepOutput], State]:
    """Two steps of two rows for each of two sequences, and a group that is padding."""
    step = jax.jit(
        functools.partial(steps._sharded, steps._prefill, STEP_OUTPUT),
        static_argnames=("context_pages", "trace"),
        compiler_options={"xla_backend_optimization_level": 1},
    )
    outputs = []
    for turn in range(2):
        batch = PrefillBatch(
            jnp.array([UNLEASED, -1, LEASED]),
            jnp.array([2, 0, 2]),
            jnp.array([[7, 9], [0, 0], [11, 13]]) + turn,
        )
        output, store, sequences = step(params, *state, batch, context_pages=6, trace=True)
        state = State(store, sequences)
        outputs.append(output)
    return outputs, state


def host_tier(state: State) -> HostTier:
    assert state.store.host is not None
    return state.store.host


def without_means(state: State) -> State:
    row_cache = host_tier(state).row_cache
    row_cache = dataclasses.replace(row_cache, mean=jnp.zeros_like(row_cache.mean))
    host = dataclasses.replace(host_tier(state), row_cache=row_cache)
    return state._replace(store=dataclasses.replace(state.store, host=host))


def assert_same_bits(found: Any, expected: Any) -> None:
    leaves = jax.tree_util.tree_leaves_with_path(found)
    for (path, one), other in zip(leaves, jax.tree.leaves(expected), strict=True):
        one, other = (np.asarray(each).view(np.uint8) for each in (one, other))
        np.testing.assert_array_equal(one, other, err_msg=jax.tree_util.keystr(path))


def test_equal_to_references(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Kernels that do not fit together: a row, a count or a row-cache row that one hands on
    wrongly."""
    # The interpreter takes no arrays in host memory.
    monkeypatch.setattr(steps_module, "on_device", lambda store: store)
    monkeypatch.setattr(steps_module, "in_host", lambda store: store)
    traced = Counter[str]()
    kernel = plgpu.kernel

    def count(*arguments: Any, **options: Any) -> Any:
        traced[options["kernel_name"]] += options["interpret"] is not None
        return kernel(*arguments, **options)

    monkeypatch.setattr(plgpu, "kernel", count)
    config = small_config()
    geometry = small_geometry(config)
    params = preset_params(config, 1)
    steps, steps_of_kernels = (
        Steps(config, geometry, make_mesh(), single_scan=single_scan)
        for single_scan in (True, False)
    )
    state = random_state(config, geometry)
    expected, expected_state = run(steps, params, state)
    assert not traced
    with override_implementation("interpreter"):
        found, found_state = run(steps_of_kernels, params, state)
        jax.block_until_ready(found_state)
    assert set(traced) == KERNELS
    assert "RACE DETECTED" not in capsys.readouterr().out
    for one, other in zip(found, expected, strict=True):
        assert_same_bits(one, other)
    counts = np.asarray(host_tier(expected_state).reads).sum(axis=0)
    reads = Reads.unpack(counts)
    assert min(reads.resident, reads.row_cache, reads.staged, reads.host) > 5, reads
    # The kernel adds index scores in another order, and may be off by about 3e-4 here.
    means, others = (host_tier(state).row_cache.mean for state in (found_state, expected_state))
    np.testing.assert_allclose(means, others, rtol=0, atol=1e-5)
    found_state, expected_state = map(without_means, (found_state, expected_state))
    assert_same_bits(found_state, expected_state)
