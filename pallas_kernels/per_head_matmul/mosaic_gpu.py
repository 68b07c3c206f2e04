"""Products by head: a block of the grid has 64 outputs of a head, and some tokens.

As in `matmul`, weights are the first operand of the tensor cores, e4m3 weights become float16, and
so do the rows that they meet. The weights pass through shared memory, from which the tensor cores
read them in either order. All that a block reads is in flight at once, since there is little.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common.types import Interpret, Ref, Scalar
from pallas_kernels.matmul.float16_rows import convert_rows, load_factors
from pallas_kernels.matmul.matrix_stack import MatrixStack
from pallas_kernels.matmul.mosaic_gpu import Matrix, matrix_operands
from pallas_kernels.matmul.plan import ROWS
from pallas_kernels.per_head_matmul.plan import Plan
from pallas_kernels.per_head_matmul.reference import HeadRows, HeadsFunction


def bind(
    stack: MatrixStack,
    index: tuple[Scalar, ...],
    *,
    taken: HeadRows,
    transpose: bool,
    interpret: Interpret,
) -> HeadsFunction:
    """The kernel of `operation.bind`."""

    def apply(rows: jax.Array) -> jax.Array:
        if rows.dtype != stack.dtype:
            raise ValueError(f"{rows.dtype} rows of a matrix bound for {stack.dtype}")
        plan = Plan.choose(stack, taken, transpose, rows.shape[0])
        return _multiply(plan, rows, stack, index, interpret)

    return apply


def _multiply(
    plan: Plan,
    rows: jax.Array,
    stack: MatrixStack,
    index: tuple[Scalar, ...],
    interpret: Interpret,
) -> jax.Array:
    """Launches the kernel."""
    tokens = rows.shape[0]
    flat = rows.reshape(tokens, plan.heads * plan.width)
    flat = jnp.pad(flat, ((0, plan.tokens - tokens), (0, 0)))
    leaves, structure = jax.tree.flatten(matrix_operands(stack, index))

    def body(rows_ref: Ref, *refs: Ref, **scratch: Ref) -> None:
        matrix = Matrix.read(jax.tree.unflatten(structure, refs[:-1]), refs[-1])
        _Tile(plan, matrix, rows_ref, **scratch).run()

    products = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((plan.tokens, plan.heads * plan.products), rows.dtype),
        scratch_types=plan.scratch(),
        grid=(plan.heads, plan.tiles, plan.tokens // plan.tokens_together),
        grid_names=("head", "tile", "token_tile"),
        kernel_name="per_head_matmul",
        interpret=interpret,
    )(lax.bitcast_convert_type(flat, plan.row_dtype), *leaves)
    return products[:tokens].reshape(tokens, plan.heads, plan.products)


@dataclasses.dataclass(frozen=True)
class _Tile:
    """A block's share.

    Attributes:
        plan: sizes.
        matrix: the stored matrix, and the products [tokens, heads * products].
        row_source: rows [tokens, heads * width] in device memory.
        weights: [steps, 64, block].
        rows: [steps, tokens together, block].
        landed: a barrier for each step.
        out: [tokens together, 64].
        converted: weights of a step in float16.
        factors: [tokens together], by which a product is multiplied.
    """

    plan: Plan
    matrix: Matrix
    row_source: Ref
    weights: Ref
    rows: Ref
    landed: Ref
    out: Ref
    converted: Ref = None
    factors: Ref = None

    def run(self) -> None:
        """Multiplies and stores."""
        plan = self.plan
        for step in range(plan.num_steps):
            self._fetch(step)
        total = plgpu.layout_cast(
            jnp.zeros((ROWS, plan.tokens_together), jnp.float32), plgpu.Layout.WGMMA
        )
        for step in range(plan.num_steps):
            total = total + self._step(step)
        self.out.transpose((1, 0))[...] = plgpu.layout_cast(
            total.astype(self.out.dtype), plgpu.Layout.WGMMA_TRANSPOSED
        )
        plgpu.commit_smem()
        first = (lax.axis_index("head") * plan.tiles + lax.axis_index("tile")) * ROWS
        target = self.matrix.products.at[self._tokens(), pl.ds(first, ROWS)]
        plgpu.copy_smem_to_gmem(self.out, target)
        plgpu.wait_smem_to_gmem(0)

    def _tokens(self) -> Any:
        together = self.plan.tokens_together
        return pl.ds(lax.axis_index("token_tile") * together, together)

    def _corner(self, step: int) -> tuple[Scalar, Scalar]:
        """Row and column of the stored matrix where a step's weights begin."""
        head, tile = lax.axis_index("head"), lax.axis_index("tile")
        first = head * self.plan.taken.per_head + self.plan.taken.first
        if self.plan.transpose:
            return first + step * self.plan.block, tile * ROWS
        return first + tile * ROWS, step * self.plan.block

    def _fetch(self, step: int) -> None:
        """Begins to copy a step's weights and rows."""
        row, column = self._corner(step)
        landed = self.landed.at[step]
        source = self.matrix.at(row, ROWS, column, self.plan.block)
        plgpu.copy_gmem_to_smem(source, self.weights.at[step], landed)
        first = lax.axis_index("head") * self.plan.width + step * self.plan.block
        source = self.row_source.at[self._tokens(), pl.ds(first, self.plan.block)]
        plgpu.copy_gmem_to_smem(source, self.rows.at[step], landed)

    def _step(self, step: int) -> jax.Array:
        """Product of a block of inputs [64, tokens together]."""
        scale = self.matrix.block_scale(*self._corner(step)) if self.plan.converts else None
        plgpu.barrier_wait(self.landed.at[step])
        weights = self.weights.at[step]
        if self.plan.converts:
            self.converted[...] = weights[...].astype(jnp.float16)
            self.factors[...] = convert_rows(self.rows.at[step], round_to_e4m3=False)
            plgpu.commit_smem()
            weights = self.converted
        if self.plan.transpose:
            weights = weights.transpose((1, 0))

        def multiply(products: Ref) -> jax.Array:
            plgpu.wgmma(products, weights, self.rows.at[step].transpose((1, 0)))
            return products[...]

        shape = (ROWS, self.plan.tokens_together)
        product = pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))
        if scale is None:
            return product
        factors = load_factors(self.factors) * scale
        return product * lax.broadcast_in_dim(factors, product.shape, (1,))
