import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from glm53.model.kv_geometry import kv_geometry
from glm53.model.params import abstract_model
from glm53.model.presets import preset
from glm53.model.sharding import make_mesh
from glm53.model.steps import PrefillBatch, Steps
from kvcache import KVStore, SequenceState
from pallas_kernels.common.row_format import RowKind
from tests.helpers.in_place import check_in_place, pointers

pytestmark = pytest.mark.compiles
HOST_TIER = {"host_pages": 3000, "row_cache_rows": 20, "staging_pages": 8}


def check_step_in_place(
    name: str, batch: Any, num_devices: int, kind: RowKind, host_tier: dict[str, int]
) -> None:
    """Compiles a step of a small model whose store is far larger than the rest of the step.

    The model has a scanned pattern of layers and a last layer on its own, after which only a data
    dependency keeps the MTP layer's writes behind the trunk's reads.
    """
    config = preset("test-small").replace(
        num_hidden_layers=4,
        indexer_types=("full", "full", "full", "shared"),
        mlp_layer_types=("dense", "sparse", "sparse", "sparse"),
        compute_dtype="float32",
    )
    geometry = kv_geometry(
        config,
        row_kind=kind,
        device_pages=8000 // num_devices,
        max_model_len=2048,
        max_sequences=32,
        num_devices=num_devices,
        rows_per_device=8,
        with_mtp=True,
        **host_tier,
    )
    _, shapes = abstract_model(config)
    steps = Steps(config, geometry, make_mesh(num_devices))
    params = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    store = KVStore.create(geometry, steps.mesh)
    sequences = SequenceState.create(geometry, config.hidden_size, jnp.float32, steps.mesh)
    args = (params, store, sequences, batch)
    compiled = getattr(steps, name).lower(*args, context_pages=4).compile()

    def slabs(store: KVStore) -> list[jax.Array]:
        return [store.slab, store.index_keys, *([store.host.slab] if store.host else [])]

    check_in_place(compiled, slabs(store))
    before = pointers(*slabs(store))
    _, store, _ = compiled(*args)
    assert pointers(*slabs(store)) == before


@pytest.mark.parametrize("host_tier", [{}, HOST_TIER], ids=["device", "hybrid"])
def test_decode_is_in_place(host_tier: dict[str, int]) -> None:
    """A decode step that copies the store: a write that does not wait for the reads before it."""
    check_step_in_place("decode", jnp.asarray([0, 3], jnp.int32), 2, "fp8", host_tier)


def test_steps_that_read_no_host_pages() -> None:
    """Work for pages in host memory in steps that never read any, as with `swap`."""
    config = preset("test-small")
    primitives = []
    for host_pages in (0, 16):
        geometry = kv_geometry(
            config,
            row_kind="fp8",
            device_pages=48 - host_pages,
            host_pages=host_pages,
            max_model_len=2048,
            max_sequences=32,
            num_devices=2,
        )
        steps = Steps(config, geometry, make_mesh(2))
        sequences = SequenceState.create(geometry, config.hidden_size, jnp.float32, steps.mesh)
        arguments = (abstract_model(config)[1], KVStore.create(geometry, steps.mesh), sequences)
        slots = jnp.asarray([0, 3], jnp.int32)
        decode: Any = steps.decode
        traced = decode.trace(*arguments, slots, context_pages=4)
        found = re.findall(r"= (\w+)", str(traced.jaxpr))
        primitives.append([name for name in found if name != "reinterpret_memory_space"])
    assert len(primitives[0]) > 1000
    assert primitives[0] == primitives[1]


def test_prefill_is_in_place() -> None:
    """A prefill step that copies the store, which stages pages, as it has nine rows a sequence."""
    slots, num_rows = jnp.asarray([0, 3], jnp.int32), jnp.asarray([9, 2], jnp.int32)
    batch = PrefillBatch(slots, num_rows, jnp.zeros((2, 9), jnp.int32))
    check_step_in_place("prefill", batch, 1, "bfloat16", HOST_TIER)
