"""Products of many token rows, as in prefill: bound by the tensor cores, not by memory.

Rows become operands before the launch, since each is read by many blocks of the grid: e4m3 where
they are rounded to it, else float16, with a factor per group of 128 inputs. A block of the grid
has two warpgroups of 64 outputs each, which share the rows, or two halves of the rows where the
outputs are no multiple of 128; a third warpgroup copies. As with few rows, weights are the first
operand of the tensor cores, and the product of each block of 128 inputs is scaled and added in
float32. Tensor cores add e4m3 products with 14 bits, so none is longer than that block: DeepSeek-V3
(arXiv:2412.19437), section 3.3.2.
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

from pallas_kernels.common.quantization import LEAST_SCALE
from pallas_kernels.common.row_format import quantize_e4m3
from pallas_kernels.common.types import Interpret, Ref, Scalar
from pallas_kernels.matmul.float16_rows import float16_rows, load_factors
from pallas_kernels.matmul.matrix_stack import MatrixStack, RowsFunction
from pallas_kernels.matmul.mosaic_gpu import Matrix, matrix_operands
from pallas_kernels.matmul.plan import BLOCK, ROWS, transforms

_COMPUTING = 2  # warpgroups
_MAX_STAGES = 4
_SHARED_BYTES = 220 << 10
_GROUP = 8  # tiles of outputs that are visited in turn, so that their weights stay in the cache


def unsupported(stacks: Sequence[MatrixStack]) -> str | None:
    """Why these matrices cannot be multiplied so, None if they can."""
    for stack in stacks:
        if stack.outputs % ROWS:
            return f"{stack.outputs} outputs, not a multiple of {ROWS}"
    return None


def bind(
    stacks: Sequence[MatrixStack],
    indices: Sequence[tuple[Scalar, ...]],
    *,
    dtype: jnp.dtype | None,
    interpret: Interpret,
) -> RowsFunction:
    """The kernel of `operation.bind_together` for many rows; a launch for each matrix."""

    def apply(rows: jax.Array) -> tuple[jax.Array, ...]:
        if rows.dtype != stacks[0].dtype:
            raise ValueError(f"{rows.dtype} rows of matrices bound for {stacks[0].dtype}")
        flat = rows.reshape(-1, rows.shape[-1])
        operand, factors = _row_operand(stacks[0], flat)
        products = []
        for stack, index in zip(stacks, indices, strict=True):
            product = _multiply(operand, factors, stack, index, dtype or rows.dtype, interpret)
            products.append(product.reshape(*rows.shape[:-1], stack.outputs))
        return tuple(products)

    return apply


def _row_operand(stack: MatrixStack, rows: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    """Rows as the tensor cores read them, and factors [groups, tokens] of e4m3 weights."""
    if stack.scale is None:
        return rows, None
    if stack.round_inputs:
        values, scale = quantize_e4m3(rows, LEAST_SCALE)
        return values, scale.T
    values, factors = float16_rows(rows)
    return values, factors.T


def _multiply(
    rows: jax.Array,
    factors: jax.Array | None,
    stack: MatrixStack,
    index: tuple[Scalar, ...],
    dtype: Any,
    interpret: Interpret,
) -> jax.Array:
    """Launches the kernel."""
    tokens = rows.shape[0]
    plan = _Plan(stack.outputs, stack.inputs, stack.weight.dtype, rows.dtype, tokens, dtype)
    padding = plan.row_tiles * plan.rows - tokens
    rows = jnp.pad(rows, ((0, padding), (0, 0)))
    if factors is not None:
        factors = jnp.pad(factors, ((0, 0), (0, padding)))
    leaves, structure = jax.tree.flatten((rows, factors, matrix_operands(stack, index)))

    def body(*refs: Ref, **scratch: Ref) -> None:
        row_source, factor_source, operands = jax.tree.unflatten(structure, refs[:-1])
        matrix = Matrix.read(operands, refs[-1])
        _Block(plan, matrix, row_source, factor_source, **scratch).run()

    products = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((rows.shape[0], stack.outputs), dtype),
        scratch_types=plan.scratch(interpreted=interpret is not None),
        grid=(plan.row_tiles * plan.output_tiles,),
        grid_names=("block",),
        num_threads=_COMPUTING + 1,
        thread_name="warpgroup",
        kernel_name="matmul_many_rows",
        interpret=interpret,
    )(*leaves)
    return products[:tokens]


@dataclasses.dataclass(frozen=True)
class _Plan:
    """Sizes of one launch.

    Attributes:
        num_outputs: of the matrix.
        inputs: of the matrix.
        weight_dtype: of the matrix.
        row_dtype: of the rows as they are multiplied.
        tokens: rows.
        dtype: of the products.
    """

    num_outputs: int
    inputs: int
    weight_dtype: Any
    row_dtype: Any
    tokens: int
    dtype: Any

    @property
    def converts(self) -> bool:
        """Whether e4m3 weights are multiplied in float16."""
        return self.weight_dtype != self.row_dtype

    @property
    def shares_rows(self) -> bool:
        """Whether both warpgroups have the same rows, and not the same outputs."""
        return self.num_outputs % (_COMPUTING * ROWS) == 0

    @property
    def own_rows(self) -> int:
        """Rows of a warpgroup; weights that are converted take registers."""
        return 96 if self.converts else 128

    @property
    def rows(self) -> int:
        """Rows of a block."""
        return self.own_rows * (1 if self.shares_rows else _COMPUTING)

    @property
    def outputs(self) -> int:
        """Outputs of a block."""
        return ROWS * (_COMPUTING if self.shares_rows else 1)

    @property
    def row_tiles(self) -> int:
        """Tiles of rows."""
        return max(1, -(-self.tokens // self.rows))

    @property
    def output_tiles(self) -> int:
        """Tiles of outputs."""
        return self.num_outputs // self.outputs

    @property
    def stages(self) -> int:
        """Steps in flight."""
        weights = self.outputs * jnp.dtype(self.weight_dtype).itemsize
        stage = BLOCK * (weights + self.rows * jnp.dtype(self.row_dtype).itemsize) + self.rows * 4
        out = _COMPUTING * self.own_rows * ROWS * jnp.dtype(self.dtype).itemsize
        return min(_MAX_STAGES, (_SHARED_BYTES - out) // stage)

    def specs(self, scaled: bool) -> list[Any]:
        """Blocks of weights, rows and factors of a step."""
        specs = [
            plgpu.BlockSpec(
                (rows, BLOCK), lambda step: (0, step), transforms=list(transforms(dtype))
            )
            for rows, dtype in ((self.outputs, self.weight_dtype), (self.rows, self.row_dtype))
        ]
        if scaled:
            specs.append(plgpu.BlockSpec((1, self.rows), lambda step: (step, 0)))
        return specs

    def scratch(self, interpreted: bool) -> dict[str, Any]:
        """Shared memory beside that of the pipeline."""
        shape = (_COMPUTING, self.own_rows, ROWS)
        scratch = {"out": plgpu.SMEM(shape, self.dtype, transforms=transforms(self.dtype))}
        if self.converts and interpreted:
            shape = (_COMPUTING, ROWS, BLOCK)
            scratch["converted"] = plgpu.SMEM(
                shape, jnp.float16, transforms=transforms(jnp.float16)
            )
        return scratch


@dataclasses.dataclass(frozen=True)
class _Block:
    """A block of the grid.

    Attributes:
        plan: sizes.
        matrix: the matrix, and the products [tokens, outputs].
        row_source: rows [tokens, inputs] in device memory.
        factor_source: their factors [groups, tokens], or None.
        out: [warpgroups, own rows, 64].
        converted: weights in float16, for the interpreter.
    """

    plan: _Plan
    matrix: Matrix
    row_source: Ref
    factor_source: Ref
    out: Ref
    converted: Ref = None

    def run(self) -> None:
        """Multiplies and stores."""
        plan = self.plan
        row_tile, output_tile = plgpu.planar_snake(
            lax.axis_index("block"), (plan.row_tiles, plan.output_tiles), 1, _GROUP
        )
        first_row, first_output = row_tile * plan.rows, output_tile * plan.outputs
        rows, scaled = pl.ds(first_row, plan.rows), self.factor_source is not None
        sources = [
            self.matrix.rows(first_output, plan.outputs),
            self.row_source.at[rows],
            *([self.factor_source.at[:, rows]] if scaled else []),
        ]
        # Typed as a pipeline's body without a carry.
        add: Any = functools.partial(self._add, first_output)
        plgpu.emit_pipeline_warp_specialized(
            add,
            grid=(plan.inputs // BLOCK,),
            in_specs=plan.specs(scaled),
            max_concurrent_steps=plan.stages,
            memory_registers=40,
            wg_axis="warpgroup",
            num_compute_wgs=_COMPUTING,
            compute_context=functools.partial(self._compute, first_row, first_output),
        )(*sources)

    def _own(self) -> tuple[Any, Any]:
        """This warpgroup's outputs and rows of the block."""
        warpgroup = lax.axis_index("warpgroup")
        if self.plan.shares_rows:
            return pl.ds(warpgroup * ROWS, ROWS), pl.ds(0, self.plan.own_rows)
        return pl.ds(0, ROWS), pl.ds(warpgroup * self.plan.own_rows, self.plan.own_rows)

    def _compute(
        self, first_row: Scalar, first_output: Scalar, run: Callable[[jax.Array], jax.Array]
    ) -> None:
        """Runs the pipeline in a computing warpgroup, and stores its sum."""
        zeros = jnp.zeros((ROWS, self.plan.own_rows), jnp.float32)
        total = run(plgpu.layout_cast(zeros, plgpu.Layout.WGMMA))
        out = self.out.at[lax.axis_index("warpgroup")]
        out.transpose((1, 0))[...] = plgpu.layout_cast(
            total.astype(out.dtype), plgpu.Layout.WGMMA_TRANSPOSED
        )
        plgpu.commit_smem()
        outputs, rows = self._own()
        target = self.matrix.products.at[
            pl.ds(first_row + rows.start, rows.size),
            pl.ds(first_output + outputs.start, outputs.size),
        ]
        plgpu.copy_smem_to_gmem(out, target)
        plgpu.wait_smem_to_gmem(0)

    def _add(
        self,
        first_output: Scalar,
        step: tuple[jax.Array],
        weights: Ref,
        rows: Ref,
        *factors_and_total: Any,
    ) -> jax.Array:
        """The sum with the product of one more block of inputs."""
        *factors, total = factors_and_total
        own_outputs, own_rows = self._own()
        scale = (
            self.matrix.block_scale(first_output + own_outputs.start, step[0] * BLOCK)
            if factors
            else None
        )
        product = self._product(weights.at[own_outputs], rows.at[own_rows])
        if scale is None:
            return total + product
        factor = load_factors(factors[0].at[0, own_rows]) * scale
        return total + product * lax.broadcast_in_dim(factor, product.shape, (1,))

    def _product(self, weights: Ref, rows: Ref) -> jax.Array:
        def multiply(products: Ref) -> jax.Array:
            operand = weights
            if self.plan.converts:
                operand = weights[...].astype(jnp.float16)
                if self.converted is not None:
                    # The interpreter has no operands in registers.
                    warpgroup = lax.axis_index("warpgroup")
                    self.converted[warpgroup] = operand
                    plgpu.commit_smem()
                    operand = self.converted.at[warpgroup]
            plgpu.wgmma(products, operand, rows.transpose((1, 0)))
            return products[...]

        shape = (ROWS, self.plan.own_rows)
        return pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))
