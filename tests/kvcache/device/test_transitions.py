import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm53.model.sharding import make_mesh
from kvcache import KVGeometry, KVStore
from kvcache.device.page_moves import MoveList
from kvcache.device.transitions import Transitions
from pallas_kernels.common.row_format import RowFormat, RowKind
from tests.helpers.in_place import check_in_place, fetch_copy, pointers

pytestmark = pytest.mark.compiles
DEVICE_PAGES, HOST_PAGES, SLOTS, ROW_CACHE_PAGES, STAGING_PAGES = 30, 40, 4, 2, 3
MOVES = 5
stores = pytest.mark.parametrize(("num_devices", "kind"), [(1, "bfloat16"), (2, "fp8")])


def make_geometry(num_devices: int, kind: RowKind, host_pages: int) -> KVGeometry:
    hybrid = host_pages > 0
    return KVGeometry(
        group_layers=(1, 2),
        device_pages=DEVICE_PAGES,
        host_pages=host_pages,
        row_cache_rows=6 * hybrid,
        staging_pages=STAGING_PAGES * hybrid,
        num_devices=num_devices,
        max_sequences=SLOTS,
        max_pages_per_sequence=3,
        rows_per_device=4,
        row_format=RowFormat(kind, 8, 4, 1e-4),
        index_row_format=RowFormat(kind, 8, 0, 1e-6),
    )


@functools.cache
def compiled(geometry: KVGeometry) -> Transitions:
    return Transitions(geometry, make_mesh(geometry.num_devices))


class Driver:
    """A store full of bytes that mean nothing, beside numpy arrays that must stay its equal."""

    def __init__(self, num_devices: int, kind: RowKind, host_pages: int = HOST_PAGES) -> None:
        self.geometry = geometry = make_geometry(num_devices, kind, host_pages)
        self.transitions = compiled(geometry)
        self.rng = np.random.default_rng(0)
        mesh = make_mesh(num_devices)
        shapes = jax.eval_shape(lambda: KVStore.create(geometry, mesh))
        junk: Any = jax.tree.map(lambda leaf: self.junk(leaf.shape, leaf.dtype), shapes)
        for indices in (junk.device_page_index, junk.host_page_index):
            indices[:] = -1
        # Computed rather than put there, as numpy's own memory cannot be donated.
        self.store: KVStore = jax.jit(
            lambda: jax.tree.map(jnp.asarray, junk),
            out_shardings=KVStore.shardings(geometry, mesh),
        )()
        self.mirror: Any = jax.tree.map(np.copy, junk)

    def junk(self, shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> np.ndarray:
        dtype = np.dtype(dtype)
        if dtype == np.float32:  # counts, which are numbers
            return self.rng.integers(0, 1000, shape).astype(np.float32)
        drawn = self.rng.integers(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), np.uint8)
        return drawn.view(dtype)

    def pages(self, num_pages: int) -> tuple[np.ndarray, np.ndarray]:
        """Rows and index keys of whole pages, as `write` takes them."""
        geometry = self.geometry
        rows, keys = geometry.row_format, geometry.index_row_format
        shape = (num_pages, geometry.rows_per_page)
        return (
            self.junk((*shape, geometry.num_layers, rows.width), rows.dtype),
            self.junk((*shape, geometry.num_index_layers, keys.width), keys.dtype),
        )

    def map_pages(self, device_page: dict[int, int], host_page: dict[int, int]) -> None:
        """Sets where pages lie, without a transition."""
        for name, indices in (("device_page_index", device_page), ("host_page_index", host_page)):
            mirrored = getattr(self.mirror, name)
            mirrored[list(indices)] = list(indices.values())
            put = jax.device_put(mirrored.copy(), getattr(self.store, name).sharding)
            self.store = dataclasses.replace(self.store, **{name: jnp.copy(put)})

    def run(self, name: str, *arguments: Any) -> Any:
        """Runs a transition and asserts that it leaves the slabs in place."""
        before, transition = pointers(*self.slabs), getattr(self.transitions, name)
        result = transition(self.store, *arguments)
        self.store = result[0] if isinstance(result, tuple) else result
        assert pointers(*self.slabs) == before
        return result

    def check_in_place(self, name: str, *arguments: Any) -> None:
        lowered = getattr(self.transitions, name).lower(self.store, *arguments)
        check_in_place(lowered.compile(), self.slabs)

    @property
    def slabs(self) -> list[jax.Array]:
        host = self.store.host
        return [self.store.slab, self.store.index_keys, *([host.slab] if host else [])]

    def check(self) -> None:
        """Asserts that every byte of the store is the mirror's."""

        def equal(path: Any, found: jax.Array, expected: np.ndarray) -> None:
            raw = [np.ascontiguousarray(x).view(np.uint8) for x in (fetch_copy(found), expected)]
            np.testing.assert_array_equal(*raw, err_msg=jax.tree_util.keystr(path))

        jax.tree_util.tree_map_with_path(equal, self.store, self.mirror)


def pairs(rng: np.random.Generator, count: int, sources: int, targets: int) -> np.ndarray:
    """Returns a list of moves none of whose sources is a target."""
    moves = np.full((MOVES, 2), -1, np.int32)
    moves[:count, 0] = rng.permutation(sources)[:count]
    moves[:count, 1] = rng.permutation(np.setdiff1d(np.arange(targets), moves[:, 0]))[:count]
    return moves


@stores
def test_moves(num_devices: int, kind: RowKind) -> None:
    """A move out of the order of kinds, to another page, or by padding; a map not changed."""
    driver = Driver(num_devices, kind)
    rng, mirror, num_pages = driver.rng, driver.mirror, driver.geometry.num_pages
    for counts in [(0, 0, 0, 0, 0), (5, 5, 5, 5, 20), (2, 0, 3, 1, 4), (0, 4, 1, 2, 1)]:
        offloads = pairs(rng, counts[0], DEVICE_PAGES, HOST_PAGES)
        onloads = pairs(rng, counts[1], HOST_PAGES, DEVICE_PAGES)
        if counts[0] and counts[1]:
            # Stored, loaded elsewhere, and copied on, all in one launch.
            onloads[0, 0] = offloads[0, 1]
        copies = pairs(rng, counts[2], DEVICE_PAGES, DEVICE_PAGES)
        if counts[1] and onloads[0, 1] not in copies:
            copies[0, 0] = onloads[0, 1]
        key_copies = pairs(rng, counts[3], num_pages, num_pages)
        maps = np.full((4 * MOVES, 3), -1, np.int32)
        maps[: counts[4], 0] = rng.permutation(num_pages)[: counts[4]]
        maps[: counts[4], 1] = rng.integers(-1, DEVICE_PAGES, counts[4])
        maps[: counts[4], 2] = rng.integers(-1, HOST_PAGES, counts[4])
        maps[: counts[4] // 4, 1:] = -1
        for source, target in offloads[: counts[0]]:
            mirror.host.slab[target] = mirror.slab[:, source].swapaxes(0, 1)
        for source, target in onloads[: counts[1]]:
            mirror.slab[:, target] = mirror.host.slab[source].swapaxes(0, 1)
        for source, target in copies[: counts[2]]:
            mirror.slab[:, target] = mirror.slab[:, source]
        for source, target in key_copies[: counts[3]]:
            mirror.index_keys[:, target] = mirror.index_keys[:, source]
        for page, device_page_index, host_page_index in maps[: counts[4]]:
            mirror.device_page_index[page], mirror.host_page_index[page] = (
                device_page_index,
                host_page_index,
            )
            if (
                device_page_index < 0 and host_page_index < 0
            ):  # freed: the next holder's counts start anew
                mirror.host.selections.reshape(num_devices, -1)[:, page] = 0
        driver.run("move", MoveList(offloads, onloads, copies, key_copies, maps))
        driver.check()


def test_moves_without_a_host_tier() -> None:
    """A copy that needs a host tier."""
    driver = Driver(2, "fp8", host_pages=0)
    none = np.full((MOVES, 2), -1, np.int32)
    copies, key_copies = (pairs(driver.rng, 2, DEVICE_PAGES, DEVICE_PAGES) for _ in range(2))
    driver.run("move", MoveList(none, none, copies, key_copies, np.full((20, 3), -1, np.int32)))
    slab, keys = driver.mirror.slab, driver.mirror.index_keys
    slab[:, copies[:2, 1]] = slab[:, copies[:2, 0]]
    keys[:, key_copies[:2, 1]] = keys[:, key_copies[:2, 0]]
    driver.check()


@stores
def test_write_and_read(num_devices: int, kind: RowKind) -> None:
    """A page written to one of its tiers only, or to another's; one read where it is not."""
    driver = Driver(num_devices, kind)
    mirror = driver.mirror
    # On the device, on the host, in both tiers, nowhere, and padding.
    driver.map_pages({50: 7, 3: 21}, {11: 35, 3: 0})
    pages = np.asarray([11, 50, -1, 3, 8], np.int32)
    rows, keys = driver.pages(len(pages))
    driver.run("write", pages, rows, keys)
    for page, row, key in zip(pages.tolist(), rows, keys, strict=True):
        if page >= 0:
            mirror.index_keys[:, page] = key.swapaxes(0, 1)
        if page in (50, 3):
            mirror.slab[:, mirror.device_page_index[page]] = row.swapaxes(0, 1)
        if page in (11, 3):
            mirror.host.slab[mirror.host_page_index[page]] = row
    driver.check()
    # The device's rows count where a page has both: page 11's are in the host page now.
    driver.map_pages({}, {3: 35})
    found_rows, found_keys = driver.transitions.read(driver.store, pages)
    for found, expected in ((found_rows, rows), (found_keys, keys)):
        for index in (0, 1, 3):
            assert np.asarray(found)[index].tobytes() == expected[index].tobytes()
    driver.check()


@stores
def test_leases(num_devices: int, kind: RowKind) -> None:
    """Row-cache rows of one sequence that the next finds, or a slot that loses its own."""
    driver = Driver(num_devices, kind)
    host = driver.mirror.host
    slots = np.asarray([2, -1, 0, -1], np.int32)
    pages = np.asarray([[4, 9], [7, 7], [-1, -1], [3, 1]], np.int32)
    driver.run("lease", slots, pages)
    host.row_cache.page[[2, 0]] = [[4, 9], [-1, -1]]
    host.row_cache.row[[2, 0]] = -1
    driver.check()
    driver.run("set_staging_pages", np.asarray([8, 2, -1], np.int32))
    host.staging_page[:] = 8, 2, -1
    driver.check()


@stores
def test_cooling(num_devices: int, kind: RowKind) -> None:
    """Counts of one device only, after they were halved, or not halved at all."""
    driver = Driver(num_devices, kind)
    selections = driver.mirror.host.selections
    counted = selections.reshape(num_devices, -1).sum(axis=0)
    for _ in range(2):
        _, found = driver.run("decay")
        np.testing.assert_array_equal(found, counted)
        selections /= 2
        counted = counted / 2
        driver.check()


@stores
def test_transitions_are_in_place(num_devices: int, kind: RowKind) -> None:
    """A transition that copies a slab or host memory."""
    driver = Driver(num_devices, kind)
    moves = np.zeros((MOVES, 2), np.int32)
    maps = np.zeros((4 * MOVES, 3), np.int32)
    driver.check_in_place("move", MoveList(moves, moves, moves, moves, maps))
    driver.check_in_place("write", np.zeros(2, np.int32), *driver.pages(2))
