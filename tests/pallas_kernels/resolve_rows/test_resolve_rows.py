import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.common.pytree import make_unchecked
from pallas_kernels.resolve_rows import RowCache, SelectedRows, resolve_rows
from tests.helpers.row_cache import RowCacheModel

pytestmark = pytest.mark.compiles

SLOTS, GROUPS, SEQUENCES = 4, 2, 3
CONTEXT, NUM_DEVICES, DEVICE = 60, 2, 1  # positions of a sequence, every other one on this device
ROWS_PER_PAGE = 4  # of a page on the device
FIRST_HOST_ROW = 1000

compiled = functools.partial(
    jax.jit(resolve_rows, static_argnames=("first_host_row", "rows_per_page")),
    first_host_row=FIRST_HOST_ROW,
    rows_per_page=ROWS_PER_PAGE,
)


class Shape(NamedTuple):
    """Rows of a sequence, selected positions of each, and row-cache rows."""

    rows: int
    k: int
    entries: int


OVERFLOWING = Shape(6, 6, 5)  # up to 30 different rows, six times what there is room for
SHAPES = (Shape(1, 8, 1), Shape(1, 8, 6), OVERFLOWING, Shape(3, 8, CONTEXT))


@dataclasses.dataclass
class Step:
    """Arguments of one call."""

    group: int
    slots: np.ndarray
    positions: np.ndarray
    located: np.ndarray
    rows: np.ndarray
    scores: np.ndarray


class Driver:
    """Calls the op on one state, beside plain Python."""

    def __init__(self, shape: Shape, seed: int) -> None:
        self.shape, self.rng = shape, np.random.default_rng(seed)
        num_pages = -(-shape.entries // ROWS_PER_PAGE)
        # Hot pages in no order, with pages of others between them.
        pages = self.rng.permutation(2 * SLOTS * num_pages)[: SLOTS * num_pages]
        self.leases = pages.reshape(SLOTS, num_pages).astype(np.int32)
        # What an unused map holds is no secret, nor does it matter.
        empty = np.full((SLOTS, GROUPS, shape.entries), -1, np.int32)
        junk = self.rng.integers(-(2**15), 2**15, (SLOTS, CONTEXT // NUM_DEVICES))
        means = np.full(empty.shape, np.nan, np.float32)
        self.state = make_unchecked(
            RowCache,
            page=np.full_like(self.leases, -1),
            row=empty,
            mean=means,
            entry=junk.astype(np.int16),
        )
        self.models = {
            (slot, group): RowCacheModel.empty(shape.entries)
            for slot in range(SLOTS)
            for group in range(GROUPS)
        }
        # Host rows of two sequences may be the same.
        self.host_rows = self.rng.permuted(
            np.tile(np.arange(2 * CONTEXT), (SLOTS, 1)), axis=1, out=None
        )[:, :CONTEXT]

    def lease(self, slot: int, leased: bool) -> None:
        """Gives a slot empty row-cache rows, or none."""
        self.state.page[slot] = self.leases[slot] if leased else -1
        self.state.row[slot], self.state.mean[slot] = -1, np.nan
        for group in range(GROUPS):
            self.models[slot, group] = RowCacheModel.empty(self.shape.entries)

    def make(self, spread: float, spilled: float, missing: float) -> Step:
        """A step that selects of the first `spread` of the context, `spilled` of it on the host."""
        rows, k, _ = self.shape
        rng, shape = self.rng, (SEQUENCES, rows, k)
        slots = rng.permutation(SLOTS)[:SEQUENCES].astype(np.int32)
        slots[rng.random(SEQUENCES) < 0.15] = -1
        reach = max(k, int(spread * CONTEXT))
        positions = np.stack(
            [rng.permutation(reach)[:k] for _ in range(SEQUENCES * rows)], dtype=np.int32
        ).reshape(shape)
        positions[rng.random(shape) < missing] = -1
        # A row is on the device or not for all that select it; a resident row lies in any layer.
        resident = rng.random((SLOTS, CONTEXT)) >= spilled
        device_rows = rng.integers(0, FIRST_HOST_ROW, (SLOTS, CONTEXT))
        where = np.where(resident, device_rows, FIRST_HOST_ROW + self.host_rows)
        located = where[slots[:, None, None], positions].astype(np.int32)
        owned = (positions >= 0) & (positions % NUM_DEVICES == DEVICE)
        located[~owned | (slots < 0)[:, None, None]] = -1
        # Of what lies elsewhere the op may read any row of its map, and must not write it.
        context_rows = np.where(
            located >= FIRST_HOST_ROW,
            positions // NUM_DEVICES,
            rng.integers(0, CONTEXT // NUM_DEVICES, shape),
        )
        # Few values, so that many are equal.
        scores = rng.integers(-2, 3, (SEQUENCES, self.shape.entries)).astype(np.float32)
        group = int(rng.integers(GROUPS))
        return Step(group, slots, positions, located, context_rows.astype(np.int32), scores)

    def run(self, step: Step) -> None:
        """Calls the op and compares all that it returns."""
        entries_before = np.array(self.state.entry)
        found = jax.device_get(
            compiled(
                jax.tree.map(jnp.asarray, self.state),
                SelectedRows(
                    slots=jnp.asarray(step.slots),
                    rows=jnp.asarray(step.rows),
                    row_ids=jnp.asarray(step.located),
                    scores=jnp.asarray(step.scores),
                ),
                jnp.int32(step.group),
            )
        )
        self.state = jax.tree.map(np.array, found.row_cache)
        row_ids, staged = step.located.copy(), []
        counts = {"staged": [0] * SEQUENCES, "hits": [0] * SEQUENCES, "misses": [0] * SEQUENCES}
        for index, slot in enumerate(step.slots.tolist()):
            if slot < 0 or self.state.page[slot, 0] < 0:
                continue
            model = self.models[slot, step.group]
            on_host = step.located[index] >= FIRST_HOST_ROW
            model.resolve(step.rows[index][on_host].tolist(), step.scores[index].tolist())
            for entry in np.argwhere(on_host):
                key = (index, *entry)
                row = step.rows[key]
                if row in model.rows:
                    row_ids[key] = self.physical(slot, model.rows.index(row))
            for row, hot in model.staged.items():
                position = row * NUM_DEVICES + DEVICE
                staged.append((self.host_rows[slot, position], self.physical(slot, hot)))
            counts["staged"][index] = len(model.staged)
            counts["hits"][index] = model.hits
            counts["misses"][index] = len(model.missed)
        np.testing.assert_array_equal(found.row_ids, row_ids)
        listed = list(zip(found.host_rows.tolist(), found.device_rows.tolist(), strict=True))
        assert sorted(listed[: found.num_staged]) == sorted(staged)
        device_rows = [row for _, row in staged]
        assert len(set(device_rows)) == len(device_rows)
        for name, expected in counts.items():
            assert getattr(found, name).tolist() == expected, name
        self.check_state(entries_before, step)

    def physical(self, slot: int, row: int) -> int:
        page = int(self.leases[slot, row // ROWS_PER_PAGE])
        return page * ROWS_PER_PAGE + row % ROWS_PER_PAGE

    def check_state(self, entries_before: np.ndarray, step: Step) -> None:
        rows, means, entries = self.state.row, self.state.mean, self.state.entry
        for (slot, group), model in self.models.items():
            assert rows[slot, group].tolist() == model.rows
            np.testing.assert_array_equal(means[slot, group], np.array(model.means, np.float32))
        for slot in step.slots[step.slots >= 0].tolist():
            for hot, held in enumerate(self.models[slot, step.group].rows):
                assert self.state.page[slot, 0] < 0 or held < 0 or entries[slot, held] == hot
        others = [slot for slot in range(SLOTS) if slot not in step.slots]
        np.testing.assert_array_equal(entries[others], entries_before[others])


fractions = st.sampled_from([0.0, 0.3, 0.8, 1.0])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**32 - 1),
    steps=st.lists(
        st.tuples(
            st.sampled_from([0.2, 0.5, 1.0]),
            fractions,
            st.sampled_from([0.0, 0.3, 1.0]),
            st.none() | st.tuples(st.integers(0, SLOTS - 1), st.booleans()),
        ),
        min_size=1,
        max_size=12,
    ),
)
def test_resolution(
    shape: Shape,
    seed: int,
    steps: list[tuple[float, float, float, tuple[int, bool] | None]],
) -> None:
    """A row read from the wrong place, staged twice or evicted while it is needed; another victim
    than the one of the lowest mean; state of padding or of another group that changes."""
    driver = Driver(shape, seed)
    for slot in range(SLOTS):
        driver.lease(slot, slot != 1)
    for spread, spilled, missing, change in steps:
        if change is not None:
            driver.lease(*change)
        driver.run(driver.make(spread, spilled, missing))


def one_sequence(rows: list[list[int]], first_host: int = 0) -> Step:
    """A step of slot 0 and group 1 whose positions from `first_host` on lie on the host."""
    positions = np.full((SEQUENCES, OVERFLOWING.rows, OVERFLOWING.k), -1, np.int32)
    positions[0] = rows
    on_host = (positions >= 0) & (positions >= first_host)
    slots = np.asarray([0, -1, -1], np.int32)
    located = np.where(on_host, FIRST_HOST_ROW + positions, positions)
    context_rows = np.where(on_host, positions // NUM_DEVICES, 0)
    scores = np.zeros((SEQUENCES, OVERFLOWING.entries), np.float32)
    return Step(1, slots, positions, located, context_rows, scores)


def one_lease() -> Driver:
    driver = Driver(OVERFLOWING, 0)
    driver.host_rows[0] = np.arange(CONTEXT)
    driver.lease(0, True)
    return driver


def test_row_cache_rows_that_overflow() -> None:
    """A row that evicts one of its own step, or one that the step finds hot."""
    driver = one_lease()
    odd = np.arange(1, CONTEXT, 2).reshape(5, 6).tolist()
    for now, order in enumerate([(0, 1, 2, 3, 4, 0), (4, 3, 2, 1, 0, 0), (2,) * 6, (0, 1) * 3]):
        driver.run(one_sequence([odd[row] for row in order]))
        if now < 2:  # those that came first, and are needed in every step
            assert sorted(driver.models[0, 1].rows) == [p // NUM_DEVICES for p in odd[0][:5]]


def test_resident_rows_evict_nothing() -> None:
    """Row-cache rows that give way to rows on the device."""
    driver = one_lease()
    odd = list(range(1, CONTEXT, 2))
    driver.run(one_sequence([odd[:6]] * 6))
    before = driver.state.row.copy()
    driver.run(one_sequence([odd[3:9]] * 6, first_host=CONTEXT))
    np.testing.assert_array_equal(driver.state.row, before)
