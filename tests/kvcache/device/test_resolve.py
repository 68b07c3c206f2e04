import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from glm53.model.sharding import make_mesh
from kvcache import KVGeometry, KVStore
from kvcache.device.resolve import MAX_ROWS_WITH_ROW_CACHE, resolve_selection
from kvcache.device.store import MESH_AXIS, in_host, on_device
from kvcache.reads import Reads
from pallas_kernels.common.host_memory import HOST_MEMORY
from pallas_kernels.common.row_format import RowFormat
from pallas_kernels.stage_rows import stage_pages
from tests.helpers.row_cache import RowCacheModel

pytestmark = pytest.mark.compiles
GROUP_LAYERS, SLOTS, MAX_PAGES, ROWS_PER_DEVICE = (1, 3), 3, 5, 4
FIRST_LAYER = (0, 1)
DEVICE_PAGES, HOST_PAGES = 14, 18
NUM_ENTRIES, ROW_CACHE_PAGES, STAGING_PAGES = 6, 2, 3
SEQUENCES, K = 3, 10
PREFILL_ROWS = MAX_ROWS_WITH_ROW_CACHE + 1
FIELDS = [field.name for field in dataclasses.fields(Reads)]
NOTHING = -7  # in every row that holds no page's

# Device pages that are on lease; all others may hold pages.
HOT_LEASES = ((13, 2), (7, 11), (4, 9))
STAGING = (1, 12, 5)
DEVICE_INDICES = (0, 3, 6, 8, 10)

meshes = pytest.mark.parametrize("num_devices", [1, 2])


@functools.cache
def geometry(num_devices: int) -> KVGeometry:
    return KVGeometry(
        group_layers=GROUP_LAYERS,
        device_pages=DEVICE_PAGES,
        host_pages=HOST_PAGES,
        row_cache_rows=NUM_ENTRIES,
        staging_pages=STAGING_PAGES,
        num_devices=num_devices,
        max_sequences=SLOTS,
        max_pages_per_sequence=MAX_PAGES,
        rows_per_device=ROWS_PER_DEVICE,
        row_format=RowFormat("fp8", 8, 4, 1e-4),
        index_row_format=RowFormat("fp8", 8, 0, 1e-6),
    )


@functools.cache
def compiled(num_devices: int) -> Callable:
    """Returns a group's selection, and the rows that each of its layers would attend to."""
    sizes, mesh = geometry(num_devices), make_mesh(num_devices)

    def local(store, group, layers, slots, tables, positions, scores):
        summary = scores if positions.shape[1] <= MAX_ROWS_WITH_ROW_CACHE else None
        device = jax.lax.axis_index(MESH_AXIS)
        store, resolved = resolve_selection(
            on_device(store),
            sizes,
            group,
            layers[0],
            slots,
            tables,
            positions,
            summary,
            device,
        )
        row_ids, staged = resolved.row_ids.reshape(positions.shape), resolved.staged
        count = resolved.count.reshape(positions.shape[:2])
        assert staged is not None

        def attend(store: KVStore, layer: jax.Array) -> tuple[KVStore, jax.Array]:
            assert store.host is not None
            host_slab = store.host.slab
            slab = stage_pages(
                store.slab, host_slab, layer, staged.host_page, staged.target, staged.count
            )
            store = dataclasses.replace(store, slab=slab)
            rows = slab.reshape(-1, slab.shape[-1])
            host = host_slab.reshape(-1, *host_slab.shape[2:])
            resident = rows[(layer * sizes.device_rows + row_ids) % sizes.slab_rows]
            in_host = row_ids >= sizes.slab_rows
            spilled = host[jnp.where(in_host, row_ids - sizes.slab_rows, 0), layer]
            return store, jnp.where(in_host[..., None], spilled, resident)

        store, read = jax.lax.scan(attend, store, layers)
        return in_host(store), row_ids[None], count[None], read[None]

    specs, everywhere, by_device = KVStore.specs(sizes), PartitionSpec(), PartitionSpec(MESH_AXIS)
    mapped = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(specs, *[everywhere] * 6),
        out_specs=(specs, by_device, by_device, by_device),
        check_vma=False,
    )
    shardings = (KVStore.shardings(sizes, mesh), None, None, None)
    return jax.jit(mapped, donate_argnums=0, out_shardings=shardings)


@functools.cache
def empty(num_devices: int) -> KVStore:
    return KVStore.create(geometry(num_devices), make_mesh(num_devices))


def content(
    layers: np.ndarray | int, pages: np.ndarray | int, rows: np.ndarray, width: int
) -> np.ndarray:
    """What a row of a page holds: its layer, its page and its row of the page."""
    words = np.broadcast_arrays(layers, pages, rows, *[np.int32(0)] * (width - 3))
    return np.stack(words, axis=-1).astype(np.int32)


class Driver:
    """Sequences whose pages lie here and there, beside plain Python that finds their rows."""

    def __init__(
        self,
        num_devices: int,
        device_page: dict[int, int],
        host_page: dict[int, int],
        tables: list[list[int]],
        leased: tuple[int, ...] = (),
        num_staging: int = 0,
    ) -> None:
        self.sizes = sizes = geometry(num_devices)
        self.device_page, self.host_page, self.leased = device_page, host_page, leased
        self.num_staging = num_staging
        self.rng = np.random.default_rng(0)
        self.tables = np.full((SLOTS, MAX_PAGES), -1, np.int32)
        for slot, table in enumerate(tables):
            self.tables[slot, : len(table)] = table
        for pages, index in [*device_page.items(), *host_page.items()]:
            assert pages != index
        self.models = {
            (device, slot, group): RowCacheModel.empty(NUM_ENTRIES)
            for device in range(num_devices)
            for slot in range(SLOTS)
            for group in range(len(GROUP_LAYERS))
        }
        self.reads = np.zeros((SLOTS, num_devices, len(FIELDS)), np.int64)
        self.selections = np.zeros((num_devices, sizes.num_pages))
        self.store = self.filled()

    def filled(self) -> KVStore:
        """The store with every page's rows where it lies, and nothing elsewhere."""
        sizes, start = self.sizes, empty(self.sizes.num_devices)
        assert start.host is not None
        rows = np.arange(sizes.rows_per_page)
        slab, host = (np.full(array.shape, NOTHING) for array in (start.slab, start.host.slab))
        layers, width = np.arange(sizes.num_layers), slab.shape[-1]
        for page, index in self.device_page.items():
            slab[:, index] = content(layers[:, None], page, rows, width)
        for page, index in self.host_page.items():
            host[index] = content(layers, page, rows[:, None], width)
        row_cache_page = np.full((SLOTS, ROW_CACHE_PAGES), -1)
        for slot in self.leased:
            row_cache_page[slot] = HOT_LEASES[slot]
        staging = np.full(STAGING_PAGES, -1)
        staging[: self.num_staging] = STAGING[: self.num_staging]

        def placed(array: np.ndarray, like: jax.Array) -> jax.Array:
            put = jax.device_put(array.astype(like.dtype), like.sharding)
            # Arrays that are numpy's own memory cannot be donated.
            return put if put.sharding.memory_kind == HOST_MEMORY else jnp.copy(put)

        return dataclasses.replace(
            jax.tree.map(jnp.copy, dataclasses.replace(start, host=None)),
            slab=placed(slab, start.slab),
            device_page_index=placed(self.map(self.device_page), start.device_page_index),
            host_page_index=placed(self.map(self.host_page), start.host_page_index),
            host=dataclasses.replace(
                jax.tree.map(jnp.copy, start.host),
                slab=placed(host, start.host.slab),
                row_cache=dataclasses.replace(
                    jax.tree.map(jnp.copy, start.host.row_cache),
                    page=placed(row_cache_page, start.host.row_cache.page),
                ),
                staging_page=placed(staging, start.host.staging_page),
            ),
        )

    def map(self, indices: dict[int, int]) -> np.ndarray:
        pages = np.full(self.sizes.num_pages, -1)
        pages[list(indices)] = list(indices.values())
        return pages

    def select(self, num_rows: int, missing: float = 0.2, reach: int | None = None) -> np.ndarray:
        """Different positions of each row, in no order, some beyond the sequence's last page."""
        capacity = reach or MAX_PAGES * self.sizes.rows_per_page
        shape = (SEQUENCES, num_rows, K)
        positions = [self.rng.permutation(capacity)[:K] for _ in range(SEQUENCES * num_rows)]
        positions = np.stack(positions).reshape(shape).astype(np.int32)
        positions[self.rng.random(shape) < missing] = -1
        return positions

    def run(self, group: int, slots: list[int], positions: np.ndarray) -> np.ndarray:
        """Selects for a group, and compares what its layers read and all that has changed.

        Returns the ids, [devices, sequences, rows, k].
        """
        sizes, layers = self.sizes, FIRST_LAYER[group] + np.arange(GROUP_LAYERS[group])
        positions[np.asarray(slots) < 0] = -1
        tables = self.tables[np.maximum(slots, 0)]
        scores = self.rng.integers(-2, 3, (SEQUENCES, NUM_ENTRIES)).astype(np.float32)
        self.store, row_ids, count, read = compiled(sizes.num_devices)(
            self.store,
            jnp.int32(group),
            # As many for every group, so that all run the same code.
            jnp.asarray(np.resize(layers, max(GROUP_LAYERS)), jnp.int32),
            jnp.asarray(slots, jnp.int32),
            jnp.asarray(tables),
            jnp.asarray(positions),
            jnp.asarray(scores),
        )
        row_ids, count, read = (np.array(each) for each in (row_ids, count, read))
        page_index = np.minimum(positions // sizes.rows_per_page, MAX_PAGES - 1)
        pages = tables[np.arange(SEQUENCES)[:, None, None], page_index]
        pages = np.where(positions >= 0, pages, -1)
        for device in range(sizes.num_devices):
            own = np.where(positions % sizes.num_devices == device, pages, -1)
            assert (count[device] == (own >= 0).sum(axis=-1)).all()
            assert ((row_ids[device] >= 0) == (np.arange(K) < count[device, ..., None])).all()
            # Back to where the positions are; other rows are not looked at.
            compacted = np.argsort(np.argsort(own < 0, axis=-1, kind="stable"), axis=-1)
            row_ids[device] = np.take_along_axis(row_ids[device], compacted, axis=-1)
            read[device] = np.take_along_axis(read[device], compacted[None, ..., None], axis=-2)
            rows = positions % sizes.rows_per_page // sizes.num_devices
            rows += positions % sizes.num_devices * ROWS_PER_DEVICE
            for index, layer in enumerate(layers):
                expected = content(int(layer), own, rows, read.shape[-1])
                np.testing.assert_array_equal(read[device, index][own >= 0], expected[own >= 0])
            self.count(device, group, slots, positions, own, row_ids[device], scores)
        self.check()
        return row_ids

    def count(
        self,
        device: int,
        group: int,
        slots: list[int],
        positions: np.ndarray,
        pages: np.ndarray,
        row_ids: np.ndarray,
        scores: np.ndarray,
    ) -> None:
        """Does in Python what the step did to one device's row-cache rows and counts."""
        for page in pages[pages >= 0].tolist():
            self.selections[device, page] += 1
        spilled = (pages >= 0) & (self.map(self.device_page)[pages] < 0)
        in_place = row_ids >= self.sizes.slab_rows
        assert not (in_place & ~spilled).any()
        staged_pages = sorted(set(pages[spilled].tolist()))
        room = self.num_staging * self.sizes.num_layers
        first_spilled = True
        for index, slot in enumerate(slots):
            if slot < 0:
                continue
            counts = dict.fromkeys(FIELDS, 0)
            counts["resident"] = int(((pages[index] >= 0) & ~spilled[index]).sum())
            wanted, elsewhere = positions[index][spilled[index]].tolist(), in_place[index]
            if positions.shape[1] > MAX_ROWS_WITH_ROW_CACHE:
                staged = np.isin(pages[index], staged_pages[:room]) & spilled[index]
                np.testing.assert_array_equal(elsewhere, spilled[index] & ~staged)
                counts |= {"staged": int(staged.sum()), "missed": len(wanted)}
                if wanted and first_spilled:
                    rows = min(len(staged_pages), room) * self.sizes.rows_per_device
                    counts["layer_rows_staged"] = rows * GROUP_LAYERS[group]
                    first_spilled = False
            elif slot in self.leased:
                model = self.models[device, slot, group]
                if spilled.any():
                    model.resolve(wanted, scores[index].tolist())
                found = np.isin(positions[index], model.rows) & spilled[index]
                np.testing.assert_array_equal(elsewhere, spilled[index] & ~found)
                if wanted:
                    counts |= {"row_cache": model.hits, "missed": len(model.missed)}
                    counts["staged"] = int(found.sum()) - model.hits
                    counts["layer_rows_staged"] = len(model.staged) * GROUP_LAYERS[group]
            else:
                np.testing.assert_array_equal(elsewhere, spilled[index])
                counts["missed"] = len(wanted)
            counts["host"] = int(elsewhere.sum())
            self.reads[slot, device] += list(counts.values())

    def check(self) -> None:
        """Asserts that row-cache rows and counts are as in Python, and pages' rows untouched."""
        host = self.store.host
        assert host is not None
        num_devices = self.sizes.num_devices
        rows, means = (
            np.asarray(array).reshape(SLOTS, len(GROUP_LAYERS), num_devices, NUM_ENTRIES)
            for array in (host.row_cache.row, host.row_cache.mean)
        )
        for (device, slot, group), model in self.models.items():
            # The model holds positions.
            assert rows[slot, group, device].tolist() == [row // num_devices for row in model.rows]
            np.testing.assert_array_equal(
                means[slot, group, device], np.array(model.means, np.float32)
            )
        reads = np.asarray(host.reads).reshape(SLOTS, num_devices, -1)
        np.testing.assert_array_equal(reads, self.reads)
        selections = np.asarray(host.selections).reshape(num_devices, -1)
        np.testing.assert_array_equal(selections, self.selections)
        before = self.filled()
        assert before.host is not None
        np.testing.assert_array_equal(host.slab, before.host.slab)
        held = list(self.device_page.values())
        np.testing.assert_array_equal(self.store.slab[:, held], before.slab[:, held])
        lent = {index for slot in self.leased for index in HOT_LEASES[slot]}
        lent |= set(STAGING[: self.num_staging])
        idle = sorted(set(range(DEVICE_PAGES)) - lent)
        np.testing.assert_array_equal(self.store.slab[:, idle], before.slab[:, idle])


# Pages of three sequences; the first two share two of them. One sequence is shorter than its table.
TABLES = [[20, 9, 31, 15, 27], [20, 9, 3, 17, 22], [29, 6, 19]]
PAGES = sorted({page for table in TABLES for page in table})
ON_HOST = {page: index for index, page in enumerate(PAGES, 4)}
MIXED: dict[int, int] = dict(zip((9, 31, 17, 29, 22), DEVICE_INDICES, strict=True))


@meshes
def test_rows_on_the_device(num_devices: int) -> None:
    """A row whose page lies in both tiers, read or counted as one of the host."""
    tables = [[9, 31], [9, 17], [29]]
    driver = Driver(num_devices, MIXED, ON_HOST, tables, leased=(0, 1), num_staging=3)
    for group, num_rows in ((0, 1), (1, 3), (1, PREFILL_ROWS)):
        row_ids = driver.run(group, [1, 0, 2], driver.select(num_rows))
        assert (row_ids < driver.sizes.device_rows).all()
    assert driver.reads[..., 0].sum() == driver.reads.sum() > 0


@meshes
@pytest.mark.parametrize("spilled", ["all", "some"])
def test_row_cache_rows(num_devices: int, spilled: str) -> None:
    """A missed row that a layer of its group does not read, or another group's, slot's or device's.

    Slot 1 has no row-cache rows. Three rows of a step select up to five times what there is room
    for.
    """
    device_page = MIXED if spilled == "some" else {}
    driver = Driver(num_devices, device_page, ON_HOST, TABLES, leased=(0, 2), num_staging=3)
    for group, slots, num_rows, reach in [
        (0, [2, 0, 1], 1, None),
        (1, [2, 0, 1], 1, 16),
        (1, [0, -1, 2], 1, 16),
        (0, [0, 1, 2], 3, 14),
        (1, [1, 2, 0], 3, None),
        (1, [-1, 2, 0], 3, 14),
        (0, [-1, -1, -1], 1, None),
    ]:
        driver.run(group, slots, driver.select(num_rows, reach=reach))
    for name in ("row_cache", "staged", "host", "missed"):
        assert driver.reads[..., FIELDS.index(name)].any(), name


@meshes
@pytest.mark.parametrize("num_staging", [0, 1, 3])
@pytest.mark.parametrize("spilled", ["all", "some"])
def test_staged_pages(num_devices: int, num_staging: int, spilled: str) -> None:
    """A page staged in rows that another holds, staged twice, or read where it was not staged.

    With one device page there is room for fewer pages than are selected from.
    """
    device_page = MIXED if spilled == "some" else {}
    driver = Driver(num_devices, device_page, ON_HOST, TABLES, (0,), num_staging)
    for group, slots in ((0, [2, 0, 1]), (1, [1, -1, 0])):
        driver.run(group, slots, driver.select(PREFILL_ROWS))
    host = driver.reads[..., FIELDS.index("host")]
    assert host.any() == (num_staging < 2)
    assert driver.reads[..., FIELDS.index("staged")].any() == (num_staging > 0)


@meshes
def test_a_shared_page_is_staged_once(num_devices: int) -> None:
    """A page that two sequences read, staged for both, or for one of them only."""
    driver = Driver(num_devices, {}, ON_HOST, TABLES, num_staging=1)
    positions = np.full((SEQUENCES, PREFILL_ROWS, K), -1, np.int32)
    positions[:2, :, :4] = np.arange(4)
    driver.run(1, [1, 0, 2], positions)
    rows = driver.reads[..., FIELDS.index("layer_rows_staged")]
    assert rows.tolist() == [[0] * num_devices, [12] * num_devices, [0] * num_devices]
    assert driver.reads[2].sum() == 0


@meshes
def test_a_page_that_comes_back(num_devices: int) -> None:
    """A row-cache row that is not found again once its page has been on the device and left it."""
    driver = Driver(num_devices, {}, ON_HOST, TABLES, leased=(0,))
    positions = np.full((SEQUENCES, 1, K), -1, np.int32)
    positions[0, 0, :4] = np.arange(4)
    for device_page, column in (({}, "missed"), ({20: 3}, "resident"), ({}, "row_cache")):
        driver.device_page = device_page
        before = driver.filled()
        driver.store = dataclasses.replace(
            driver.store,
            device_page_index=before.device_page_index,
            slab=driver.store.slab.at[:, [3]].set(before.slab[:, [3]]),
        )
        count = driver.reads[0, :, FIELDS.index(column)].copy()
        driver.run(1, [0, -1, -1], positions)
        assert (driver.reads[0, :, FIELDS.index(column)] - count).sum() == 4
