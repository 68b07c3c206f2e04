"""Scalar scores on tensor cores: blocks of keys against the queries of a few rows at a time.

The blocks of all sequences are numbered through and dealt out evenly, whatever the sequences'
lengths. A warpgroup keeps blocks of stored keys in flight to shared memory, turns the one that
has landed into an operand of the tensor cores, and reduces the products over heads in registers.

An fp8 key is 132 bytes, which no tensor copy can address; four keys are 528. So they are copied by
four and read back as words, of which byte b of word j is key value 4 * j + b. The operand holds
all bytes 0, then all bytes 1, and so on, and the query is put in the same order: a dot product
does not mind.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int, Shaped

from pallas_kernels.common.row_format import RowFormat
from pallas_kernels.common.types import Interpret, Ref, Scalar
from pallas_kernels.index_scores.plan import BLOCK, RING, Plan
from pallas_kernels.index_scores.query_operand import WORDS, query_operand
from pallas_kernels.index_scores.reference import KEY_BLOCK

_NUM_BLOCKS = 132  # one on each multiprocessor of an H200


def index_scores(
    query: Float[Array, "sequences rows heads key_dim"],
    head_weights: Float[Array, "sequences rows heads"],
    index_keys: Shaped[Array, "index_layers pages rows_per_page width"],
    index_layer: Scalar,
    pages: Int[Array, "sequences context_pages"],
    num_keys: Int[Array, " sequences"],
    *,
    row_format: RowFormat,
    interpret: Interpret,
    num_blocks: int | None = None,
) -> Float[Array, "sequences rows context"]:
    """The kernel of `operation.batched_index_scores`."""
    sequences, rows, heads, _ = query.shape
    fp8_keys = row_format.kind == "fp8"
    _, num_pages, rows_per_page, width = index_keys.shape
    if num_blocks is None:
        num_blocks = _NUM_BLOCKS if interpret is None else 2
    operand, weights = query_operand(query, head_weights, fp8_keys)
    plan = Plan(
        rows=rows,
        heads=heads,
        parts=operand.shape[1],
        dtype=operand.dtype,
        fp8_keys=fp8_keys,
        rows_per_page=rows_per_page,
        context_pages=pages.shape[1],
        interpreted=interpret is not None,
    )
    kernel = plgpu.kernel(
        functools.partial(_score, plan, sequences, num_pages),
        out_type=jax.ShapeDtypeStruct((sequences, rows, plan.context_blocks * BLOCK), jnp.float32),
        scratch_types=plan.scratch()
        | {"num_keys": plgpu.SMEM((-(-sequences // 4) * 4,), jnp.int32)},
        grid=(plan.row_tiles, max(1, num_blocks // plan.row_tiles)),
        grid_names=("row_tile", "block"),
        num_threads=plan.warpgroups,
        thread_name="warpgroup",
        kernel_name="index_scores",
        interpret=interpret,
    )
    scores = kernel(
        operand,
        weights,
        index_keys.reshape(-1, plan.keys_per_line * width),
        jnp.asarray(index_layer, jnp.int32)[None],
        pages,
        jnp.pad(num_keys.astype(jnp.int32), (0, -sequences % 4)),
    )
    return scores[:, :, : plan.context]


def _score(
    plan: Plan,
    sequences: int,
    num_pages: int,
    query_ref: Ref,
    weights_ref: Ref,
    keys_ref: Ref,
    layer_ref: Ref,
    pages_ref: Ref,
    num_keys_ref: Ref,
    scores_ref: Ref,
    *,
    num_keys: Ref,
    counted: Ref,
    query: Ref,
    weights: Ref,
    loaded: Ref,
    released: Ref,
    **own: Ref,
) -> None:
    """Body of one warpgroup: its share of every sequence's blocks of keys."""
    row_tile, block = lax.axis_index("row_tile"), lax.axis_index("block")
    warpgroup, num_blocks = lax.axis_index("warpgroup"), lax.axis_size("block")
    first_column = row_tile * plan.columns
    leads = warpgroup == 0

    @pl.when(leads)
    def _() -> None:
        plgpu.copy_gmem_to_smem(num_keys_ref, num_keys, counted)

    plgpu.barrier_wait(counted)

    def blocks_of(sequence: Scalar) -> jax.Array:
        """Blocks of a sequence to score, all of a key block of the reference or none."""
        scored = (num_keys[sequence] + KEY_BLOCK - 1) // KEY_BLOCK * (KEY_BLOCK // BLOCK)
        return jnp.clip(scored, 0, plan.context_blocks)

    total = lax.fori_loop(0, sequences, lambda s, total: total + blocks_of(s), jnp.int32(0))
    begin, end = total * block // num_blocks, total * (block + 1) // num_blocks
    group = _Warpgroup(plan, keys_ref, layer_ref[0] * num_pages, warpgroup, query, weights, **own)

    def visit(sequence: jax.Array, before: jax.Array) -> jax.Array:
        count = blocks_of(sequence)
        first = jnp.maximum(begin - before, 0)
        last = jnp.minimum(end - before, count)
        scores = scores_ref.at[sequence, pl.ds(row_tile * plan.rows_together, plan.rows_together)]

        @pl.when(first < last)
        def _() -> None:
            @pl.when(leads)
            def _() -> None:
                columns = pl.ds(first_column, plan.columns)
                for part in range(plan.parts):
                    source = query_ref.at[sequence, part, columns]
                    plgpu.copy_gmem_to_smem(source, query.at[part], loaded)
                plgpu.copy_gmem_to_smem(weights_ref.at[sequence, columns], weights, loaded)

            group.score(pages_ref.at[sequence], scores, first, last, loaded)
            # Once no warpgroup reads queries and weights any more, others may be copied in their
            # place.
            plgpu.commit_smem()
            plgpu.barrier_arrive(released)
            pl.when(leads)(lambda: plgpu.barrier_wait(released))

        stride = plan.warpgroups * num_blocks
        group.fill(scores, count + block * plan.warpgroups + warpgroup, stride)
        return before + count

    lax.fori_loop(0, sequences, visit, 0)


@dataclasses.dataclass(frozen=True)
class _Warpgroup:
    """One warpgroup's part of shared memory, and what it does there.

    Attributes:
        plan: sizes.
        keys: stored keys in device memory, in lines.
        first_page: page of `keys` at which the layer begins.
        number: the warpgroup's number in its block.
        query: [parts, columns, key_dim] in shared memory, of all warpgroups.
        weights: [columns] in shared memory, of all warpgroups.
        operand: keys as the tensor cores read them; one block a warpgroup, or one a slot.
        landed: a barrier for each slot.
        words: stored fp8 keys by slot.
        scale: scales of a block of fp8 keys.
    """

    plan: Plan
    keys: Ref
    first_page: jax.Array
    number: jax.Array
    query: Ref
    weights: Ref
    operand: Ref
    landed: Ref
    words: Ref = None
    scale: Ref = None

    def score(
        self, pages: Ref, scores: Ref, first: jax.Array, last: jax.Array, loaded: Ref
    ) -> None:
        """Scores every so many of the blocks from `first` to `last` of a sequence."""
        plan = self.plan
        first = first + self.number
        count = jnp.maximum(last - first + plan.warpgroups - 1, 0) // plan.warpgroups

        def block(step: Scalar) -> jax.Array:
            return first + step * plan.warpgroups

        for step in range(RING):

            @pl.when(step < count)
            def _(step: int = step) -> None:
                self._fetch(self._lines(pages, block(step)), self._slot(step))

        plgpu.barrier_wait(loaded)

        @pl.loop(0, count)
        def _(step: jax.Array) -> None:
            slot = self._slot(step)
            following = self._lines(pages, block(step + RING))
            plgpu.barrier_wait(self.landed.at[slot])

            def refill() -> None:
                @pl.when(step + RING < count)
                def _() -> None:
                    self._fetch(following, slot)

            columns = pl.ds(block(step) * BLOCK, BLOCK)
            if plan.fp8_keys:
                self._unpack(slot)
                refill()
                self._multiply(self.operand.at[self.number], scores.at[:, columns])
            else:
                self._multiply(self.operand.at[slot], scores.at[:, columns])
                refill()

    def fill(self, scores: Ref, first: jax.Array, stride: Scalar) -> None:
        """Writes -inf to every so many of the blocks from `first` on."""
        count = jnp.maximum(self.plan.context_blocks - first + stride - 1, 0) // stride
        nothing = jnp.full((BLOCK,), -jnp.inf, jnp.float32)

        @pl.loop(0, count)
        def _(step: jax.Array) -> None:
            columns = pl.ds((first + step * stride) * BLOCK, BLOCK)
            for row in range(self.plan.rows_together):
                scores[row, columns] = nothing

    def _slot(self, step: Scalar) -> Scalar:
        return self.number * RING + lax.rem(step, RING)

    def _lines(self, pages: Ref, block: jax.Array) -> list[jax.Array]:
        """Where in the stored keys each copy of a block begins."""
        plan = self.plan
        lines = []
        for part in range(BLOCK // plan.copied_keys):
            key = block * BLOCK + part * plan.copied_keys
            # The last block may end beyond the last page.
            index = jnp.minimum(key // plan.rows_per_page, plan.context_pages - 1)
            page = self.first_page + pages[index]
            row = page * plan.rows_per_page + lax.rem(key, plan.rows_per_page)
            lines.append(row // plan.keys_per_line)
        return lines

    def _fetch(self, lines: list[jax.Array], slot: Scalar) -> None:
        """Begins to copy a block of keys."""
        size = self.plan.copied_keys // self.plan.keys_per_line
        target = self.words if self.plan.fp8_keys else self.operand
        for part, line in enumerate(lines):
            plgpu.copy_gmem_to_smem(
                self.keys.at[pl.ds(line, size)],
                target.at[slot, pl.ds(part * size, size)],
                self.landed.at[slot],
            )

    def _unpack(self, slot: Scalar) -> None:
        """Turns a landed block of words into operand and scales; the slot is free after it."""
        words = self.words.at[slot]
        if self.plan.keys_per_line > 1:
            words = words.reshape(BLOCK, WORDS + 1)
        # Each lane holds a key: 33 words apart, no two lanes meet in a bank.
        layout = plgpu.Layout.TCGEN05_TMEM_NATIVE
        loaded = plgpu.load(words, layout=layout(1), optimized=False)
        self.scale[self.number] = lax.bitcast_convert_type(loaded[:, WORDS:], jnp.float32)
        itemsize = jnp.dtype(self.plan.dtype).itemsize
        values = plgpu.layout_cast(loaded[:, :WORDS], layout(16 // itemsize))
        planes = []
        for byte in range(4):
            plane = (values >> (8 * byte)).astype(jnp.int8)
            plane = lax.bitcast_convert_type(plane, jnp.float8_e4m3fn)
            planes.append(plane if itemsize == 1 else plane.astype(self.plan.dtype))
        self.operand[self.number] = jnp.concatenate(planes, axis=1)
        plgpu.commit_smem()

    def _load_scale(self) -> jax.Array:
        """Scales of the unpacked block, by key as products are."""
        scale = self.scale.at[self.number, :, 0]
        return plgpu.load(scale, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)

    def _multiply(self, keys: Ref, scores: Ref) -> None:
        """Scores a block of keys, some rows at a time."""
        plan = self.plan
        together = max(1, 64 // plan.heads)
        for first in range(0, plan.rows_together, together):
            rows = min(together, plan.rows_together - first)
            columns = pl.ds(first * plan.heads, rows * plan.heads)

            def multiply(products: Ref, columns: Any = columns) -> jax.Array:
                for part in range(plan.parts):
                    query = self.query.at[part, columns].transpose((1, 0))
                    plgpu.wgmma(products, keys, query)
                return products[...]

            products = pl.run_scoped(
                multiply, plgpu.WGMMAAccumulatorRef((BLOCK, rows * plan.heads), jnp.float32)
            )
            weights = plgpu.load(
                self.weights.at[columns], layout=plgpu.Layout.WGMMA.reduce(0), optimized=False
            )
            weights = lax.broadcast_in_dim(weights, products.shape, (1,))
            weighted = jnp.maximum(products, 0.0) * weights
            for row in range(rows):
                heads = weighted[:, row * plan.heads : (row + 1) * plan.heads]
                score = jnp.sum(heads, axis=1)
                scores[first + row] = score * self._load_scale() if plan.fp8_keys else score
