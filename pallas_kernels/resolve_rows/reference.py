"""Hot-row resolution in plain jax.numpy: gathers, running counts and a threshold, no sort.

A sequence has a fixed number of hot rows for each index group. `hot_position` says what each holds,
and `hot_slot` is the way back, a gather by the position's row. An entry of `hot_slot` counts only
where `hot_position` agrees, so neither eviction nor a new owner need clear it.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

_LARGEST = jnp.iinfo(jnp.int16).max


class Resolution(NamedTuple):
    """What `resolve_rows` finds.

    Attributes:
        hot_position: the new state.
        hot_age: the new state.
        hot_slot: the new state.
        row_ids: int32 [sequences, rows, k], a row of the slab, or the host row's id where it has no
            hot row.
        host_rows: int32 [misses], host rows to stage.
        device_rows: int32 [misses], rows of a layer to stage them in.
        num_staged: int32, how many of these lists are valid.
        staged: int32 [sequences], how many of them are each sequence's.
        hits: int32 [sequences], selected rows that were hot.
        misses: int32 [sequences], different selected rows that were not.
    """

    hot_position: Int[Array, "slots groups hot"]
    hot_age: Int[Array, "slots groups hot"]
    hot_slot: Int[Array, "slots groups context"]
    row_ids: Int[Array, "sequences rows k"]
    host_rows: Int[Array, " misses"]
    device_rows: Int[Array, " misses"]
    num_staged: Int[Array, ""]
    staged: Int[Array, " sequences"]
    hits: Int[Array, " sequences"]
    misses: Int[Array, " sequences"]


def resolve_rows(
    hot_position: Int[Array, "slots groups hot"],
    hot_age: Int[Array, "slots groups hot"],
    hot_slot: Int[Array, "slots groups context"],
    hot_page: Int[Array, "slots hot_pages"],
    slots: Int[Array, " sequences"],
    group: int | Int[Array, ""],
    positions: Int[Array, "sequences rows k"],
    context_rows: Int[Array, "sequences rows k"],
    located: Int[Array, "sequences rows k"],
    now: Int[Array, " sequences"],
    first_host_row: int,
    rows_per_page: int,
) -> Resolution:
    """Resolves the selections of all query rows of each sequence together.

    A host row selected by several rows of a sequence is staged once. The least recently selected
    hot rows that no row selects give way, in the order of their slots where they are equally old.
    Where they do not suffice, the rest stay in host memory, to be read in place.

    Args:
        hot_position: position that each hot row holds, -1 none.
        hot_age: when it was last selected.
        hot_slot: int16, by row of the context: the hot row that may hold it.
        hot_page: device pages of each slot's hot rows, -1 where it has none.
        slots: slot of each sequence, -1 for padding; no slot twice.
        group: index group.
        positions: selected positions, each at most once a row; -1 is none.
        context_rows: their rows within the sequence on this device.
        located: where they lie; ids from `first_host_row` on are host rows, -1 is nowhere.
        now: at least every age of the sequence so far.
        first_host_row: id of the first host row.
        rows_per_page: rows of a page on this device.
    """
    num_slots, _, num_hot = hot_position.shape
    sequence = jnp.maximum(slots, 0)[:, None]
    leased = (slots >= 0) & (hot_page[sequence[:, 0], 0] >= 0)
    shape, (num_sequences, num_rows, k) = located.shape, located.shape
    flat = (num_sequences, num_rows * k)
    positions, context_rows, located = (
        array.reshape(flat) for array in (positions, context_rows, located)
    )
    wanted = (located >= first_host_row) & leased[:, None]
    target = jnp.where(wanted, sequence, num_slots)  # where state is written, or dropped

    def found(hot_position: jax.Array, hot_slot: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The hot row of each wanted position, and whether there is one."""
        slot = hot_slot[sequence, group, context_rows].astype(jnp.int32)
        slot = jnp.clip(slot, 0, num_hot - 1)
        return slot, wanted & (hot_position[sequence, group, slot] == positions)

    slot, hit = found(hot_position, hot_slot)
    used = jnp.zeros((num_sequences, num_hot + 1), bool)
    used = used.at[jnp.arange(num_sequences)[:, None], jnp.where(hit, slot, num_hot)].set(True)
    used = used[:, :num_hot]
    age = jnp.where(used, now[:, None], hot_age[sequence[:, 0], group])

    missed = wanted & ~hit
    if num_rows > 1:
        # The first to name a position claims it, in the map itself.
        order = jnp.broadcast_to(jnp.arange(flat[1], dtype=jnp.int16), flat)
        claimed = jnp.where(missed, target, num_slots)
        hot_slot = hot_slot.at[claimed, group, context_rows].set(_LARGEST, mode="drop")
        hot_slot = hot_slot.at[claimed, group, context_rows].min(order, mode="drop")
        first = missed & (hot_slot[sequence, group, context_rows] == order)
    else:
        first = missed
    misses = jnp.sum(first, axis=1)

    victims, num_victims = _oldest(age, ~used, misses)
    rank = jnp.cumsum(first, axis=1) - 1
    staged = first & (rank < num_victims[:, None])
    victim = jnp.take_along_axis(victims, jnp.clip(rank, 0, num_hot - 1), axis=1)
    written = jnp.where(staged, target, num_slots)
    hot_age = hot_age.at[jnp.where(leased, slots, num_slots), group].set(age, mode="drop")
    hot_age = hot_age.at[written, group, victim].set(now[:, None], mode="drop")
    hot_position = hot_position.at[written, group, victim].set(positions, mode="drop")
    hot_slot = hot_slot.at[written, group, context_rows].set(
        victim.astype(hot_slot.dtype), mode="drop"
    )

    slot, hot = found(hot_position, hot_slot)

    def physical(slot: jax.Array) -> jax.Array:
        return hot_page[sequence, slot // rows_per_page] * rows_per_page + slot % rows_per_page

    # Both lists of all sequences, one after another, closed up.
    place = jnp.where(staged.reshape(-1), jnp.cumsum(staged) - 1, staged.size)
    lists = jnp.zeros((2, num_sequences * min(flat[1], num_hot)), jnp.int32)
    both = jnp.stack([(located - first_host_row).reshape(-1), physical(victim).reshape(-1)])
    host_rows, device_rows = lists.at[:, place].set(both, mode="drop")
    return Resolution(
        hot_position,
        hot_age,
        hot_slot,
        jnp.where(hot, physical(slot), located).reshape(shape),
        host_rows,
        device_rows,
        jnp.sum(staged),
        jnp.sum(staged, axis=1),
        jnp.sum(hit, axis=1),
        misses,
    )


def _oldest(
    age: Int[Array, "sequences hot"],
    allowed: Bool[Array, "sequences hot"],
    count: Int[Array, " sequences"],
) -> tuple[Int[Array, "sequences hot"], Int[Array, " sequences"]]:
    """The `count` oldest of the allowed slots, as far as there are, in order of their numbers."""
    available = jnp.sum(allowed, axis=1)
    count = jnp.minimum(count, available)
    age = jnp.where(allowed, age, jnp.iinfo(jnp.int32).max)

    def halve(_: jax.Array, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = low + (high - low) // 2
        enough = jnp.sum(age <= middle[:, None], axis=1) >= count
        return jnp.where(enough, low, middle + 1), jnp.where(enough, middle, high)

    # The least age that leaves enough; ages are -1 or more.
    low = jnp.full_like(count, -1)
    high = jnp.max(jnp.where(allowed, age, -1), axis=1)
    threshold, _ = lax.fori_loop(0, 31, halve, (low, high))
    older = allowed & (age < threshold[:, None])
    equal = allowed & (age == threshold[:, None])
    room = (count - jnp.sum(older, axis=1))[:, None]
    chosen = older | (equal & (jnp.cumsum(equal, axis=1) <= room))
    place = jnp.where(chosen, jnp.cumsum(chosen, axis=1) - 1, age.shape[1])
    numbers = jnp.broadcast_to(jnp.arange(age.shape[1], dtype=jnp.int32), age.shape)
    victims = (
        jnp.zeros_like(age).at[jnp.arange(age.shape[0])[:, None], place].set(numbers, mode="drop")
    )
    return victims, count
