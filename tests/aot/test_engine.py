"""Programs of an engine besides its steps, for eight H200s and the store of a whole node."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks.h200.compiled_step import (
    LEAST_COPY,
    NUM_DEVICES,
    abstract_state,
    glm_config,
    local_bytes,
    node_geometry,
    replicated,
)
from glm53.model.sharding import make_mesh
from kvcache import KVStore
from kvcache.device.page_moves import MoveList
from kvcache.device.store import MESH_AXIS
from kvcache.device.transitions import Transitions
from scripts.aot.aot import CompileReport, compile_for_h200
from serving.sampling.sampler import Sampler
from serving.sampling.state import SamplingState

CONFIG = glm_config(whole=True)
MESH = make_mesh(NUM_DEVICES)
GEOMETRY = node_geometry(CONFIG, 32)
STORE, SEQUENCES = abstract_state(CONFIG, GEOMETRY, MESH)
PAGES, MOVES, CHANGES = 4, 8, 4  # of an import or export, of a step, of leases
NO_MOVES = replicated(
    MoveList(*[np.full((MOVES, 2), -1, np.int32)] * 4, maps=np.full((4 * MOVES, 3), -1, np.int32)),
    MESH,
)


def integers(*shape: int) -> jax.ShapeDtypeStruct:
    return replicated(jax.ShapeDtypeStruct(shape, jnp.int32), MESH)


def pages_of(layers: int, width: int) -> jax.ShapeDtypeStruct:
    """Pages in flight to or from a file."""
    shape = (PAGES, GEOMETRY.rows_per_page, layers, width)
    by_row = NamedSharding(MESH, PartitionSpec(None, MESH_AXIS))
    return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=by_row)


ROWS = pages_of(GEOMETRY.num_layers, GEOMETRY.row_format.width)
KEYS = pages_of(GEOMETRY.num_index_layers, GEOMETRY.index_row_format.width)


def compiled(function: Any, *arguments: Any) -> CompileReport:
    report = compile_for_h200(function, arguments, min_copy_bytes=LEAST_COPY)
    assert report.rematerialized == ()
    assert report.branches == ()
    assert [loop for loop in report.loops if loop.trip_count is None] == []
    return report


def check_in_place(report: CompileReport) -> None:
    in_host = local_bytes(STORE.host.slab) if STORE.host else 0
    assert report.host.aliased_bytes == report.host.argument_bytes == in_host > 64 << 30
    assert report.host.temp_bytes == 0
    in_all = sum(map(local_bytes, jax.tree.leaves(STORE)))
    # All but the arrays that are replaced.
    assert in_all - (1 << 20) < report.aliased_bytes <= in_all


@pytest.mark.parametrize(
    ("name", "arguments", "kernels"),
    [
        (
            "move",
            (NO_MOVES,),
            {"offload_pages", "onload_pages", "copy_pages"},
        ),
        ("lease", (integers(CHANGES), integers(CHANGES, GEOMETRY.row_cache_pages)), set()),
        ("set_staging_pages", (integers(GEOMETRY.staging_pages),), set()),
        ("decay", (), set()),
    ],
    ids=["move", "lease", "set_staging_pages", "decay"],
)
def test_transition(name: str, arguments: tuple[Any, ...], kernels: set[str]) -> None:
    """A store that is copied between steps, or a page moved by other means than kernels."""
    report = compiled(getattr(Transitions(GEOMETRY, MESH), name), STORE, *arguments)
    check_in_place(report)
    assert report.copies == []
    assert report.device.temp_bytes < 1 << 20
    assert {kernel.name for kernel in report.kernels} == kernels


def test_import() -> None:
    """A store that is copied when pages are written to it. The pages change their layout."""
    report = compiled(Transitions(GEOMETRY, MESH).write, STORE, integers(PAGES), ROWS, KEYS)
    check_in_place(report)
    assert len(report.copies) <= 1
    assert report.device.temp_bytes < 2 * (local_bytes(ROWS) + local_bytes(KEYS))
    assert report.launch_counts["offload_pages"] == 1


def test_export() -> None:
    """A store that is copied when pages are read from it."""
    report = compiled(Transitions(GEOMETRY, MESH).read, STORE, integers(PAGES))
    assert report.host_parameters == ("store.host.slab",)
    assert len(report.copies) <= 1
    assert report.device.temp_bytes < 2 * (local_bytes(ROWS) + local_bytes(KEYS))
    assert report.launch_counts["onload_pages"] == 1


def test_empty_store() -> None:
    """Host memory that is filled by way of the device's, which has no room for as much."""
    report = compiled(KVStore.creation(GEOMETRY, MESH))
    assert report.host.output_bytes > 64 << 30
    assert report.device.temp_bytes < 4 << 10
    assert report.copies == []


def test_sampler() -> None:
    """A sampler that waits for the host in the middle, or copies its state."""
    slots, vocab = GEOMETRY.max_sequences, CONFIG.vocab_size
    state = replicated(
        jax.eval_shape(functools.partial(SamplingState.create, slots, vocab, MESH)), MESH
    )
    logits = replicated(jax.ShapeDtypeStruct((slots, vocab), jnp.float32), MESH)
    sampler = Sampler(vocab, slots, MESH)
    report = compiled(sampler.sample, state, SEQUENCES, integers(slots), logits, integers(slots))
    arrays = jax.tree.leaves((state, SEQUENCES))
    assert report.aliased_bytes == sum(map(local_bytes, arrays))
    assert report.device.temp_bytes < 64 << 20
