"""Attention on tensor cores: a block takes 64 heads of a row at a time, and tiles of 32 rows.

Four warpgroups pass tiles on to each other. The first copies stored rows to shared memory, each by
its id, and turns them into operands in bfloat16, which e4m3 times a power of two is exactly. The
second multiplies them with the query and has the softmax, online: Milakov and Gimelshein
(arXiv:1805.02867). Two more add up latents by their weights, a half of the columns each.

Values of fp8 rows are in the order of `column_order`, which queries are given in and means are
returned in.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.common.row_format import RowFormat
from pallas_kernels.common.types import HostSlab, Interpret, Ref, Scalar, Slab
from pallas_kernels.sparse_attention.block import Memory, Shared, Work, each_chunk, each_work
from pallas_kernels.sparse_attention.column_order import LATENT
from pallas_kernels.sparse_attention.gather import Gatherer
from pallas_kernels.sparse_attention.packed import tail_width
from pallas_kernels.sparse_attention.plan import HEADS, SLOTS, TILE, Plan

_NUM_BLOCKS = 132  # one on each multiprocessor of an H200
_REGISTERS = 64, 128, 160  # of a thread that gathers, that scores, that adds up
_HALF = LATENT // 2
_SCRATCH_BYTES = 16  # sums along rows of products need none
_WGMMA = plgpu.Layout.WGMMA


def sparse_attention(
    query: Float[Array, "parts rows part_heads values"],
    slab: Slab,
    host: HostSlab | None,
    layer: Int[Array, ""],
    row_ids: Int[Array, "rows k"],
    count: Int[Array, " rows"],
    *,
    scale: float,
    row_format: RowFormat,
    interpret: Interpret,
    num_blocks: int | None = None,
) -> Float[Array, "parts rows part_heads packed"]:
    """The kernel of `operation.sparse_attention`, values in the order of `column_order`."""
    parts, rows, part_heads, _ = query.shape
    plan = Plan(
        rows=rows,
        parts=parts,
        part_heads=part_heads,
        fp8_rows=row_format.kind == "fp8",
        slab_rows=math.prod(slab.shape[:3]),
        layer_rows=slab.shape[1] * slab.shape[2],
        factor=scale * math.log2(math.e),
        interpreted=interpret is not None,
    )
    if num_blocks is None:
        num_blocks = _NUM_BLOCKS if interpret is None else 2
    width = LATENT + tail_width(query.dtype)
    operands = [query, slab.reshape(-1, slab.shape[3])]
    if host is not None:
        operands.append(host.reshape(-1, *host.shape[2:]))

    def body(*refs: Ref, query_and_mean: Ref, **scratch: Ref) -> None:
        query, slab, *on_host, layer, row_ids, count, packed = refs
        host = on_host[0] if on_host else None
        memory = Memory(query, slab, host, layer, row_ids, count, packed)
        query_slot, mean = query_and_mean
        _attend(plan, memory, Shared(query=query_slot, mean=mean, **scratch))

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((parts, rows, part_heads, width), query.dtype),
        scratch_types=plan.scratch(),
        grid=(min(num_blocks, rows * plan.groups),),
        grid_names=("block",),
        num_threads=4,
        thread_name="warpgroup",
        kernel_name="sparse_attention",
        compiler_params=plgpu.CompilerParams(reduction_scratch_bytes=_SCRATCH_BYTES),
        interpret=interpret,
    )(*operands, layer.reshape(1), row_ids, count.astype(jnp.int32))


def _attend(plan: Plan, memory: Memory, shared: Shared) -> None:
    """Body of one warpgroup."""
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup == 0)
    def _() -> None:
        plgpu.set_max_registers(_REGISTERS[0], action="decrease")
        gatherer = Gatherer(plan, memory, shared)
        gatherer.finish(each_work(plan, memory, gatherer.run))

    @pl.when(warpgroup == 1)
    def _() -> None:
        plgpu.set_max_registers(_REGISTERS[1], action="decrease")
        each_work(plan, memory, functools.partial(_score, plan, memory, shared))
        plgpu.barrier_wait(shared.returned)

    @pl.when(warpgroup >= 2)
    def _() -> None:
        plgpu.set_max_registers(_REGISTERS[2], action="increase")
        each_work(plan, memory, functools.partial(_add_up, plan, memory, shared, warpgroup - 2))


def _score(plan: Plan, memory: Memory, shared: Shared, work: Work) -> None:
    """Weights of all tiles, and what follows from their sum."""
    # The mean of the heads before lies where the query is to be.
    pl.when(work.turn > 0)(lambda: plgpu.barrier_wait(shared.returned))

    @pl.when(work.count > 0)
    def _() -> None:
        def load(part: Scalar, head: Scalar, row: Scalar) -> None:
            source = memory.query.at[part, work.row, pl.ds(head, plan.chunk)]
            target = shared.query.at[pl.ds(row, plan.chunk)]
            plgpu.copy_gmem_to_smem(source, target, shared.loaded)

        each_chunk(plan, work, load)
        plgpu.barrier_wait(shared.loaded)

    def score(tile: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        highest, total = carry
        slot = work.slot(tile)
        plgpu.barrier_wait(shared.full.at[slot])

        def multiply(products: Ref) -> jax.Array:
            plgpu.wgmma(products, shared.query, shared.keys.at[slot].transpose((1, 0)))
            return products[...]

        scores = (
            pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((HEADS, TILE), jnp.float32))
            * plan.factor
        )
        column = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=_WGMMA)
        scores = jnp.where(column < work.count - tile * TILE, scores, -jnp.inf)
        new = jnp.maximum(highest, jnp.max(scores, axis=1))
        shift = jnp.where(new > -jnp.inf, new, 0.0)
        weights = jnp.exp2(scores - lax.broadcast_in_dim(shift, scores.shape, (0,)))
        decay = jnp.exp2(highest - shift)
        shared.weights[slot] = weights.astype(jnp.bfloat16)
        shared.factors[slot] = decay
        plgpu.commit_smem()
        plgpu.barrier_arrive(shared.weighted.at[slot])
        return new, total * decay + jnp.sum(weights, axis=1)

    start = [jnp.full((HEADS,), value, jnp.float32) for value in (-jnp.inf, 0.0)]
    start = [plgpu.layout_cast(each, _WGMMA.reduce(1)) for each in start]
    highest, total = lax.fori_loop(0, work.tiles, score, tuple(start))
    some = total > 0
    total = jnp.where(some, total, 1.0)
    shared.factors[SLOTS] = jnp.where(some, 1.0 / total, 0.0)
    shared.mean[:, pl.ds(LATENT, tail_width(jnp.bfloat16))] = _tail(
        jnp.where(some, highest * math.log(2) + jnp.log(total), -jnp.inf)
    )
    plgpu.commit_smem()
    plgpu.barrier_arrive(shared.scored)


def _tail(lse: jax.Array) -> jax.Array:
    """Elements after the mean [heads, width]: the halves of the float32, then zeros."""
    bits = lax.bitcast_convert_type(lse, jnp.int32)
    shape = (HEADS, tail_width(jnp.bfloat16))
    bits = lax.broadcast_in_dim(bits, shape, (0,))
    column = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=_WGMMA)
    halves = jnp.where(column == 0, bits, jnp.where(column == 1, bits >> 16, 0))
    return lax.bitcast_convert_type(halves.astype(jnp.int16), jnp.bfloat16)


def _add_up(plan: Plan, memory: Memory, shared: Shared, half: Scalar, work: Work) -> None:
    """Mean of a half of the latents, and of the second what comes after them."""
    # In two parts: of 128 registers a thread, which ptxas counts on, a product has not all.
    shape, tail = (HEADS, _HALF // 2), tail_width(jnp.bfloat16)
    parts = [pl.ds(half * _HALF + first, _HALF // 2) for first in (0, _HALF // 2)]

    def spread(factors: Ref) -> jax.Array:
        factors = plgpu.load(factors, layout=_WGMMA.reduce(1), optimized=False)
        return lax.broadcast_in_dim(factors, shape, (0,))

    def each_tile[Sums](add: Callable[[Scalar, Sums], Sums], start: Sums) -> Sums:
        def step(tile: jax.Array, sums: Sums) -> Sums:
            slot = work.slot(tile)
            plgpu.barrier_wait(shared.weighted.at[slot])
            sums = add(slot, sums)
            plgpu.barrier_arrive(shared.empty.at[slot])
            return sums

        return lax.fori_loop(0, work.tiles, step, start)

    def give_back(sums: list[jax.Array]) -> None:
        plgpu.barrier_wait(shared.scored)
        inverse = spread(shared.factors.at[SLOTS])
        for part, each in zip(parts, sums, strict=True):
            mean = (each * inverse).astype(jnp.bfloat16)
            for first in range(0, shape[1], tail):  # the width of a store divides the pitch
                columns = slice(first, first + tail)
                shared.mean[:, pl.ds(part.start + first, tail)] = mean[:, columns]
        plgpu.commit_smem()
        plgpu.barrier_arrive(shared.averaged)

        @pl.when(half == 1)
        def _() -> None:
            def store(part: Scalar, head: Scalar, row: Scalar) -> None:
                target = memory.packed.at[part, work.row, pl.ds(head, plan.chunk)]
                plgpu.copy_smem_to_gmem(shared.mean.at[pl.ds(row, plan.chunk)], target)

            plgpu.barrier_wait(shared.averaged)
            each_chunk(plan, work, store)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(shared.returned)

    if plan.interpreted:  # the interpreter knows no stores to accumulators

        def add(slot: Scalar, sums: list[jax.Array]) -> list[jax.Array]:
            def multiply(part: pl.Slice, products: Ref) -> jax.Array:
                plgpu.wgmma(products, shared.weights.at[slot], shared.keys.at[slot, :, part])
                return products[...]

            accumulator = plgpu.WGMMAAccumulatorRef(shape, jnp.float32)
            products = [
                pl.run_scoped(functools.partial(multiply, part), accumulator) for part in parts
            ]
            decay = spread(shared.factors.at[slot])
            return [each * decay + new for each, new in zip(sums, products, strict=True)]

        give_back(each_tile(add, [plgpu.layout_cast(jnp.zeros(shape, jnp.float32), _WGMMA)] * 2))
        return

    def accumulate(*sums: Ref) -> None:
        def add(slot: Scalar, _: None) -> None:
            decay = spread(shared.factors.at[slot])
            for part, each in zip(parts, sums, strict=True):
                each[...] = each[...] * decay
                plgpu.wgmma(each, shared.weights.at[slot], shared.keys.at[slot, :, part])
            plgpu.wgmma_wait(0)

        each_tile(add, None)
        give_back([each[...] for each in sums])

    pl.run_scoped(accumulate, *[plgpu.WGMMAAccumulatorRef(shape, jnp.float32)] * 2)
