import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from jax.sharding import PartitionSpec

from glm53.model.sharding import make_mesh
from kvcache import KVGeometry, KVStore, OutOfPagesError, PagePool, SequenceState
from kvcache.device.page_moves import MoveList
from kvcache.device.sequence_state import assign_slot, set_pages
from kvcache.device.store import MESH_AXIS, append_index_keys, append_rows, translate_positions
from kvcache.device.transitions import Transitions
from pallas_kernels.common.row_format import RowFormat, RowKind
from tests.helpers.in_place import check_in_place, pointers

pytestmark = pytest.mark.compiles
GROUP_LAYERS, SLOTS, MAX_PAGES, ROWS_PER_DEVICE = (1, 2), 4, 4, 4
LAYERS, INDEX_LAYERS = sum(GROUP_LAYERS), len(GROUP_LAYERS)
# Pages that sequences get, and pages that are held so that a page's id, its index in the slab and
# its entry in a block table always differ: of the free ones, ids and indices are MAX_PAGES or more.
FREE_PAGES, HELD_PAGES = 12, MAX_PAGES
DEVICE_PAGES = FREE_PAGES + 2 * HELD_PAGES
HOST_TIER = {"host_pages": 8, "row_cache_rows": 6, "staging_pages": 2}
TOKENS = 16  # rows of one append
EVERYWHERE = PartitionSpec()

meshes = pytest.mark.parametrize("num_devices", [1, 2, 4])
stores = pytest.mark.parametrize(
    ("num_devices", "kind"), [(1, "fp8"), (1, "float32"), (2, "bfloat16"), (4, "fp8")]
)


def make_geometry(num_devices: int, kind: RowKind, **sizes: int) -> KVGeometry:
    return KVGeometry(
        group_layers=GROUP_LAYERS,
        num_devices=num_devices,
        max_sequences=SLOTS,
        max_pages_per_sequence=MAX_PAGES,
        row_format=RowFormat(kind, 8, 4, 1e-4),
        index_row_format=RowFormat(kind, 8, 0, 1e-6),
        rows_per_device=ROWS_PER_DEVICE,
        **{"device_pages": DEVICE_PAGES} | sizes,
    )


def device_index_of[Page: (int, np.ndarray)](page: Page) -> Page:
    """Where the tests put a page on the device, never at its own number."""
    return DEVICE_PAGES - 1 - page


class Compiled:
    """The store's transitions, compiled as a step has them: sharded, with the store donated."""

    def __init__(self, geometry: KVGeometry) -> None:
        self.geometry, self.mesh = geometry, make_mesh(geometry.num_devices)
        specs = KVStore.specs(geometry)

        def jit(fn: Callable, inputs: tuple, outputs: Any, donate: tuple[int, ...] = ()) -> Any:
            sharded = jax.shard_map(
                fn, mesh=self.mesh, in_specs=inputs, out_specs=outputs, check_vma=False
            )
            return jax.jit(sharded, donate_argnums=donate)

        def append(transition: Callable, store: KVStore, *what: jax.Array) -> KVStore:
            return transition(store, geometry, *what, jax.lax.axis_index(MESH_AXIS))

        def append_both(store: KVStore, layer: jax.Array, row: jax.Array, *where: Any) -> KVStore:
            latent, rope = jnp.split(row, [geometry.row_format.latent_dim], axis=1)
            return append(append_rows, store, layer, latent, rope, *where)

        def locate(store: KVStore, tables: jax.Array, positions: jax.Array) -> jax.Array:
            device = jax.lax.axis_index(MESH_AXIS)
            return jnp.stack(translate_positions(store, geometry, tables, positions, device))[
                :, None
            ]

        rows = (specs, *[EVERYWHERE] * 4)
        self.append_rows = jit(append_both, rows, specs, (0,))
        self.append_keys = jit(functools.partial(append, append_index_keys), rows, specs, (0,))
        # Ids and pages [2, devices, sequences, positions].
        self.locate = jit(locate, (specs, EVERYWHERE, EVERYWHERE), PartitionSpec(None, MESH_AXIS))
        self.move = Transitions(geometry, self.mesh).move

    @functools.cached_property
    def created(self) -> tuple[KVStore, SequenceState]:
        sequences = SequenceState.create(self.geometry, 8, jnp.float32, self.mesh)
        return KVStore.create(self.geometry, self.mesh), sequences

    def empty(self) -> tuple[KVStore, SequenceState]:
        """Returns an empty state that may be donated."""
        return jax.tree.map(jnp.copy, self.created)


@functools.cache
def compiled(num_devices: int, kind: RowKind) -> Compiled:
    return Compiled(make_geometry(num_devices, kind))


def raw(array: jax.Array | np.ndarray) -> np.ndarray:
    """Returns a copy of an array's bytes, with those of an element on an axis of their own."""
    array = np.array(array)
    return array.view(np.uint8).reshape(*array.shape, array.itemsize)


def random_rows(rng: np.random.Generator, row_format: RowFormat) -> np.ndarray:
    """Latents and ropes side by side."""
    return rng.standard_normal((TOKENS, row_format.latent_dim + row_format.rope_dim), np.float32)


class StoreMachine(RuleBasedStateMachine):
    """Drives sequences that share a store, beside a dict of all bytes they have stored."""

    num_devices: int
    kind: RowKind

    def __init__(self) -> None:
        super().__init__()
        self.run = compiled(self.num_devices, self.kind)
        self.geometry = self.run.geometry
        self.store, self.sequences = self.run.empty()
        self.pool = PagePool(self.geometry.num_pages, lambda page: None)
        first, free = self.pool.allocate(HELD_PAGES), self.pool.allocate(FREE_PAGES)
        last = self.pool.allocate(HELD_PAGES)
        for page in free:
            self.pool.release(page)
        # The held pages have their indices, where a wrong page would show.
        for pages in (first, last):
            self.map_pages({page: device_index_of(page) for page in pages})
        self.tables: dict[int, list[int]] = {}
        # By kind of row, {(slot, layer, position): bytes}.
        self.stored: dict[str, dict[tuple[int, int, int], bytes]] = {"rows": {}, "keys": {}}
        self.rng = np.random.default_rng(0)

    def map_pages(self, indices: dict[int, int]) -> None:
        """Gives at most MAX_PAGES pages their indices on the device, -1 for none."""
        none = np.full((1, 2), -1, np.int32)
        maps = np.full((MAX_PAGES, 3), -1, np.int32)
        for row, (page, index) in enumerate(indices.items()):
            maps[row, :2] = page, index
        self.store = self.run.move(self.store, MoveList(none, none, none, none, maps))

    def assign(self, slot: int, table: list[int]) -> None:
        padded = np.asarray(table + [-1] * (MAX_PAGES - len(table)), np.int32)
        self.sequences = assign_slot(
            self.sequences, jnp.int32(slot), jnp.asarray(padded), jnp.int32(0)
        )

    @precondition(lambda self: len(self.tables) < SLOTS)
    @rule(data=st.data(), num_pages=st.integers(1, MAX_PAGES))
    def open(self, data: st.DataObject, num_pages: int) -> None:
        slot = data.draw(st.sampled_from(sorted(set(range(SLOTS)) - set(self.tables))))
        free = self.pool.num_free
        if num_pages > free:
            with pytest.raises(OutOfPagesError):
                self.pool.allocate(num_pages)
            assert self.pool.num_free == free
            return
        pages = data.draw(st.permutations(self.pool.allocate(num_pages)))
        for index, page in enumerate(pages):
            assert len({index, page, device_index_of(page)}) == 3
        self.tables[slot] = list(pages)
        self.map_pages({page: device_index_of(page) for page in pages})
        self.assign(slot, list(pages))

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), unmap=st.booleans())
    def close(self, data: st.DataObject, unmap: bool) -> None:
        slot = data.draw(st.sampled_from(sorted(self.tables)))
        pages = self.tables.pop(slot)
        for page in pages:
            self.pool.release(page)
        if unmap:
            self.map_pages(dict.fromkeys(pages, -1))
        self.assign(slot, [])
        for stored in self.stored.values():
            for key in [key for key in stored if key[0] == slot]:
                del stored[key]

    @rule(data=st.data(), layer=st.integers(0, LAYERS - 1))
    def append_rows(self, data: st.DataObject, layer: int) -> None:
        self.append(data, "rows", layer)

    @rule(data=st.data(), layer=st.integers(0, INDEX_LAYERS - 1))
    def append_keys(self, data: st.DataObject, layer: int) -> None:
        self.append(data, "keys", layer)

    def append(self, data: st.DataObject, kind: str, layer: int) -> None:
        """Appends uneven groups of rows, between them rows that must be dropped."""
        geometry, rng = self.geometry, self.rng
        before = raw(self.store.slab), raw(self.store.index_keys)
        entries: list[tuple[int, int, int]] = []  # slot, page, position
        slots = sorted(self.tables)
        groups = (
            data.draw(st.lists(st.sampled_from(slots), min_size=1, unique=True)) if slots else []
        )
        for slot in groups:
            capacity = len(self.tables[slot]) * geometry.rows_per_page
            start = data.draw(st.integers(0, capacity - 1))
            count = data.draw(st.integers(0, min(7, capacity - start)))
            for position in range(start, start + count):
                entries.append(
                    (slot, self.tables[slot][position // geometry.rows_per_page], position)
                )
        entries = entries[: TOKENS - 3]
        # Beyond a sequence's pages, or beyond its table, where a lookup gives the least integer.
        for page in (-1, -(2**31)):
            entries.append((-1, page, int(rng.integers(0, 4 * geometry.rows_per_page))))
        while len(entries) < TOKENS:
            entries.append((-1, int(rng.integers(-1, geometry.num_pages)), -1))
        entries = [entries[entry] for entry in rng.permutation(TOKENS)]
        pages = np.asarray([page for _, page, _ in entries], np.int32)
        positions = np.asarray([position for _, _, position in entries], np.int32)
        row_format = geometry.row_format if kind == "rows" else geometry.index_row_format
        rows = random_rows(rng, row_format)
        latent, rope = np.split(rows, [row_format.latent_dim], axis=1)
        packed = raw(row_format.pack(jnp.asarray(latent), jnp.asarray(rope)))

        run = self.run.append_rows if kind == "rows" else self.run.append_keys
        self.store = run(self.store, jnp.int32(layer), rows, pages, positions)

        slab, keys = before
        for (slot, page, position), row in zip(entries, packed, strict=True):
            if slot < 0:
                continue
            self.stored[kind][slot, layer, position] = row.tobytes()
            if kind == "rows":
                slab[layer, device_index_of(page), geometry.page_row(position)] = row
            else:
                keys[layer, page, geometry.page_row(position)] = row
        np.testing.assert_array_equal(raw(self.store.slab), slab)
        np.testing.assert_array_equal(raw(self.store.index_keys), keys)

    @invariant()
    def every_row_is_found(self) -> None:
        geometry, num_devices = self.geometry, self.geometry.num_devices
        self.pool.check_integrity()
        # Two more positions than a block table has room for.
        positions = np.arange(MAX_PAGES * geometry.rows_per_page + 2, dtype=np.int32)
        all_positions = np.broadcast_to(positions, (SLOTS, positions.size))
        tables = self.sequences.block_table
        located, pages = np.asarray(self.run.locate(self.store, tables, all_positions))
        expected, expected_pages = np.full_like(located, -1), np.full_like(located, -1)
        for slot, table in self.tables.items():
            owned = positions[: len(table) * geometry.rows_per_page]
            owning = np.asarray(table)[owned // geometry.rows_per_page]
            rows = owned % geometry.rows_per_page // num_devices
            rows += device_index_of(owning) * ROWS_PER_DEVICE
            expected[owned % num_devices, slot, owned] = rows
            expected_pages[owned % num_devices, slot, owned] = owning
        np.testing.assert_array_equal(located, expected)
        np.testing.assert_array_equal(pages, expected_pages)
        shards = {
            shard.index[2].start or 0: raw(shard.data)
            for shard in self.store.slab.addressable_shards
        }
        for (slot, layer, position), row in self.stored["rows"].items():
            device = position % num_devices
            rows = shards[device * ROWS_PER_DEVICE]
            rows = rows.reshape(LAYERS, geometry.device_rows, -1)
            assert rows[layer, located[device, slot, position]].tobytes() == row
        keys = raw(self.store.index_keys)
        for (slot, layer, position), key in self.stored["keys"].items():
            page = self.tables[slot][position // geometry.rows_per_page]
            assert keys[layer, page, geometry.page_row(position)].tobytes() == key


@stores
def test_stored_bytes(num_devices: int, kind: RowKind) -> None:
    """A row lost, misplaced or overwritten by another sequence's, by padding or by a draft."""
    machine = type("Machine", (StoreMachine,), {"num_devices": num_devices, "kind": kind})
    run_state_machine_as_test(machine, settings=settings(max_examples=10, stateful_step_count=20))


@functools.cache
def with_host_tier(num_devices: int) -> Compiled:
    return Compiled(make_geometry(num_devices, "fp8", device_pages=14, **HOST_TIER))


def test_fields_have_buffers_of_their_own() -> None:
    """Two fields in one buffer, which cannot be donated twice."""
    buffers = [
        shard.data.unsafe_buffer_pointer()
        for leaf in jax.tree.leaves(with_host_tier(2).created)
        for shard in leaf.addressable_shards
    ]
    assert len(set(buffers)) == len(buffers)


@meshes
def test_translate_positions(num_devices: int) -> None:
    """A tier confused with another, or a position that is nowhere and gets a row."""
    run = with_host_tier(num_devices)
    geometry, (store, _) = run.geometry, run.empty()
    # Pages on the device, on the host, in both tiers, in none, and beyond the last.
    table = [7, 5, 11, 9, -1]
    device_page = np.full(geometry.num_pages, -1, np.int32)
    host_page = device_page.copy()
    device_page[[7, 11]], host_page[[5, 11]] = (13, 2), (6, 3)
    store = dataclasses.replace(
        store, device_page_index=jnp.asarray(device_page), host_page_index=jnp.asarray(host_page)
    )
    first_rows = [
        13 * ROWS_PER_DEVICE,
        geometry.slab_rows + 6 * ROWS_PER_DEVICE,
        2 * ROWS_PER_DEVICE,
    ]
    # Out of order, with gaps: nothing is said of ascending positions.
    positions = np.random.default_rng(0).permutation(5 * geometry.rows_per_page).astype(np.int32)
    positions[::5] = -1
    located, pages = np.asarray(run.locate(store, np.asarray([table], np.int32), positions[None]))
    for index, position in enumerate(positions.tolist()):
        expected, expected_pages = [-1] * num_devices, [-1] * num_devices
        page = position // geometry.rows_per_page
        if 0 <= page < len(first_rows):
            row = position % geometry.rows_per_page // num_devices
            expected[position % num_devices] = first_rows[page] + row
            expected_pages[position % num_devices] = table[page]
        assert located[:, 0, index].tolist() == expected
        assert pages[:, 0, index].tolist() == expected_pages


def test_rows_of_a_page_off_the_device_are_dropped() -> None:
    """A row for a page that is not on the device, written to another's; its key must stay."""
    run = with_host_tier(2)
    geometry, (store, _) = run.geometry, run.empty()
    pages, positions = np.full(TOKENS, 8, np.int32), np.arange(TOKENS, dtype=np.int32) % 8
    rng = np.random.default_rng(0)
    for row_format, append in (
        (geometry.row_format, run.append_rows),
        (geometry.index_row_format, run.append_keys),
    ):
        store = append(store, jnp.int32(1), random_rows(rng, row_format), pages, positions)
    assert not np.asarray(store.slab).any()
    assert np.argwhere(np.asarray(store.index_keys).all(axis=-1)).tolist() == [
        [1, 8, row] for row in range(8)
    ]


def test_set_pages() -> None:
    """A page in another sequence's table, or padding that takes one away."""
    _, sequences = compiled(1, "fp8").empty()
    sequences = assign_slot(sequences, jnp.int32(2), jnp.asarray([9, 8, -1, -1]), jnp.int32(7))
    before = jax.device_get(sequences)
    entries = [[2, 2, 5], [-1, 0, 3], [0, 0, 6], [-1, -1, -1], [2, 3, 4]]
    after = jax.device_get(set_pages(sequences, jnp.asarray(entries)))
    table = np.full((SLOTS, MAX_PAGES), -1)
    table[2], table[0, 0] = [9, 8, 5, 4], 6
    np.testing.assert_array_equal(after.block_table, table)
    for name in ("length", "last_token", "last_hidden"):
        np.testing.assert_array_equal(getattr(after, name), getattr(before, name))


@stores
def test_append_is_in_place(num_devices: int, kind: RowKind) -> None:
    """An append that copies the slab, or converts it to a type that a platform prefers."""
    run = Compiled(make_geometry(num_devices, kind, device_pages=300))
    geometry, (store, _) = run.geometry, run.empty()
    page, position = np.full(TOKENS, 5, np.int32), np.arange(TOKENS, dtype=np.int32)
    for row_format, append in (
        (geometry.row_format, run.append_rows),
        (geometry.index_row_format, run.append_keys),
    ):
        rows = random_rows(np.random.default_rng(0), row_format)
        compiled = append.lower(store, jnp.int32(1), rows, page, position).compile()
        check_in_place(compiled, [store.slab, store.index_keys])
        before = pointers(store.slab, store.index_keys)
        store = compiled(store, jnp.int32(1), rows, page, position)
        assert pointers(store.slab, store.index_keys) == before
