"""SiLU(gate) * up of tiles of one expert's rows: a block computes 64 intermediate values of a tile.

Weights stream through a ring of copies, a block of inputs at a time. The rows of a tile are
gathered by token, some blocks of inputs at a time, each row by a copy of its own; places of a tile
that hold no row cost nothing and their values mean nothing.
"""

import dataclasses
import functools
import math
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
from pallas_kernels.experts.parameters import GatedStack
from pallas_kernels.experts.tiles import Tiles

_PROMISED = plgpu.OOBFillMode.PROMISE_IN_BOUNDS
_GATHERED = 8192  # values of a tile's rows that are gathered together
_SHARED_BYTES = 113 << 10  # of a block, when a multiprocessor has two
_MOST_STAGES = 4


@dataclasses.dataclass(frozen=True)
class _Plan:
    """Sizes of one launch.

    Attributes:
        weight_dtype: e4m3 or bfloat16.
        inputs: inputs of a matrix.
        width: intermediate values.
        num_experts: routed experts; the shared one has the next number.
        tile_rows: places of a tile.
        round_inputs: rows are rounded to e4m3.
        interpreted: runs in the interpreter.
    """

    weight_dtype: Any
    inputs: int
    width: int
    num_experts: int
    tile_rows: int
    round_inputs: bool
    interpreted: bool

    @property
    def quantized(self) -> bool:
        """Weights are e4m3 with scales."""
        return jnp.dtype(self.weight_dtype).itemsize == 1

    @property
    def steps(self) -> int:
        """Blocks of inputs."""
        return self.inputs // BLOCK

    @property
    def chunk_blocks(self) -> int:
        """Blocks of inputs of a row that are gathered together."""
        most = max(1, _GATHERED // (self.tile_rows * BLOCK))
        return math.gcd(self.steps, most)

    @property
    def stages(self) -> int:
        """Blocks of both matrices in flight, such that a multiprocessor has two blocks."""
        rows = self.tile_rows * BLOCK * 2 * (2 * self.chunk_blocks + 2)
        rest = rows + self.tile_rows * (ROWS * 2 + 12) + 8 * self.steps + 1024
        stage = 2 * ROWS * BLOCK * jnp.dtype(self.weight_dtype).itemsize
        return min(max(2, (_SHARED_BYTES - rest) // stage), _MOST_STAGES, self.steps)

    def scratch(self) -> dict[str, Any]:
        """Shared memory and barriers."""
        operand = operand_dtype(self.weight_dtype)
        ring = (self.stages, ROWS, BLOCK)
        transforms = tiled(self.weight_dtype)
        scratch = {
            "gates": plgpu.SMEM(ring, self.weight_dtype, transforms=transforms),
            "ups": plgpu.SMEM(ring, self.weight_dtype, transforms=transforms),
            "raw": plgpu.SMEM((2, self.tile_rows, self.chunk_blocks * BLOCK), jnp.bfloat16),
            "operand": plgpu.SMEM((2, self.tile_rows, BLOCK), operand, transforms=tiled(operand)),
            "listed": plgpu.SMEM((self.tile_rows,), jnp.int32),
            "result": plgpu.SMEM(
                (self.tile_rows, ROWS), jnp.bfloat16, transforms=tiled(jnp.bfloat16)
            ),
            "landed": plgpu.Barrier(num_barriers=self.stages, num_arrivals=2),
            "gathered": plgpu.Barrier(num_barriers=2, num_arrivals=self.tile_rows),
            "loaded": plgpu.Barrier(num_arrivals=3 if self.quantized else 1),
        }
        if self.quantized:
            scratch["factors"] = plgpu.SMEM((2, self.tile_rows), jnp.float32)
            scratch["scales"] = plgpu.SMEM((2, self.steps), jnp.float32)
            if self.interpreted:
                scratch["halves"] = plgpu.SMEM(
                    (ROWS, BLOCK), jnp.float16, transforms=tiled(jnp.float16)
                )
        return scratch


def gate_up(
    rows: Float[Array, "tokens hidden"],
    tiles: Tiles,
    layer: Scalar,
    offset: Scalar,
    routed: GatedStack,
    shared: GatedStack,
    *,
    per_token: int,
    round_inputs: bool,
    interpret: Interpret,
) -> Float[Array, "places width"]:
    """Intermediate values of the rows of all tiles, in bfloat16.

    Args:
        rows: inputs.
        tiles: rows of each expert.
        layer: which layer.
        offset: intermediate value with which this device's part begins.
        routed: routed experts.
        shared: the shared expert.
        per_token: routed experts of a token.
        round_inputs: rounds rows to e4m3.
        interpret: for `plgpu.kernel`.
    """
    _, num_experts, width, inputs = routed.gate.weight.shape
    most_tiles, tile_rows = tiles.pairs.shape
    plan = _Plan(
        weight_dtype=routed.gate.weight.dtype,
        inputs=inputs,
        width=width,
        num_experts=num_experts,
        tile_rows=tile_rows,
        round_inputs=round_inputs,
        interpreted=interpret is not None,
    )
    matrices = [x for stack in (routed, shared) for x in (stack.gate, stack.up)]
    operands = [x.weight for x in matrices] + [x.scale for x in matrices if x.scale is not None]
    return plgpu.kernel(
        functools.partial(_block, plan, rows.shape[0] * per_token, per_token),
        out_type=jax.ShapeDtypeStruct((most_tiles * tile_rows, width), jnp.bfloat16),
        grid=(most_tiles, width // ROWS),
        grid_names=("tile", "part"),
        scratch_types=plan.scratch(),
        kernel_name="experts_gate_up",
        interpret=interpret,
    )(
        rows,
        tiles.used,
        tiles.header,
        tiles.pairs,
        jnp.asarray(layer, jnp.int32).reshape(1),
        jnp.asarray(offset, jnp.int32).reshape(1),
        *operands,
    )


def _block(
    plan: _Plan,
    num_routed: int,
    per_token: int,
    rows_ref: Ref,
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
    *stacks, result_ref = references
    count = jnp.where(tile < used_ref[0], header_ref[tile, 1], 0)

    @pl.when(count > 0)
    def _() -> None:
        expert = header_ref[tile, 0]
        block = lax.div(offset_ref[0] + part * ROWS, BLOCK)
        place = _Place(layer_ref[0], expert, part, block)
        _Tile(plan, place, count, rows_ref, stacks, **scratch).compute(
            pairs_ref.at[tile],
            num_routed,
            per_token,
            result_ref.at[pl.ds(tile * plan.tile_rows, plan.tile_rows), pl.ds(part * ROWS, ROWS)],
        )


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where a block's weights lie.

    Attributes:
        layer: in the stacks.
        expert: routed expert, or their number for the shared one.
        part: which `ROWS` intermediate values.
        scale_row: their scales.
    """

    layer: jax.Array
    expert: jax.Array
    part: jax.Array
    scale_row: jax.Array


@dataclasses.dataclass(frozen=True)
class _Tile:
    """A block's part of shared memory, and what it does there."""

    plan: _Plan
    place: _Place
    count: jax.Array
    rows: Ref
    stacks: list[Ref]
    gates: Ref
    ups: Ref
    raw: Ref
    operand: Ref
    listed: Ref
    result: Ref
    landed: Ref
    gathered: Ref
    loaded: Ref
    factors: Ref = None
    scales: Ref = None
    halves: Ref = None

    def compute(self, pairs: Ref, num_routed: int, per_token: int, target: Ref) -> None:
        """Computes and writes the values of the tile's part."""
        plan = self.plan
        chunks = plan.steps // plan.chunk_blocks
        shared = self.place.expert == plan.num_experts
        for stage in range(plan.stages):
            self._fetch(stage)
        plgpu.copy_gmem_to_smem(pairs, self.listed, self.loaded, oob_mode=_PROMISED)
        if plan.quantized:
            self._fetch_scales()
        plgpu.barrier_wait(self.loaded)

        def token(index: Scalar) -> jax.Array:
            pair = self.listed[index]
            return jnp.where(shared, pair - num_routed, lax.div(pair, per_token))

        for chunk in range(min(2, chunks)):
            self._gather(chunk, token)

        def step(number: jax.Array, totals: tuple[jax.Array, jax.Array]) -> Any:
            chunk = lax.div(number, plan.chunk_blocks)
            within = lax.rem(number, plan.chunk_blocks)

            @pl.when(within == 0)
            def _() -> None:
                plgpu.barrier_wait(self.gathered.at[lax.rem(chunk, 2)])

            self._convert(number, chunk, within)
            slot = lax.rem(number, plan.stages)
            plgpu.barrier_wait(self.landed.at[slot])
            totals = self._add(number, slot, totals)

            @pl.when(number + plan.stages < plan.steps)
            def _() -> None:
                self._fetch(number + plan.stages)

            @pl.when((within == plan.chunk_blocks - 1) & (chunk + 2 < chunks))
            def _() -> None:
                self._gather(chunk + 2, token)

            return totals

        gate, up = lax.fori_loop(0, plan.steps, step, (zeros(plan.tile_rows),) * 2)
        values = (gate / (1 + jnp.exp(-gate)) * up).astype(jnp.bfloat16)
        by_row = plgpu.layout_cast(values, plgpu.Layout.WGMMA_TRANSPOSED)
        self.result.transpose((1, 0))[...] = by_row
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(self.result, target)
        plgpu.wait_smem_to_gmem(0)

    def _fetch(self, step: Scalar) -> None:
        """Begins to copy blocks of both matrices."""
        place, slot = self.place, lax.rem(step, self.plan.stages)
        columns = pl.ds(step * BLOCK, BLOCK)
        gate, up, shared_gate, shared_up = self.stacks[:4]
        outputs = pl.ds(place.part * ROWS, ROWS)
        barrier = self.landed.at[slot]

        @pl.when(place.expert < self.plan.num_experts)
        def _() -> None:
            index = (place.layer, place.expert, outputs, columns)
            plgpu.copy_gmem_to_smem(gate.at[index], self.gates.at[slot], barrier)
            plgpu.copy_gmem_to_smem(up.at[index], self.ups.at[slot], barrier)

        @pl.when(place.expert == self.plan.num_experts)
        def _() -> None:
            index = (place.layer, outputs, columns)
            plgpu.copy_gmem_to_smem(shared_gate.at[index], self.gates.at[slot], barrier)
            plgpu.copy_gmem_to_smem(shared_up.at[index], self.ups.at[slot], barrier)

    def _fetch_scales(self) -> None:
        """Begins to copy the scales of the part's blocks."""
        place = self.place
        for routed, shared, target in zip(self.stacks[4:6], self.stacks[6:], (0, 1), strict=True):
            scales = self.scales.at[target]

            @pl.when(place.expert < self.plan.num_experts)
            def _(routed: Ref = routed, scales: Ref = scales) -> None:
                source = routed.at[place.layer, place.expert, place.scale_row]
                plgpu.copy_gmem_to_smem(source, scales, self.loaded, oob_mode=_PROMISED)

            @pl.when(place.expert == self.plan.num_experts)
            def _(shared: Ref = shared, scales: Ref = scales) -> None:
                source = shared.at[place.layer, place.scale_row]
                plgpu.copy_gmem_to_smem(source, scales, self.loaded, oob_mode=_PROMISED)

    def _gather(self, chunk: Scalar, token: Any) -> None:
        """Begins to copy some blocks of inputs of each row."""
        slot, size = lax.rem(chunk, 2), self.plan.chunk_blocks * BLOCK

        @pl.loop(0, self.count)
        def _(index: jax.Array) -> None:
            source = self.rows.at[pl.ds(token(index), 1), pl.ds(chunk * size, size)]
            target = self.raw.at[slot, pl.ds(index, 1)]
            plgpu.copy_gmem_to_smem(source, target, self.gathered.at[slot], oob_mode=_PROMISED)

        # A barrier counts as many arrivals, whatever the number of rows.
        @pl.loop(self.count, self.plan.tile_rows)
        def _(_: jax.Array) -> None:
            plgpu.barrier_arrive(self.gathered.at[slot])

    def _convert(self, step: jax.Array, chunk: jax.Array, within: jax.Array) -> None:
        """Turns a block of inputs into an operand."""
        half = lax.rem(step, 2)
        block = self.raw.at[lax.rem(chunk, 2), :, pl.ds(within * BLOCK, BLOCK)]
        values = plgpu.load(block, layout=row_layout(), optimized=False)
        if self.plan.quantized:
            values, power = scale_rows(values, self.plan.round_inputs)
            self.factors[half] = power
        self.operand[half] = values
        plgpu.commit_smem()

    def _add(self, step: jax.Array, slot: jax.Array, totals: Any) -> Any:
        """Adds the products of a block to both sums."""
        half = lax.rem(step, 2)
        rows = self.operand.at[half]
        products = [multiply(x.at[slot], rows, self.halves) for x in (self.gates, self.ups)]
        if not self.plan.quantized:
            return tuple(total + x for total, x in zip(totals, products, strict=True))
        factors = load_by_row(self.factors.at[half])
        return tuple(
            total + product * (factors * self.scales[matrix, step])
            for matrix, (total, product) in enumerate(zip(totals, products, strict=True))
        )
