"""Selection within one block of a Mosaic GPU kernel: a threshold by counts, then compaction.

Mosaic has neither sort nor running sums. What it has is counting over a warpgroup's registers and
shared memory read at an offset: the threshold is found by bisection, each step a count, and each
chosen element is stored at its number among them, which a running sum by doubling gives.

All functions here run inside a kernel, on one warpgroup.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float, Int, Shaped

from pallas_kernels.common.scatter import scatter
from pallas_kernels.common.types import Ref, Scalar

LARGEST_BLOCK = 8192
"""Most elements of a block: 64 registers a thread, and 33 KiB of shared memory."""

GRANULE = 256
"""Divisor of the number of elements of a block."""

NEVER = jnp.iinfo(jnp.int32).min
"""Key of what may not be chosen; no float32 but a NaN has it."""


def _layout(size: int) -> Any:
    """The layout of an array of `size`: element i in thread i modulo 128, so any offset is
    aligned."""
    return plgpu.Layout.WG_STRIDED((size,), vec_size=1)


def load(reference: Ref, start: Scalar, size: int) -> Shaped[Array, " size"]:
    """Elements of a one-dimensional reference from `start` on."""
    return plgpu.load(reference.at[pl.ds(start, size)], layout=_layout(size))


def indices(size: int) -> Int[Array, " size"]:
    """0, 1, ... in the layout of the arrays here."""
    return plgpu.broadcasted_iota(jnp.int32, (size,), 0, layout=_layout(size))


def filled(size: int, value: int) -> Int[Array, " size"]:
    """An array of one value."""
    return plgpu.layout_cast(jnp.full((size,), value, jnp.int32), _layout(size))


def count(mask: Bool[Array, " size"]) -> Int[Array, ""]:
    """Number that are set."""
    return jnp.sum(mask.astype(jnp.int32))


def ordered_bits(values: Float[Array, " size"]) -> Int[Array, " size"]:
    """Integers in the order of the values, -0.0 below 0.0."""
    bits = lax.bitcast_convert_type(values, jnp.int32)
    return jnp.where(bits < 0, bits ^ jnp.iinfo(jnp.int32).max, bits)


def values_of_bits(bits: Int[Array, " size"]) -> Float[Array, " size"]:
    """The values whose `ordered_bits` these are."""
    bits = jnp.where(bits < 0, bits ^ jnp.iinfo(jnp.int32).max, bits)
    return lax.bitcast_convert_type(bits, jnp.float32)


def bisect(
    count_from: Callable[[Int[Array, ""]], Int[Array, ""]],
    wanted: Int[Array, ""],
    low: Int[Array, ""],
    high: Int[Array, ""],
    found: Int[Array, ""],
) -> tuple[Int[Array, ""], Int[Array, ""]]:
    """The highest bound from which on there are `wanted` or more; stops at exactly as many.

    Asks for nothing but counts. Counts summed over blocks or devices give their common threshold.

    Args:
        count_from: how many there are from a bound on.
        wanted: how many are wanted, at most `found`.
        low: the lowest bound.
        high: a bound above all; `high` - 1 is the highest answer.
        found: how many there are from `low` on.

    Returns:
        The bound, and how many there are from it on.
    """

    def unfinished(state: tuple[jax.Array, ...]) -> jax.Array:
        low, high, found = state
        return (found != wanted) & (high - 1 > low)

    def halve(state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        low, high, found = state
        middle = (low & high) + ((low ^ high) >> 1)  # which does not overflow
        here = count_from(middle)
        enough = here >= wanted
        return (
            jnp.where(enough, middle, low),
            jnp.where(enough, high, middle),
            jnp.where(enough, here, found),
        )

    low, _, found = lax.while_loop(unfinished, halve, (low, high, found))
    return low, found


def choose(
    keys: Int[Array, " size"],
    wanted: Int[Array, ""],
    order: Int[Array, " size"],
    limit: int,
) -> Bool[Array, " size"]:
    """Marks the largest keys; of equal ones those first in order.

    Args:
        keys: NEVER for what may not be chosen.
        wanted: how many, at most as many as there are keys above NEVER, at least one.
        order: distinct numbers from 0 to `limit` - 1; of keys that are NEVER any.
        limit: above all of `order`.
    """
    allowed = keys > NEVER
    lowest = jnp.min(jnp.where(allowed, keys, jnp.iinfo(jnp.int32).max))
    threshold, found = bisect(
        lambda key: count(keys >= key), wanted, lowest, jnp.max(keys) + 1, count(allowed)
    )
    room = wanted - count(keys > threshold)
    # Bounds of the order count down from its end: `count_from` counts what lies below one.
    bound, _ = bisect(
        lambda bound: count((keys == threshold) & (order < -bound)),
        room,
        jnp.int32(-limit),
        jnp.int32(0),
        found - wanted + room,
    )
    return (keys > threshold) | ((keys == threshold) & (order < -bound))


def compact(chosen: Bool[Array, " size"], buffer: Ref, *, interpreted: bool) -> None:
    """Writes the indices of what is chosen, ascending, to the front of the buffer.

    Args:
        chosen: what to keep.
        buffer: shared memory of `buffer_size(size)` int32. What follows the indices is undefined.
        interpreted: see `scatter`.
    """
    rank = ranks(chosen, buffer)
    scatter(buffer, rank, indices(chosen.shape[0]), interpreted=interpreted)


def ranks(chosen: Bool[Array, " size"], buffer: Ref) -> Int[Array, " size"]:
    """Number of each chosen element among them; `size` for the others.

    Args:
        chosen: what is chosen.
        buffer: shared memory of `buffer_size(size)` int32, which is overwritten.
    """
    (size,) = chosen.shape
    return jnp.where(chosen, indices(size) - _unchosen_before(chosen, buffer), size)


def buffer_size(size: int) -> int:
    """Size of the buffer of a block, in int32: it has an element for what is not chosen."""
    return size + GRANULE


def _unchosen_before(chosen: Bool[Array, " size"], buffer: Ref) -> Int[Array, " size"]:
    """Number of elements before each that are not chosen.

    A running sum by doubling. Two halves share a word, as no sum of a half exceeds 16 bits.
    """
    (size,) = chosen.shape
    half = size // 2
    buffer[pl.ds(0, size)] = jnp.where(chosen, 0, 1)
    own = load(buffer, 0, half) | (load(buffer, half, half) << 16)
    buffer[pl.ds(0, half)] = filled(half, 0)

    def double(number: jax.Array, total: jax.Array) -> jax.Array:
        buffer[pl.ds(half, half)] = total
        return total + load(buffer, half - (jnp.int32(1) << number), half)

    total = lax.fori_loop(0, (half - 1).bit_length(), double, own)
    buffer[pl.ds(half, half)] = total
    first_half = buffer[size - 1] & 0xFFFF
    before = total - own
    buffer[pl.ds(0, half)] = before & 0xFFFF
    buffer[pl.ds(half, half)] = (before >> 16) + first_half
    return load(buffer, 0, size)
