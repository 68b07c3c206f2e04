"""Appending by one warpgroup a row, which does nothing for a row that is dropped.

In fp8 a group of 128 values is seen as 32 words of 4 values: a lane holds a word, so that its bytes
meet in one register, and a warp holds a group.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.common.quantization import GROUPS, LANES, quantize_groups
from pallas_kernels.common.row_format import SCALE_GROUP, RowFormat
from pallas_kernels.common.types import Interpret, Ref, Scalar, Slab

_WARPS = 4
_ROPE = 2 * LANES
_WORDS = SCALE_GROUP // 4

_EVERY_WARP = (plgpu.Replicated(_WARPS),)
# The same group by all warps.
_GROUP = plgpu.Layout.TILED(
    plgpu.Tiling(((LANES, 4),)), warp_dims=_EVERY_WARP, lane_dims=(-2,), vector_dim=-1
)
_PAIRS = plgpu.Layout.TILED(
    plgpu.Tiling(((LANES, 2),)), warp_dims=_EVERY_WARP, lane_dims=(-2,), vector_dim=-1
)
_FLAT_PAIRS = plgpu.Layout.TILED(
    plgpu.Tiling(((_ROPE,), (2,))), warp_dims=_EVERY_WARP, lane_dims=(-2,), vector_dim=-1
)

Layout = Any


def unsupported(row_format: RowFormat) -> str | None:
    """Why the kernel cannot append rows of a format, None if it can."""
    if row_format.latent_dim % SCALE_GROUP:
        return f"a latent width of {row_format.latent_dim} is no multiple of {SCALE_GROUP}"
    if row_format.rope_dim not in (0, _ROPE):
        return f"a rope width of {row_format.rope_dim} is neither 0 nor {_ROPE}"
    return None


def append_rows(
    slab: Slab,
    layer: Scalar,
    latent: Float[Array, "tokens latent"],
    rope: Float[Array, "tokens rope"],
    pages: Int[Array, " tokens"],
    rows: Int[Array, " tokens"],
    *,
    row_format: RowFormat,
    interpret: Interpret,
) -> Slab:
    """The kernel of `operation.append_rows`."""
    tokens, groups = latent.shape[0], row_format.num_scales
    fp8, with_rope = row_format.kind == "fp8", row_format.rope_dim > 0
    in_bulk = fp8 and groups % _WARPS == 0
    if fp8:
        latent = latent.reshape(tokens, groups, _WORDS, 4)
        rope = rope.reshape(tokens, -1, 2)
    scratch = [
        plgpu.SMEM((groups, _WORDS), jnp.int32),
        plgpu.SMEM((row_format.width - groups * _WORDS,), jnp.int32),
    ]

    def append(slab: Ref, layer: Ref, pages: Ref, rows: Ref, latent: Ref, *refs: Ref) -> None:
        token = lax.axis_index("token")
        ropes = refs[0].at[token] if with_rope else None

        @pl.when(pages[token] >= 0)
        def _() -> None:
            target = slab.at[layer[0], pages[token], rows[token]]
            if in_bulk:
                words, rest = refs[-2:]
                _append_in_bulk(latent.at[token], ropes, target, words, rest, row_format)
            elif fp8:
                _append_groups(latent.at[token], ropes, target, row_format)
            else:
                _append_floats(latent.at[token], ropes, target)

    state = jax.new_ref(slab)
    plgpu.kernel(
        append,
        out_type=(),
        grid=(tokens,),
        grid_names=("token",),
        scratch_types=scratch if in_bulk else (),
        kernel_name="append_rows",
        interpret=interpret,
    )(
        state,
        jnp.asarray(layer, jnp.int32).reshape(1),
        pages,
        rows,
        latent,
        *([rope] if with_rope else []),
    )
    return jax.freeze(state)


def _append_floats(latent: Ref, rope: Ref | None, target: Ref) -> None:
    width = latent.shape[0]
    target.at[pl.ds(0, width)][...] = latent[...].astype(target.dtype)
    if rope is not None:
        values = plgpu.load(rope, layout=_FLAT_PAIRS, optimized=False)
        target.at[pl.ds(width, _ROPE)][...] = values.astype(target.dtype)


def _append_groups(latent: Ref, rope: Ref | None, target: Ref, row_format: RowFormat) -> None:
    """Writes an fp8 row, of whatever alignment, a group at a time."""
    groups = row_format.num_scales
    for group in range(groups):
        words, scale = _quantize(latent.at[group], _GROUP, row_format)
        target.at[pl.ds(group * _WORDS, _WORDS)][...] = words
        target[groups * _WORDS + group] = scale
    if rope is not None:
        target.at[pl.ds(groups * (_WORDS + 1), LANES)][...] = _bfloat16_words(rope)


def _append_in_bulk(
    latent: Ref, rope: Ref | None, target: Ref, words: Ref, rest: Ref, row_format: RowFormat
) -> None:
    """Writes an fp8 row of as many groups as there are warps, or a multiple, from shared memory."""
    groups = row_format.num_scales
    words[...], rest.at[pl.ds(0, groups)][...] = _quantize(latent, GROUPS, row_format)
    if rope is not None:
        rest.at[pl.ds(groups, LANES)][...] = _bfloat16_words(rope)
    plgpu.commit_smem()
    for group in range(groups):
        plgpu.copy_smem_to_gmem(words.at[group], target.at[pl.ds(group * _WORDS, _WORDS)])
    plgpu.copy_smem_to_gmem(rest, target.at[pl.ds(groups * _WORDS, rest.shape[0])])
    plgpu.wait_smem_to_gmem(0)


def _quantize(groups: Ref, layout: Layout, row_format: RowFormat) -> tuple[jax.Array, jax.Array]:
    """Words and bits of the scales of groups [..., 32, 4]."""
    values = plgpu.load(groups, layout=layout, optimized=False).astype(jnp.float32)
    codes, scale = quantize_groups(values, row_format.least_scale)
    codes = lax.bitcast_convert_type(codes, jnp.uint8)
    return _join(codes.astype(jnp.int32), 8, layout), scale


def _bfloat16_words(values: Ref) -> jax.Array:
    """Words of pairs [32, 2]."""
    halves = plgpu.load(values, layout=_PAIRS, optimized=False)
    halves = halves.astype(jnp.float32).astype(jnp.bfloat16)
    codes = lax.bitcast_convert_type(halves, jnp.uint16).astype(jnp.int32)
    return _join(codes, 16, _PAIRS)


def _join(codes: jax.Array, num_bits: int, layout: Layout) -> jax.Array:
    """Words whose `num_bits`-wide parts lie along the last axis, the lowest first."""
    part = lax.broadcasted_iota(jnp.int32, codes.shape, codes.ndim - 1)
    return jnp.sum(codes << (num_bits * plgpu.layout_cast(part, layout)), axis=-1)
