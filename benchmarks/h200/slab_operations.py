"""Operations on slabs that `kernels.py` checks and times: one entry each."""

import dataclasses
import functools
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

from benchmarks.h200.programs import (
    Call,
    Large,
    Operands,
    Operation,
    Rng,
    Work,
    scattered_bits,
)
from pallas_kernels.append_rows import append_rows
from pallas_kernels.append_rows import specs as append_specs
from pallas_kernels.append_rows.specs import AppendSpec
from pallas_kernels.common.implementation import Implementation
from pallas_kernels.common.slab_spec import SlabSpec
from pallas_kernels.fetch_rows import fetch_rows
from pallas_kernels.fetch_rows import specs as fetch_specs
from pallas_kernels.fetch_rows.specs import FetchSpec
from pallas_kernels.move_pages import copy_pages, offload_pages, onload_pages
from pallas_kernels.move_pages import specs as move_specs
from pallas_kernels.move_pages.specs import MoveSpec
from pallas_kernels.stage_rows import specs as stage_specs
from pallas_kernels.stage_rows import stage_pages, stage_rows
from pallas_kernels.stage_rows.specs import StageSpec

LAYER = 2
"""The layer used, or the first of several."""
GROUP_LAYERS = 4
"""Layers of an index group."""

# Small, for the interpreter.
_FEW_ROWS = {"few": dataclasses.replace(stage_specs.SPECS["odd_narrow"], misses=2, pages=2)}


def _slab(slabs: SlabSpec) -> Large:
    return Large(slabs.slab, scattered_bits)


def _host(slabs: SlabSpec) -> Large:
    return Large(slabs.host, scattered_bits, in_host=True)


def _page_bytes(slabs: SlabSpec, layers: int) -> int:
    return layers * slabs.rows_per_page * slabs.row_format.row_bytes


def _count(most: int, rng: Rng, full: bool) -> np.ndarray:
    return np.asarray(most if full else rng.integers(1, most), np.int32)


def _stage_rows(spec: StageSpec, implementation: Implementation) -> Call:
    stage = functools.partial(stage_rows, implementation=implementation)
    return lambda slab, host, *lists: (stage(slab, host, LAYER, GROUP_LAYERS, *lists),)


def _stage_pages(spec: StageSpec, implementation: Implementation) -> Call:
    stage = functools.partial(stage_pages, implementation=implementation)
    return lambda slab, host, *lists: (stage(slab, host, LAYER, *lists),)


def _fetch_rows(spec: FetchSpec, implementation: Implementation) -> Call:
    fetch = functools.partial(fetch_rows, implementation=implementation)
    return lambda rows, host, *lists: (fetch(rows, host, LAYER, *lists),)


def _offload_pages(spec: MoveSpec, implementation: Implementation) -> Call:
    store = functools.partial(offload_pages, implementation=implementation)
    return lambda host, slab, moves: (store(slab, host, moves),)


def _onload_pages(spec: MoveSpec, implementation: Implementation) -> Call:
    load = functools.partial(onload_pages, implementation=implementation)
    return lambda slab, host, moves: (load(slab, host, moves),)


def _copy_pages(spec: MoveSpec, implementation: Implementation) -> Call:
    return lambda slab, moves: (copy_pages(slab, moves, implementation=implementation),)


def _moves(from_host: bool, to_host: bool) -> Callable[[MoveSpec, Rng, bool], Operands]:
    def lists(spec: MoveSpec, rng: Rng, full: bool) -> Operands:
        sources, targets = (
            spec.slabs.host_pages if in_host else spec.slabs.device_pages
            for in_host in (from_host, to_host)
        )
        # `random_moves` lists no page twice, in either memory.
        count = _count(min(spec.moves, sources // 2, targets // 2), rng, full)
        return (move_specs.random_moves(spec, rng, sources, targets, int(count)),)

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


SLAB_OPERATIONS = {
    "stage_rows": Operation(
        specs=stage_specs.SPECS | _FEW_ROWS,
        timed=("glm_fp8",),
        rehearsed=("few",),
        call=_stage_rows,
        state=lambda spec: (_slab(spec.slabs),),
        kept=lambda spec: (_host(spec.slabs),),
        lists=lambda spec, rng, full: (
            *stage_specs.row_lists(spec, rng),
            _count(spec.misses, rng, full),
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
            *stage_specs.page_lists(spec, rng),
            _count(spec.pages, rng, full),
        ),
        work=lambda spec: Work(host_bytes=spec.pages * _page_bytes(spec.slabs, 1)),
    ),
    "fetch_rows": Operation(
        specs=fetch_specs.SPECS,
        timed=("glm_fp8",),
        rehearsed=("odd_narrow",),
        call=_fetch_rows,
        state=lambda spec: (Large(spec.buffer, scattered_bits),),
        kept=lambda spec: (_host(spec.slabs),),
        lists=lambda spec, rng, full: (
            *fetch_specs.row_lists(spec, rng),
            _count(spec.rows, rng, full),
        ),
        work=lambda spec: Work(host_bytes=spec.rows * spec.slabs.row_format.row_bytes),
    ),
    "offload_pages": Operation(
        specs=move_specs.SPECS,
        timed=("glm_fp8",),
        rehearsed=("odd_narrow",),
        call=_offload_pages,
        state=lambda spec: (_host(spec.slabs),),
        kept=lambda spec: (_slab(spec.slabs),),
        lists=_moves(from_host=False, to_host=True),
        work=_move_work,
    ),
    "onload_pages": Operation(
        specs=move_specs.SPECS,
        timed=("glm_fp8",),
        rehearsed=("odd_narrow",),
        call=_onload_pages,
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
        rehearsed=("odd_fp8",),
        call=_append_rows,
        state=lambda spec: (_slab(spec.slabs),),
        lists=lambda spec, rng, full: (
            *append_specs.random_rows(spec, rng),
            *append_specs.random_pages(spec, rng),
        ),
        work=_append_work,
    ),
}
"""Operations by name."""
