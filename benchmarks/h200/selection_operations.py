"""Operations on scores and selections that `kernels.py` checks and times: one entry each."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.h200.programs import (
    Call,
    Large,
    Operands,
    Operation,
    Rng,
    Work,
    scattered_bits,
)
from pallas_kernels.common.implementation import Implementation
from pallas_kernels.index_scores import batched_index_scores
from pallas_kernels.index_scores import specs as score_specs
from pallas_kernels.index_scores.specs import ScoreSpec
from pallas_kernels.resolve_rows import RowCache, SelectedRows, resolve_rows
from pallas_kernels.resolve_rows import specs as resolve_specs
from pallas_kernels.resolve_rows.specs import ResolveSpec
from pallas_kernels.select_topk import merge_topk, select_topk
from pallas_kernels.select_topk import specs as select_specs
from pallas_kernels.select_topk.specs import SelectSpec

# Small, for the interpreter.
_FEW_KEYS = {
    "few": dataclasses.replace(score_specs.SPECS["odd_bfloat16"], sequences=2, context_pages=1)
}
_FEW_ROW_CACHE_ROWS = {"few": dataclasses.replace(resolve_specs.SPECS["odd_1"], sequences=2, k=60)}


def key_bits(array: jax.ShapeDtypeStruct) -> jax.Array:
    """Returns index keys of moderate size: bfloat16, or fp8 with the scale in the last word."""
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
        keys: jax.Array,
        pages: jax.Array,
        query: jax.Array,
        weights: jax.Array,
        layer: jax.Array,
        num_keys: jax.Array,
    ) -> tuple[jax.Array]:
        arrays = (query, weights, keys, layer, pages, num_keys)
        row_format = spec.row_format
        return (batched_index_scores(*arrays, row_format, implementation=implementation),)

    return call


def _scored(spec: ScoreSpec) -> Operands:
    pages = score_specs.random_pages(spec, np.random.default_rng(0))
    return Large(spec.index_keys, key_bits), pages


def _score_lists(spec: ScoreSpec, rng: Rng, full: bool) -> Operands:
    num_keys = np.full(spec.sequences, spec.context, np.int32)
    if not full:
        num_keys = rng.integers(0, spec.context + 1, spec.sequences, np.int32)
    # Each call has another layer, whose keys are in no cache of the GPU.
    layer = np.asarray(rng.integers(spec.index_layers), np.int32)
    return *score_specs.random_queries(spec, rng), layer, num_keys


def _score_work(spec: ScoreSpec) -> Work:
    keys, heads = spec.sequences * spec.context, spec.heads * spec.row_format.latent_dim
    return Work(
        device_bytes=keys * (spec.row_format.row_bytes + 4 * spec.rows),
        flops=2 * keys * spec.rows * heads,
    )


def _score_tolerance(
    spec: ScoreSpec,
    keys: np.ndarray,
    pages: np.ndarray,
    query: np.ndarray,
    weights: np.ndarray,
    layer: np.ndarray,
    num_keys: np.ndarray,
) -> np.ndarray:
    """Returns the error bound of `batched_index_scores`, relative to the magnitude of the products.

    It states none for e4m3 queries, of which each of 128 additions with 14 bits may lose 2**-14 of
    the largest product.
    """
    share = 2.0**-7 if spec.query_dtype == "float8_e4m3fn" else 2.0**-16
    with jax.default_device(jax.devices("cpu")[0]):
        stored = np.abs(np.asarray(spec.row_format.unpack(jnp.asarray(keys[layer]))))
    query = np.abs(query.astype(np.float32))
    magnitudes = []
    for rows, row_weights, sequence_pages in zip(query, np.abs(weights), pages, strict=True):
        products = (
            stored[sequence_pages].reshape(spec.context, -1) @ rows.reshape(-1, rows.shape[-1]).T
        )
        products = products.reshape(-1, *row_weights.shape) * row_weights
        magnitudes.append(products.sum(axis=-1).T)
    return share * np.stack(magnitudes)


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
    # Every second row has ties.
    scores = jnp.where(jnp.arange(spec.num_rows)[:, None] % 2, tied, distinct)
    return scores, select_specs.positions_of(spec)


def _last_positions(spec: SelectSpec, rng: Rng, full: bool) -> Operands:
    end = spec.context * spec.shards
    last = np.full(spec.num_rows, end, np.int32)
    return (last if full else rng.integers(-1, end, spec.num_rows, np.int32),)


def _by_position(results: tuple[jax.Array, ...]) -> tuple[np.ndarray, ...]:
    """Sorts selections, whose order is arbitrary, by position."""
    scores, positions = map(np.asarray, results)
    order = np.argsort(np.where(positions < 0, np.iinfo(np.int32).max, positions), stable=True)
    return tuple(np.take_along_axis(each, order, axis=-1) for each in (scores, positions))


def _merge_topk(spec: SelectSpec, implementation: Implementation) -> Call:
    return lambda scores, positions, shard: (
        merge_topk(scores, positions, shard, implementation=implementation),
    )


def _selections(spec: SelectSpec, rng: Rng, full: bool) -> Operands:
    shard = np.asarray(rng.integers(spec.shards), np.int32)
    return *select_specs.selections(spec, rng, tied=not full), shard


def _resolve_rows(spec: ResolveSpec, implementation: Implementation) -> Call:
    resolve = functools.partial(resolve_rows, **spec.static, implementation=implementation)

    def call(*operands: jax.Array) -> tuple[jax.Array, ...]:
        *row_cache, slots, scores, group, rows, row_ids = operands
        selected = SelectedRows(slots, rows, row_ids, scores)
        return tuple(jax.tree.leaves(resolve(RowCache(*row_cache), selected, group)))

    return call


@functools.cache
def _resolved(spec: ResolveSpec) -> resolve_specs.Arguments:
    """Returns all arguments; selections, which `_located` draws, have one row."""
    one_row = dataclasses.replace(spec, rows=1)
    return resolve_specs.arguments(one_row, np.random.default_rng(0), on_host=0.0)


def _resolve_state(spec: ResolveSpec) -> Operands:
    row_cache, _, _ = _resolved(spec)
    return tuple(jax.tree.leaves(row_cache))


def _resolve_kept(spec: ResolveSpec) -> Operands:
    _, selected, group = _resolved(spec)
    return selected.slots, selected.scores, group


def _located(spec: ResolveSpec, rng: Rng, full: bool) -> Operands:
    """Returns selected rows, a fifth of them in host memory; other ones in each call."""
    first = rng.integers(spec.context, size=(spec.sequences, spec.rows, 1))
    # A stride coprime to the context visits no row twice.
    step = next(step for step in range(61, spec.context) if math.gcd(step, spec.context) == 1)
    rows = (first + step * np.arange(spec.k)) % spec.context
    row_ids = np.where(rows % 5 == 0, spec.first_host_row + rows, rows)
    _, selected, _ = _resolved(spec)
    row_ids[np.asarray(selected.slots) < 0] = -1
    return rows.astype(np.int32), row_ids.astype(np.int32)


def _resolve_work(spec: ResolveSpec) -> Work:
    """Returns the work: position, physical row, result and map entry of each selected row; position
    and mean, read and written, and score of each cached row."""
    selected, entries = spec.sequences * spec.rows * spec.k, spec.sequences * spec.entries
    return Work(device_bytes=selected * (4 + 4 + 4 + 2) + entries * (2 * 4 + 2 * 4 + 4))


def _one_nan(results: tuple[jax.Array, ...]) -> tuple[np.ndarray, ...]:
    """Replaces NaNs by one NaN, since their bits are arbitrary."""
    return tuple(
        np.where(np.isnan(each), np.float32(np.nan), each) if each.dtype.kind == "f" else each
        for each in map(np.asarray, results)
    )


SELECTIONS = {
    "index_scores": Operation(
        specs=score_specs.SPECS | _FEW_KEYS,
        timed=("glm_fp8_8x4_1m", "glm_fp8_1x64_128k", "glm_fp8_8x1_128k"),
        rehearsed=("few",),
        call=_index_scores,
        kept=_scored,
        lists=_score_lists,
        work=_score_work,
        tolerance=_score_tolerance,
    ),
    "select_topk": Operation(
        specs=select_specs.SPECS,
        timed=("glm_1m_drafts", "glm_128k_batch"),
        rehearsed=("odd_short",),
        call=_select_topk,
        kept=_candidates,
        lists=_last_positions,
        work=lambda spec: Work(device_bytes=4 * spec.num_rows * spec.context),
        comparable=_by_position,
    ),
    "merge_topk": Operation(
        specs=select_specs.SPECS,
        timed=("glm_1m_drafts",),
        rehearsed=("odd_short",),
        call=_merge_topk,
        lists=_selections,
        work=lambda spec: Work(device_bytes=8 * spec.shards * spec.num_rows * spec.k),
    ),
    "resolve_rows": Operation(
        specs=resolve_specs.SPECS | _FEW_ROW_CACHE_ROWS,
        timed=("glm_4x32",),
        rehearsed=("few",),
        call=_resolve_rows,
        state=_resolve_state,
        kept=_resolve_kept,
        lists=_located,
        work=_resolve_work,
        comparable=_one_nan,
    ),
}
"""Operations by name."""
