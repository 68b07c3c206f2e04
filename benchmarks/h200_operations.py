"""The operations that benchmarks/h200.py checks and times: one entry of OPERATIONS each."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.h200_programs import Body, Call, Large, Operand, scattered_bits
from pallas_kernels.append_rows import append_rows
from pallas_kernels.append_rows import specs as append_specs
from pallas_kernels.append_rows.specs import AppendSpec
from pallas_kernels.implementation import Implementation
from pallas_kernels.index_scores import batched_index_scores
from pallas_kernels.index_scores import specs as score_specs
from pallas_kernels.index_scores.specs import ScoreSpec
from pallas_kernels.move_pages import copy_pages, load_pages, store_pages
from pallas_kernels.move_pages import specs as move_specs
from pallas_kernels.move_pages.specs import MoveSpec
from pallas_kernels.resolve_rows import resolve_rows
from pallas_kernels.resolve_rows import specs as resolve_specs
from pallas_kernels.resolve_rows.specs import ResolveSpec
from pallas_kernels.select_topk import merge_topk, select_topk
from pallas_kernels.select_topk import specs as select_specs
from pallas_kernels.select_topk.specs import SelectSpec
from pallas_kernels.slab_spec import SlabSpec
from pallas_kernels.stage_rows import specs as stage_specs
from pallas_kernels.stage_rows import stage_pages, stage_rows
from pallas_kernels.stage_rows.specs import StageSpec

Operands = tuple[Operand, ...]
Rng = np.random.Generator
LAYER = 2
"""Layer that operations on one layer take, and the first of those on several."""
GROUP_LAYERS = 4
"""Layers of an index group."""


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
    """What an operation must do at least.

    Attributes:
        host_bytes: bytes over the host link.
        device_bytes: bytes that are read from the device's memory or written to it.
        flops: multiplications and additions on tensor cores.
    """

    host_bytes: int = 0
    device_bytes: int = 0
    flops: int = 0

    @property
    def bound(self) -> tuple[float, str]:
        """Least seconds, and what binds."""
        return max(
            (self.host_bytes / 50e9, "host link, 50 GB/s"),
            (self.device_bytes / 4.3e12, "device memory, 4.3 TB/s"),
            (self.flops / 780e12, "tensor cores, 780 TFLOP/s"),
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """How an operation is run, for each of its specs.

    Attributes:
        specs: by name.
        timed: names of those that are timed on a GPU. All whose names begin with "odd" are checked.
        rehearsed: names of those that stand for both on a CPU.
        call: a spec's operation in one implementation, as h200_programs.py calls it.
        state: operands that it updates in place, its first.
        kept: other operands that stay the same from call to call.
        lists: operands that each call has its own of; without state, the last is of integers. Full
            ones list as much as they can, as those that are timed do.
        work: what a call with full lists does.
        tolerance: of an operation without state, how far its first result, in kept and lists, may
            be from the reference; None where no bit may differ.
        comparable: results in a form that is compared.
    """

    specs: Mapping[str, Any]
    timed: tuple[str, ...]
    rehearsed: tuple[str, ...]
    call: Callable[[Any, Implementation], Call]
    state: Callable[[Any], Operands] = lambda spec: ()
    kept: Callable[[Any], Operands] = lambda spec: ()
    lists: Callable[[Any, Rng, bool], Operands] = lambda spec, rng, full: ()
    work: Callable[[Any], Work]
    tolerance: Callable[..., np.ndarray] | None = None
    comparable: Callable[[tuple[np.ndarray, ...]], tuple[np.ndarray, ...]] = lambda results: results

    def body(self, spec: Any, implementation: Implementation) -> Body:
        """What a program of a spec's operation repeats."""
        return Body(self.call(spec, implementation), self.state(spec), self.kept(spec))

    @property
    def checked(self) -> tuple[str, ...]:
        """Names of the specs whose values are checked, besides those that are timed."""
        return tuple(name for name in self.specs if name.startswith("odd"))


def _slab(slabs: SlabSpec) -> Large:
    return Large(slabs.slab, scattered_bits)


def _host(slabs: SlabSpec) -> Large:
    return Large(slabs.host, scattered_bits, in_host=True)


def _page_bytes(slabs: SlabSpec, layers: int) -> int:
    return layers * slabs.rows_per_page * slabs.row_format.row_bytes


def _count(most: int, rng: Rng, full: bool) -> np.ndarray:
    return np.asarray(most if full else rng.integers(1, most), np.int32)


def _stage_rows(spec: StageSpec, implementation: Implementation) -> Call:
    def call(slab: jax.Array, host: jax.Array, *lists: jax.Array) -> tuple[jax.Array]:
        count, *rows = lists
        group = (LAYER, GROUP_LAYERS)
        return (stage_rows(slab, host, *group, *rows, count, implementation=implementation),)

    return call


def _stage_pages(spec: StageSpec, implementation: Implementation) -> Call:
    def call(slab: jax.Array, host: jax.Array, *lists: jax.Array) -> tuple[jax.Array]:
        count, *pages = lists
        return (stage_pages(slab, host, LAYER, *pages, count, implementation=implementation),)

    return call


def _store_pages(spec: MoveSpec, implementation: Implementation) -> Call:
    return lambda host, slab, moves: (store_pages(slab, host, moves, implementation=implementation),)


def _load_pages(spec: MoveSpec, implementation: Implementation) -> Call:
    return lambda slab, host, moves: (load_pages(slab, host, moves, implementation=implementation),)


def _copy_pages(spec: MoveSpec, implementation: Implementation) -> Call:
    return lambda slab, moves: (copy_pages(slab, moves, implementation=implementation),)


def _moves(from_host: bool, to_host: bool) -> Callable[[MoveSpec, Rng, bool], Operands]:
    def lists(spec: MoveSpec, rng: Rng, full: bool) -> Operands:
        pages = [
            spec.slabs.host_pages if in_host else spec.slabs.device_pages
            for in_host in (from_host, to_host)
        ]
        # No number is both read and written, in whatever memory.
        most = min(spec.moves, min(pages) // 2)
        return (move_specs.random_moves(spec, rng, *pages, int(_count(most, rng, full))),)

    return lists


def _move_work(spec: MoveSpec) -> Work:
    moved = spec.moves * _page_bytes(spec.slabs, spec.slabs.layers)
    return Work(host_bytes=moved, device_bytes=moved)


def _append_rows(spec: AppendSpec, implementation: Implementation) -> Call:
    append = functools.partial(
        append_rows, row_format=spec.slabs.row_format, implementation=implementation
    )
    return lambda slab, *lists: (append(slab, LAYER, *lists),)


def _append_work(spec: AppendSpec) -> Work:
    row = spec.slabs.row_format
    values = (row.latent_dim + row.rope_dim) * jnp.dtype(spec.dtype).itemsize
    return Work(device_bytes=spec.tokens * (values + row.row_bytes))


def key_bits(array: jax.ShapeDtypeStruct) -> jax.Array:
    """Index keys in bfloat16, or in fp8 with the scale in the last of their words, of moderate
    size."""
    bits = scattered_bits(array)
    if array.dtype == jnp.bfloat16:
        bits = lax.bitcast_convert_type(bits, jnp.uint16)
        return lax.bitcast_convert_type((bits & 0x83FF) | 0x3C00, jnp.bfloat16)
    values = bits & jnp.int32(-0x40404041)  # the highest bit of each exponent is clear
    scales = (((bits >> 20) & 7) + 120) << 23
    is_scale = lax.broadcasted_iota(jnp.int32, array.shape, array.ndim - 1) == array.shape[-1] - 1
    return jnp.where(is_scale, scales, values)


def _index_scores(spec: ScoreSpec, implementation: Implementation) -> Call:
    def call(
        query: jax.Array,
        weights: jax.Array,
        keys: jax.Array,
        pages: jax.Array,
        layer: jax.Array,
        num_keys: jax.Array,
    ) -> tuple[jax.Array]:
        arrays = (query, weights, keys, layer, pages, num_keys)
        row_format = spec.row_format
        return (batched_index_scores(*arrays, row_format, implementation=implementation),)

    return call


@functools.cache
def _scored(spec: ScoreSpec) -> Operands:
    rng = np.random.default_rng(0)
    queries = score_specs.random_queries(spec, rng)
    return *queries, Large(spec.index_keys, key_bits), score_specs.random_pages(spec, rng)


def _score_lists(spec: ScoreSpec, rng: Rng, full: bool) -> Operands:
    num_keys = np.full(spec.sequences, spec.context, np.int32)
    if not full:
        num_keys = rng.integers(0, spec.context + 1, spec.sequences, np.int32)
    # Each call has another layer, whose keys are not in a cache.
    return np.asarray(rng.integers(spec.index_layers), np.int32), num_keys


def _score_work(spec: ScoreSpec) -> Work:
    keys, heads = spec.sequences * spec.context, spec.heads * spec.row_format.latent_dim
    return Work(
        device_bytes=keys * (spec.row_format.row_bytes + 4 * spec.rows),
        flops=2 * keys * spec.rows * heads,
    )


def _score_tolerance(
    spec: ScoreSpec,
    query: np.ndarray,
    weights: np.ndarray,
    keys: np.ndarray,
    pages: np.ndarray,
    layer: np.ndarray,
    num_keys: np.ndarray,
) -> np.ndarray:
    """What `batched_index_scores` states."""
    with jax.default_device(jax.devices("cpu")[0]):
        stored = np.abs(np.asarray(spec.row_format.unpack(jnp.asarray(keys[layer]))))
    query = np.abs(query.astype(np.float32))
    magnitudes = []
    for rows, row_weights, places in zip(query, np.abs(weights), pages, strict=True):
        products = stored[places].reshape(spec.context, -1) @ rows.reshape(-1, rows.shape[-1]).T
        products = products.reshape(-1, *row_weights.shape) * row_weights
        magnitudes.append(products.sum(axis=-1).T)
    return 2.0**-16 * np.stack(magnitudes)


def _select_topk(spec: SelectSpec, implementation: Implementation) -> Call:
    return lambda scores, positions, last: select_topk(
        scores, positions, 0, last, spec.k, ordered=False, implementation=implementation
    )


@functools.cache
def _candidates(spec: SelectSpec) -> Operands:
    rng = np.random.default_rng(0)
    distinct, tied = (
        draw(spec, rng) for draw in (select_specs.distinct_scores, select_specs.tied_scores)
    )
    # Every other row has ties.
    scores = jnp.where(jnp.arange(spec.num_rows)[:, None] % 2, tied, distinct)
    return scores, select_specs.positions_of(spec)


def _last_positions(spec: SelectSpec, rng: Rng, full: bool) -> Operands:
    end = spec.context * spec.shards
    last = np.full(spec.num_rows, end, np.int32)
    return (last if full else rng.integers(-1, end, spec.num_rows, np.int32),)


def _by_position(results: tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...]:
    """Selections whose order is any, in the order of their positions."""
    scores, positions = results
    order = np.argsort(np.where(positions < 0, np.iinfo(np.int32).max, positions), stable=True)
    return tuple(np.take_along_axis(each, order, axis=-1) for each in (scores, positions))


def _merge_topk(spec: SelectSpec, implementation: Implementation) -> Call:
    return lambda scores, positions: (merge_topk(scores, positions, implementation=implementation),)


def _selections(spec: SelectSpec, rng: Rng, full: bool) -> Operands:
    return select_specs.selections(spec, rng, tied=not full)


def _resolve_rows(spec: ResolveSpec, implementation: Implementation) -> Call:
    resolve = functools.partial(resolve_rows, **spec.static, implementation=implementation)

    def call(*operands: jax.Array) -> tuple[jax.Array, ...]:
        *state, hot_scores, rows, located = operands
        return resolve(*state, rows, located, hot_scores)

    return call


@functools.cache
def _resolved(spec: ResolveSpec) -> Operands:
    return tuple(resolve_specs.arguments(spec, np.random.default_rng(0), on_host=0.2))


def _resolve_kept(spec: ResolveSpec) -> Operands:
    *_, hot_page, slots, group, _, _, hot_scores = _resolved(spec)
    return hot_page, slots, group, hot_scores


def _located(spec: ResolveSpec, rng: Rng, full: bool) -> Operands:
    """Selected rows, a fifth of which lies in host memory; other ones each time."""
    first = rng.integers(spec.context, size=(spec.sequences, spec.rows, 1))
    # A step without a factor in common with the context comes to no row twice.
    step = next(step for step in range(61, spec.context) if math.gcd(step, spec.context) == 1)
    rows = (first + step * np.arange(spec.k)) % spec.context
    located = np.where(rows % 5 == 0, spec.first_host_row + rows, rows)
    slots = np.asarray(_resolved(spec)[4])
    located[slots < 0] = -1
    return rows.astype(np.int32), located.astype(np.int32)


def _resolve_work(spec: ResolveSpec) -> Work:
    """Of a selected row: its number, where it lies, where it is found, and its entry in the map; of
    a hot row: what it holds and its mean, read and written, and its score."""
    selected, hot = spec.sequences * spec.rows * spec.k, spec.sequences * spec.hot
    return Work(device_bytes=selected * (4 + 4 + 4 + 2) + hot * (2 * 4 + 2 * 4 + 4))


def _one_nan(results: tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...]:
    """A NaN's bits say nothing."""
    return tuple(
        np.where(np.isnan(each), np.float32(np.nan), each) if each.dtype.kind == "f" else each
        for each in results
    )


# What the interpreter is quick with.
_FEW_ROWS = {"few": dataclasses.replace(stage_specs.SPECS["odd_narrow"], misses=2, pages=2)}
_FEW_HOT_ROWS = {"few": dataclasses.replace(resolve_specs.SPECS["odd_1"], sequences=2, k=60)}

OPERATIONS = {
    "stage_rows": Operation(
        specs=stage_specs.SPECS | _FEW_ROWS,
        timed=("glm_fp8",),
        rehearsed=("few",),
        call=_stage_rows,
        state=lambda spec: (_slab(spec.slabs),),
        kept=lambda spec: (_host(spec.slabs),),
        lists=lambda spec, rng, full: (
            _count(spec.misses, rng, full),
            *stage_specs.row_lists(spec, rng),
        ),
        work=lambda spec: Work(
            host_bytes=spec.misses * GROUP_LAYERS * spec.slabs.row_format.row_bytes
        ),
    ),
    "stage_pages": Operation(
        specs=stage_specs.SPECS | _FEW_ROWS,
        timed=("glm_fp8",),
        rehearsed=("few",),
        call=_stage_pages,
        state=lambda spec: (_slab(spec.slabs),),
        kept=lambda spec: (_host(spec.slabs),),
        lists=lambda spec, rng, full: (
            _count(spec.pages, rng, full),
            *stage_specs.page_lists(spec, rng),
        ),
        work=lambda spec: Work(host_bytes=spec.pages * _page_bytes(spec.slabs, 1)),
    ),
    "store_pages": Operation(
        specs=move_specs.SPECS,
        timed=("glm_fp8",),
        rehearsed=("odd_narrow",),
        call=_store_pages,
        state=lambda spec: (_host(spec.slabs),),
        kept=lambda spec: (_slab(spec.slabs),),
        lists=_moves(from_host=False, to_host=True),
        work=_move_work,
    ),
    "load_pages": Operation(
        specs=move_specs.SPECS,
        timed=("glm_fp8",),
        rehearsed=("odd_narrow",),
        call=_load_pages,
        state=lambda spec: (_slab(spec.slabs),),
        kept=lambda spec: (_host(spec.slabs),),
        lists=_moves(from_host=True, to_host=False),
        work=_move_work,
    ),
    "copy_pages": Operation(
        specs=move_specs.SPECS | move_specs.COPY_SPECS,
        timed=("glm_fp8", "glm_keys_fp8"),
        rehearsed=("odd_keys_fp8",),
        call=_copy_pages,
        state=lambda spec: (_slab(spec.slabs),),
        lists=_moves(from_host=False, to_host=False),
        work=lambda spec: Work(
            device_bytes=2 * spec.moves * _page_bytes(spec.slabs, spec.slabs.layers)
        ),
    ),
    "append_rows": Operation(
        specs=append_specs.SPECS,
        timed=("glm_fp8", "glm_bfloat16", "glm_keys_fp8"),
        rehearsed=("odd_fp8", "odd_keys_bfloat16"),
        call=_append_rows,
        state=lambda spec: (_slab(spec.slabs),),
        lists=lambda spec, rng, full: (
            *append_specs.random_rows(spec, rng),
            *append_specs.random_places(spec, rng),
        ),
        work=_append_work,
    ),
    "index_scores": Operation(
        specs=score_specs.SPECS,
        timed=("glm_fp8_8x1_128k", "glm_fp8_8x4_128k", "glm_fp8_8x4_1m", "glm_fp8_1x64_128k"),
        rehearsed=("odd_bfloat16_float32",),
        call=_index_scores,
        kept=_scored,
        lists=_score_lists,
        work=_score_work,
        tolerance=_score_tolerance,
    ),
    "select_topk": Operation(
        specs=select_specs.SPECS,
        timed=("glm_1m", "glm_1m_drafts", "glm_128k_batch"),
        rehearsed=("odd_short",),
        call=_select_topk,
        kept=_candidates,
        lists=_last_positions,
        work=lambda spec: Work(device_bytes=4 * spec.num_rows * spec.context),
        comparable=_by_position,
    ),
    "merge_topk": Operation(
        specs=select_specs.SPECS,
        timed=("glm_1m", "glm_1m_drafts"),
        rehearsed=("odd_short",),
        call=_merge_topk,
        lists=_selections,
        work=lambda spec: Work(device_bytes=8 * spec.shards * spec.num_rows * spec.k),
    ),
    "resolve_rows": Operation(
        specs=resolve_specs.SPECS | _FEW_HOT_ROWS,
        timed=("glm_4x8", "glm_4x32"),
        rehearsed=("few",),
        call=_resolve_rows,
        state=lambda spec: _resolved(spec)[:3],
        kept=_resolve_kept,
        lists=_located,
        work=_resolve_work,
        comparable=_one_nan,
    ),
}
"""By name."""
