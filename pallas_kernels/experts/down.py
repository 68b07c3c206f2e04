"""The last product of tiles of one expert's rows: a block computes some outputs of a tile.

A tile's intermediate values become an operand once, and the weights stream past them. Each pair of
a token and an expert has a row of its own for its outputs, which `combine` adds up in an order that
no other token has a part in.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.common.types import Interpret, Ref, Scalar
from pallas_kernels.experts.block_product import (
    BLOCK,
    ROWS,
    load_by_row,
    multiply,
    operand_dtype,
    row_layout,
    scale_rows,
    tiled,
    zeros,
)
from pallas_kernels.experts.parameters import ExpertMatrices
from pallas_kernels.experts.tiles import Tiles

_PROMISED = plgpu.OOBFillMode.PROMISE_IN_BOUNDS
_STAGES = 4
_OUTPUTS = (384, 256, 128)  # of a block, the first that divides all


@dataclasses.dataclass(frozen=True)
class _Plan:
    """Sizes of one launch.

    Attributes:
        weight_dtype: e4m3 or bfloat16.
        width: intermediate values.
        width_blocks: blocks of intermediate values on all devices.
        outputs: outputs of a block.
        num_experts: routed experts; the shared one has the next number.
        tile_rows: places of a tile.
        round_inputs: intermediate values are rounded to e4m3.
        interpreted: runs in the interpreter.
    """

    weight_dtype: Any
    width: int
    width_blocks: int
    outputs: int
    num_experts: int
    tile_rows: int
    round_inputs: bool
    interpreted: bool

    @property
    def quantized(self) -> bool:
        """Weights are e4m3 with scales."""
        return jnp.dtype(self.weight_dtype).itemsize == 1

    @property
    def blocks(self) -> int:
        """Blocks of intermediate values."""
        return self.width // BLOCK

    @property
    def steps(self) -> int:
        """Products of `ROWS` outputs."""
        return self.outputs // ROWS

    @property
    def stages(self) -> int:
        """Steps whose weights are in flight."""
        return min(_STAGES, self.steps)

    def scratch(self) -> dict[str, Any]:
        """Shared memory and barriers."""
        operand = operand_dtype(self.weight_dtype)
        scratch = {
            "ring": plgpu.SMEM(
                (self.stages, ROWS, self.width),
                self.weight_dtype,
                transforms=tiled(self.weight_dtype),
            ),
            "operand": plgpu.SMEM(
                (self.blocks, self.tile_rows, BLOCK), operand, transforms=tiled(operand)
            ),
            "listed": plgpu.SMEM((self.tile_rows,), jnp.int32),
            "result": plgpu.SMEM((self.tile_rows, self.outputs), jnp.bfloat16),
            "landed": plgpu.Barrier(num_barriers=self.stages),
            "loaded": plgpu.Barrier(num_arrivals=2 if self.quantized else 1),
        }
        if self.quantized:
            scratch["factors"] = plgpu.SMEM((self.blocks, self.tile_rows), jnp.float32)
            scales = (self.outputs // BLOCK, self.width_blocks)
            scratch["scales"] = plgpu.SMEM(scales, jnp.float32)
            if self.interpreted:
                scratch["halves"] = plgpu.SMEM(
                    (ROWS, BLOCK), jnp.float16, transforms=tiled(jnp.float16)
                )
        return scratch


def down(
    values: Float[Array, "places width"],
    tiles: Tiles,
    layer: Scalar,
    offset: Scalar,
    routed: ExpertMatrices,
    shared: ExpertMatrices,
    *,
    num_pairs: int,
    round_inputs: bool,
    interpret: Interpret,
) -> Float[Array, "pairs hidden"]:
    """Outputs of all pairs, in bfloat16; those of a pair that is in no tile mean nothing.

    Args:
        values: intermediate values of the rows of all tiles.
        tiles: rows of each expert.
        layer: which layer.
        offset: intermediate value with which this device's part begins.
        routed: routed experts.
        shared: the shared expert.
        num_pairs: pairs of a token and an expert, routed and shared.
        round_inputs: rounds intermediate values to e4m3.
        interpret: for `plgpu.kernel`.
    """
    _, num_experts, hidden, width = routed.weight.shape
    most_tiles, tile_rows = tiles.pairs.shape
    plan = _Plan(
        weight_dtype=routed.weight.dtype,
        width=width,
        width_blocks=0 if routed.scale is None else routed.scale.shape[-1],
        outputs=next(size for size in _OUTPUTS if hidden % size == 0),
        num_experts=num_experts,
        tile_rows=tile_rows,
        round_inputs=round_inputs,
        interpreted=interpret is not None,
    )
    scales = [stack.scale for stack in (routed, shared) if stack.scale is not None]
    return plgpu.kernel(
        functools.partial(_block, plan),
        out_type=jax.ShapeDtypeStruct((num_pairs, hidden), jnp.bfloat16),
        grid=(most_tiles, hidden // plan.outputs),
        grid_names=("tile", "part"),
        scratch_types=plan.scratch(),
        kernel_name="experts_down",
        interpret=interpret,
    )(
        values,
        tiles.used,
        tiles.header,
        tiles.pairs,
        jnp.asarray(layer, jnp.int32).reshape(1),
        jnp.asarray(offset, jnp.int32).reshape(1),
        routed.weight,
        shared.weight,
        *scales,
    )


def _block(
    plan: _Plan,
    values_ref: Ref,
    used_ref: Ref,
    header_ref: Ref,
    pairs_ref: Ref,
    layer_ref: Ref,
    offset_ref: Ref,
    *references: Ref,
    **scratch: Ref,
) -> None:
    """Body of a block: a tile's part, if the tile has rows."""
    tile, part = lax.axis_index("tile"), lax.axis_index("part")
    *stacks, outputs_ref = references
    count = jnp.where(tile < used_ref[0], header_ref[tile, 1], 0)

    @pl.when(count > 0)
    def _() -> None:
        expert = header_ref[tile, 0]
        body = _Tile(plan, layer_ref[0], expert, part, stacks, **scratch)
        body.start(pairs_ref.at[tile])
        body.convert(values_ref.at[pl.ds(tile * plan.tile_rows, plan.tile_rows)])
        body.multiply(lax.div(offset_ref[0], BLOCK))
        body.write(count, outputs_ref)


@dataclasses.dataclass(frozen=True)
class _Tile:
    """A block's part of shared memory, and what it does there."""

    plan: _Plan
    layer: jax.Array
    expert: jax.Array
    part: jax.Array
    stacks: list[Ref]
    ring: Ref
    operand: Ref
    listed: Ref
    result: Ref
    landed: Ref
    loaded: Ref
    factors: Ref = None
    scales: Ref = None
    halves: Ref = None

    def start(self, pairs: Ref) -> None:
        """Begins to copy weights, scales and the numbers of pairs."""
        for step in range(self.plan.stages):
            self._fetch(step)
        plgpu.copy_gmem_to_smem(pairs, self.listed, self.loaded, oob_mode=_PROMISED)
        if self.plan.quantized:
            blocks = self.plan.outputs // BLOCK
            rows = pl.ds(self.part * blocks, blocks)
            self._copy(self.stacks[2:], rows, self.scales, self.loaded, oob_mode=_PROMISED)

    def convert(self, values: Ref) -> None:
        """Turns intermediate values into operands."""
        for block in range(self.plan.blocks):
            group = plgpu.load(
                values.at[:, pl.ds(block * BLOCK, BLOCK)],
                layout=row_layout(),
                optimized=False,
            )
            if self.plan.quantized:
                group, power = scale_rows(group, self.plan.round_inputs)
                self.factors[block] = power
            self.operand[block] = group
        plgpu.commit_smem()

    def multiply(self, first_block: jax.Array) -> None:
        """Computes all outputs of the block, into shared memory."""
        plan = self.plan
        plgpu.barrier_wait(self.loaded)

        @pl.loop(0, plan.steps)
        def _(step: jax.Array) -> None:
            slot = lax.rem(step, plan.stages)
            plgpu.barrier_wait(self.landed.at[slot])
            total = zeros(plan.tile_rows)
            for block in range(plan.blocks):
                weights = self.ring.at[slot, :, pl.ds(block * BLOCK, BLOCK)]
                product = multiply(weights, self.operand.at[block], self.halves)
                if plan.quantized:
                    scale = self.scales[lax.div(step * ROWS, BLOCK), first_block + block]
                    product = product * (load_by_row(self.factors.at[block]) * scale)
                total = total + product

            @pl.when(step + plan.stages < plan.steps)
            def _() -> None:
                self._fetch(step + plan.stages)

            by_row = plgpu.layout_cast(total.astype(jnp.bfloat16), plgpu.Layout.WGMMA_TRANSPOSED)
            self.result.at[:, pl.ds(step * ROWS, ROWS)].transpose((1, 0))[...] = by_row

        plgpu.commit_smem()

    def write(self, count: jax.Array, outputs: Ref) -> None:
        """Writes the outputs of the tile's pairs to their rows."""
        columns = pl.ds(self.part * self.plan.outputs, self.plan.outputs)

        @pl.loop(0, count)
        def _(index: jax.Array) -> None:
            target = outputs.at[pl.ds(self.listed[index], 1), columns]
            plgpu.copy_smem_to_gmem(self.result.at[pl.ds(index, 1)], target)

        plgpu.wait_smem_to_gmem(0)

    def _fetch(self, step: Scalar) -> None:
        """Begins to copy the weights of a step."""
        slot = lax.rem(step, self.plan.stages)
        rows = pl.ds(self.part * self.plan.outputs + step * ROWS, ROWS)
        self._copy(self.stacks[:2], rows, self.ring.at[slot], self.landed.at[slot])

    def _copy(self, stacks: list[Ref], rows: Any, target: Ref, barrier: Ref, **how: Any) -> None:
        """Begins to copy rows of a matrix of a routed expert, or of the shared one's."""
        routed, shared = stacks

        @pl.when(self.expert < self.plan.num_experts)
        def _() -> None:
            source = routed.at[self.layer, self.expert, rows]
            plgpu.copy_gmem_to_smem(source, target, barrier, **how)

        @pl.when(self.expert == self.plan.num_experts)
        def _() -> None:
            plgpu.copy_gmem_to_smem(shared.at[self.layer, rows], target, barrier, **how)
