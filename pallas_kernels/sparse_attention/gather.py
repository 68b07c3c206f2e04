"""Selected rows gathered by id, and turned into operands of the tensor cores."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common.ring_copy import load
from pallas_kernels.common.row_format import SCALE_GROUP
from pallas_kernels.common.types import Ref, Scalar
from pallas_kernels.sparse_attention.block import Memory, Shared, Work
from pallas_kernels.sparse_attention.column_order import LATENT, ROPE
from pallas_kernels.sparse_attention.plan import SLOTS, TILE, Plan

_WARPS = 4
_BYTES = 4  # of a word
_GROUP_WORDS = SCALE_GROUP // _BYTES
_GROUPS = LATENT // SCALE_GROUP


@dataclasses.dataclass(frozen=True)
class Gatherer:
    """The warpgroup that gathers rows."""

    plan: Plan
    memory: Memory
    shared: Shared

    def run(self, work: Work) -> None:
        """Gathers the rows of some work, a tile after another."""
        tiles, shared = work.tiles, self.shared
        lax.fori_loop(0, jnp.minimum(tiles, SLOTS), lambda tile, _: self._fetch(work, tile), None)

        @pl.loop(0, tiles)
        def _(tile: jax.Array) -> None:
            slot = work.slot(tile)
            plgpu.barrier_wait(shared.landed.at[slot])

            @pl.when(work.first_tile + tile >= SLOTS)
            def _() -> None:
                plgpu.barrier_wait(shared.empty.at[slot])

            if self.plan.fp8_rows:
                self._unpack(shared.stored.at[slot, 0], shared.keys.at[slot])
            else:
                self._spread(shared.stored.at[slot], shared.keys.at[slot])
            plgpu.commit_smem()
            plgpu.barrier_arrive(shared.full.at[slot])
            pl.when(tile + SLOTS < tiles)(lambda: self._fetch(work, tile + SLOTS))

    def finish(self, total: jax.Array) -> None:
        """Waits until the last of `total` tiles have been read: no arrival may be left over."""

        @pl.loop(jnp.maximum(total - SLOTS, 0), total)
        def _(tile: jax.Array) -> None:
            plgpu.barrier_wait(self.shared.empty.at[lax.rem(tile, SLOTS)])

    def _fetch(self, work: Work, tile: Scalar) -> None:
        """Begins to copy the rows of a tile; those beyond the last are the last one again."""
        slot = work.slot(tile)

        def fetch(number: Scalar) -> None:
            index = jnp.minimum(tile * TILE + number, work.count - 1)
            self._copy(slot, number, self.memory.row_ids[work.row, index])

        if self.plan.interpreted:
            pl.loop(0, TILE)(fetch)
        else:
            # A warp issues its copies by itself: a warpgroup would meet at a barrier before each.
            @plgpu.warp_map
            def _(warp: jax.Array) -> None:
                for number in range(TILE // _WARPS):
                    fetch(warp * (TILE // _WARPS) + number)

    def _copy(self, slot: Scalar, number: Scalar, row_id: jax.Array) -> None:
        """Begins to copy a row, which lies in the slab or in host memory."""
        plan, memory, landed = self.plan, self.memory, self.shared.landed.at[slot]
        layer = memory.layer[0]

        def copy(source: Ref, row: Scalar) -> None:
            for piece, first, size in plan.copies:
                columns = pl.ds(piece * plan.pieces[1] + first, size)
                target = self.shared.stored.at[slot, piece, pl.ds(number, 1), pl.ds(first, size)]
                load(source.at[pl.ds(row, 1), columns], target, landed)

        def copy_from_slab() -> None:
            index = layer * plan.layer_rows + row_id
            copy(memory.slab, jnp.where(index < plan.slab_rows, index, index - plan.slab_rows))

        if (host := memory.host) is None:
            copy_from_slab()
        else:
            pl.when(row_id < plan.slab_rows)(copy_from_slab)
            host_row = row_id - plan.slab_rows
            pl.when(row_id >= plan.slab_rows)(lambda: copy(host.at[host_row], layer))

    def _unpack(self, stored: Ref, keys: Ref) -> None:
        """Turns fp8 rows [TILE, words] into operands [TILE, values]."""
        scales = plgpu.load(
            stored.at[:, pl.ds(LATENT // _BYTES, _GROUPS)], layout=_scale_layout(), optimized=False
        )
        scales = lax.bitcast_convert_type(scales, jnp.float32)
        group = plgpu.broadcasted_iota(jnp.int32, scales.shape, 1, layout=_scale_layout())
        for number in range(_GROUPS):
            words = _load(stored.at[:, pl.ds(number * _GROUP_WORDS, _GROUP_WORDS)])
            scale = jnp.sum(jnp.where(group == number, scales, 0.0), axis=1)
            scale = plgpu.layout_cast(scale, _row_layout().reduce(1))
            scale = lax.broadcast_in_dim(scale, words.shape, (0,))
            planes = []
            for byte in range(_BYTES):
                plane = (words >> (8 * byte)).astype(jnp.int8)
                plane = lax.bitcast_convert_type(plane, jnp.float8_e4m3fn)
                plane = plane.astype(jnp.float16).astype(jnp.float32) * scale
                planes.append(plane.astype(jnp.bfloat16))
            # Stored together: warps wait for each other at each store.
            columns = pl.ds(number * SCALE_GROUP, SCALE_GROUP)
            keys[:, columns] = jnp.concatenate(planes, axis=1)
        words = _load(stored.at[:, pl.ds(LATENT // _BYTES + _GROUPS, ROPE // 2)])
        halves = [
            lax.bitcast_convert_type(bits, jnp.float32).astype(jnp.bfloat16)
            for bits in (words << 16, words & jnp.int32(-65536))
        ]
        keys[:, pl.ds(LATENT, ROPE)] = jnp.concatenate(halves, axis=1)

    def _spread(self, stored: Ref, keys: Ref) -> None:
        """Copies bfloat16 rows [pieces, TILE, values] to operands [TILE, values]."""
        pieces, width = self.plan.pieces
        together = 3 * TILE  # as few registers
        for piece in range(pieces):
            for first in range(0, width, together):
                columns = pl.ds(piece * width + first, together)
                keys[:, columns] = _load(stored.at[piece, :, pl.ds(first, together)])


def _load(stored: Ref) -> jax.Array:
    return plgpu.load(stored, layout=_row_layout(), optimized=False)


def _row_layout() -> Any:
    """Elements of rows: eight lanes of four elements along a row, so that no two meet in a bank of
    stored rows nor of operands."""
    return plgpu.Layout.TILED(
        plgpu.Tiling(((TILE, 32), (8, 32), (4, 32), (4,))),
        warp_dims=(-7,),
        lane_dims=(-3, -2),
        vector_dim=-1,
    )


def _scale_layout() -> Any:
    """Scales of rows: each lane that has a part of a row has all of its scales."""
    return plgpu.Layout.TILED(
        plgpu.Tiling(((TILE, _GROUPS), (8, _GROUPS), (4, _GROUPS))),
        warp_dims=(-6,),
        lane_dims=(-2, plgpu.Replicated(8)),
        vector_dim=-1,
    )
