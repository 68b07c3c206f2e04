"""Products of token rows and matrices that are read once, as they are stored.

Rows of the weights are the first operand of the tensor cores and token rows the second, so that
few tokens waste little. A block of the grid has 64 outputs and a part of the inputs; each of its
four warpgroups has every fourth block of 128 inputs, keeps some of them in flight to shared
memory, and adds their products up in float32. The sums of the four are added in a fixed order.

A block of e4m3 weights becomes float16 in registers, which is exact: one instruction for two
values. The rows that it meets become float16 where they lie, each row of the block scaled by a
power of two; the product is scaled by the inverse and by the scale of the weights' block.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common.types import Interpret, Ref, Scalar
from pallas_kernels.matmul.float16_rows import convert_rows, load_factors
from pallas_kernels.matmul.matrix_stack import MatrixStack, RowsFunction
from pallas_kernels.matmul.plan import BLOCK, ROWS, WARPGROUPS, Plan, num_tiles


def bind(
    stacks: Sequence[MatrixStack],
    indices: Sequence[tuple[Scalar, ...]],
    *,
    dtype: jnp.dtype | None,
    interpret: Interpret,
) -> RowsFunction:
    """The kernel of `operation.bind_together`."""

    def apply(rows: jax.Array) -> tuple[jax.Array, ...]:
        if rows.dtype != stacks[0].dtype:
            raise ValueError(f"{rows.dtype} rows of matrices bound for {stacks[0].dtype}")
        flat = rows.reshape(-1, rows.shape[-1])
        products = _multiply(flat, stacks, indices, dtype or rows.dtype, interpret)
        return tuple(product.reshape(*rows.shape[:-1], product.shape[-1]) for product in products)

    return apply


def _multiply(
    rows: jax.Array,
    stacks: Sequence[MatrixStack],
    indices: Sequence[tuple[Scalar, ...]],
    dtype: Any,
    interpret: Interpret,
) -> list[jax.Array]:
    """Launches the kernel, and adds up what its parts of the inputs give."""
    tokens = rows.shape[0]
    plan = Plan.choose(stacks, tokens, dtype, interpreted=interpret is not None)
    rows = jnp.pad(rows, ((0, plan.tokens - tokens), (0, 0)))
    operands = [matrix_operands(stack, index) for stack, index in zip(stacks, indices, strict=True)]
    leaves, structure = jax.tree.flatten(operands)

    def body(rows_ref: Ref, *refs: Ref, **scratch: Ref) -> None:
        given = jax.tree.unflatten(structure, refs[: len(leaves)])
        made = refs[len(leaves) :]
        matrices = list(zip(given, made, strict=True))
        _run_block(plan, stacks[0].round_inputs, matrices, rows_ref, **scratch)

    parts = plgpu.kernel(
        body,
        out_type=[
            jax.ShapeDtypeStruct(
                (plan.split, plan.tokens, num_tiles(outputs) * ROWS), plan.out_dtype
            )
            for outputs in plan.outputs
        ],
        scratch_types=plan.scratch(),
        grid=(plan.num_blocks,),
        grid_names=("block",),
        num_threads=WARPGROUPS,
        thread_name="warpgroup",
        kernel_name="matmul",
        interpret=interpret,
    )(lax.bitcast_convert_type(rows, plan.row_dtype), *leaves)
    # As terms, not as a reduction, whose order is XLA's.
    sums = [functools.reduce(jnp.add, list(each)) for each in parts]
    return [
        total[:tokens, :outputs].astype(dtype)
        for total, outputs in zip(sums, plan.outputs, strict=True)
    ]


def matrix_operands(stack: MatrixStack, index: tuple[Scalar, ...]) -> dict[str, Any]:
    """A matrix as the kernel is given it; scalars singly, since joining them is a launch."""

    def scalar(value: Scalar | None) -> jax.Array | None:
        return None if value is None else jnp.asarray(value, jnp.int32)[None]

    return {
        "weights": stack.weight,
        "scale": stack.scale,
        "index": tuple(map(scalar, index)),
        "parts": (scalar(stack.output_part), scalar(stack.input_part)),
    }


@dataclasses.dataclass(frozen=True)
class Matrix:
    """One matrix in device memory.

    Attributes:
        weights: [*stack, outputs, inputs].
        scale: [*stack, output blocks, input blocks], None of bfloat16 weights.
        index: where in the stack.
        first_blocks: where in the scales the weights begin.
        products: [split, tokens, outputs], of whole tiles.
    """

    weights: Ref
    scale: Ref
    index: tuple[Scalar, ...]
    first_blocks: tuple[Scalar, Scalar]
    products: Ref

    @classmethod
    def read(cls, operands: dict[str, Any], products: Ref) -> "Matrix":
        """The matrix of a kernel's operands, whose scalars are read here, once."""
        output_blocks, input_blocks = (
            0 if part is None else part[0] * (size // BLOCK)
            for part, size in zip(operands["parts"], operands["weights"].shape[-2:], strict=True)
        )
        return cls(
            weights=operands["weights"],
            scale=operands["scale"],
            index=tuple(each[0] for each in operands["index"]),
            first_blocks=(output_blocks, input_blocks),
            products=products,
        )

    def at(self, row: Scalar, rows: int, column: Scalar, columns: int) -> Ref:
        """A part of the weights."""
        return self.weights.at[(*self.index, pl.ds(row, rows), pl.ds(column, columns))]

    def rows(self, row: Scalar, rows: int) -> Ref:
        """Some rows of the weights."""
        return self.weights.at[(*self.index, pl.ds(row, rows))]

    def block_scale(self, row: Scalar, column: Scalar) -> jax.Array:
        """Scale of the block that holds a weight."""
        first_row, first_column = self.first_blocks
        return self.scale[(*self.index, first_row + row // BLOCK, first_column + column // BLOCK)]

    def visit(self, tile: Scalar, run: Callable[[int], None]) -> None:
        """Calls `run` with the number of rows of a tile."""
        whole, rest = divmod(self.weights.shape[-2], ROWS)
        pl.when(tile < whole)(lambda: run(ROWS))
        if rest:
            pl.when(tile == whole)(lambda: run(rest))


def _run_block(
    plan: Plan,
    round_inputs: bool,
    matrices: list[tuple[dict[str, Any], Ref]],
    rows: Ref,
    **scratch: Ref,
) -> None:
    """Body of a warpgroup: its share of the block's sum, in its turn."""
    warpgroup, block = lax.axis_index("warpgroup"), lax.axis_index("block")
    token = lax.rem(block, plan.token_tiles) * plan.tokens_together
    unit = block // plan.token_tiles
    part, tile = lax.rem(unit, plan.split), unit // plan.split
    first = 0
    for operands, outputs in zip(matrices, plan.outputs, strict=True):
        count = num_tiles(outputs)

        @pl.when((tile >= first) & (tile < first + count))
        def _(operands: tuple = operands, tile: Scalar = tile - first) -> None:
            matrix = Matrix.read(*operands)
            work = _Work(plan, round_inputs, warpgroup, rows, matrix, tile, part, token, **scratch)
            total = work.total()
            for sender in range(WARPGROUPS - 1, -1, -1):
                pl.when(warpgroup == sender)(functools.partial(work.pass_on, sender, total))

        first += count


@dataclasses.dataclass(frozen=True)
class _Work:
    """One warpgroup's share of a tile of outputs.

    Attributes:
        plan: sizes.
        round_inputs: rows are rounded to e4m3.
        number: the warpgroup's number in its block.
        rows: [tokens, inputs] in device memory.
        matrix: what they are multiplied by.
        tile: tile of outputs.
        part: part of the inputs.
        token: first token.
        weight_slots: [slots, 64, 128] of each warpgroup, one after another.
        row_slots: [slots, tokens together, 128], likewise.
        landed: a barrier for each slot.
        sums: [64, tokens together], and in the same memory [tokens together, 64].
        summed: a barrier for each warpgroup but the last, which passes on first.
        factors: [warpgroups, tokens together], by which a product is multiplied.
        converted: weights in float16, for the interpreter.
    """

    plan: Plan
    round_inputs: bool
    number: jax.Array
    rows: Ref
    matrix: Matrix
    tile: Scalar
    part: Scalar
    token: Scalar
    weight_slots: Ref
    row_slots: Ref
    landed: Ref
    sums: Ref
    summed: Ref
    factors: Ref = None
    converted: Ref = None

    def total(self) -> jax.Array:
        """Sum of the products with this warpgroup's blocks of inputs [64, tokens together]."""
        plan = self.plan
        count = (plan.part_blocks - self.number + WARPGROUPS - 1) // WARPGROUPS
        for step in range(plan.slots):
            pl.when(step < count)(functools.partial(self._fetch, step))

        def add(step: jax.Array, total: jax.Array) -> jax.Array:
            slot = self._slot(step)
            # Read ahead of the wait, so that the two overlap.
            scale = (
                self.matrix.block_scale(self.tile * ROWS, self._column(step))
                if plan.converts
                else None
            )
            plgpu.barrier_wait(self.landed.at[slot])
            if scale is not None:
                self._convert_rows(slot)
            product = self._multiply(slot)
            if scale is not None:
                product = product * lax.broadcast_in_dim(
                    load_factors(self.factors.at[self.number]) * scale, product.shape, (1,)
                )
            total = total + product  # before copies begin, which take registers
            pl.when(step + plan.slots < count)(lambda: self._fetch(step + plan.slots))
            return total

        zeros = jnp.zeros((ROWS, plan.tokens_together), jnp.float32)
        return lax.fori_loop(0, count, add, plgpu.layout_cast(zeros, plgpu.Layout.WGMMA))

    def pass_on(self, sender: int, total: jax.Array) -> None:
        """Adds what the warpgroups behind this one found, for the one before it or for memory."""
        by_output, by_token = self.sums
        if sender < WARPGROUPS - 1:
            plgpu.barrier_wait(self.summed.at[sender])
            total = total + plgpu.load(by_output, layout=plgpu.Layout.WGMMA, optimized=False)
        if sender:
            by_output[...] = total
            plgpu.commit_smem()
            plgpu.barrier_arrive(self.summed.at[sender - 1])
            return
        plgpu.commit_smem()  # before the same memory is written in another order
        by_token.transpose((1, 0))[...] = plgpu.layout_cast(
            total.astype(by_token.dtype), plgpu.Layout.WGMMA_TRANSPOSED
        )
        plgpu.commit_smem()
        self._store(by_token)

    def _store(self, products: Ref) -> None:
        """Copies finished sums [tokens together, 64] to memory."""
        tokens = pl.ds(self.token, self.plan.tokens_together)
        outputs = pl.ds(self.tile * ROWS, ROWS)
        plgpu.copy_smem_to_gmem(products, self.matrix.products.at[self.part, tokens, outputs])
        plgpu.wait_smem_to_gmem(0)

    def _slot(self, step: Scalar) -> Scalar:
        return self.number * self.plan.slots + lax.rem(step, self.plan.slots)

    def _column(self, step: Scalar) -> Scalar:
        """First input of a step."""
        return (self.part * self.plan.part_blocks + self.number + step * WARPGROUPS) * BLOCK

    def _fetch(self, step: Scalar) -> None:
        """Begins to copy a block of weights and of rows."""
        slot, column = self._slot(step), self._column(step)
        landed = self.landed.at[slot]

        def fetch_weights(size: int) -> None:
            plgpu.copy_gmem_to_smem(
                self.matrix.at(self.tile * ROWS, size, column, BLOCK),
                # What a tile that is not whole leaves of a slot gives outputs that nobody stores.
                self.weight_slots.at[slot, pl.ds(0, size)],
                landed,
            )

        self.matrix.visit(self.tile, fetch_weights)
        tokens = pl.ds(self.token, self.plan.tokens_together)
        source = self.rows.at[tokens, pl.ds(column, BLOCK)]
        plgpu.copy_gmem_to_smem(source, self.row_slots.at[slot], landed)

    def _convert_rows(self, slot: Scalar) -> None:
        """Turns bfloat16 rows into float16 in their place, and keeps what scales them back."""
        self.factors[self.number] = convert_rows(self.row_slots.at[slot], self.round_inputs)
        plgpu.commit_smem()

    def _multiply(self, slot: Scalar) -> jax.Array:
        """Product of a block [64, tokens together]."""

        def multiply(products: Ref) -> jax.Array:
            weights = self.weight_slots.at[slot]
            if self.plan.converts:
                weights = weights[...].astype(jnp.float16)
                if self.plan.interpreted:
                    # The interpreter has no operands in registers.
                    self.converted[self.number] = weights
                    plgpu.commit_smem()
                    weights = self.converted.at[self.number]
            plgpu.wgmma(products, weights, self.row_slots.at[slot].transpose((1, 0)))
            return products[...]

        shape = (ROWS, self.plan.tokens_together)
        return pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))
