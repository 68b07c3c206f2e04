"""Random histories of sequences in a small store, checked after every step."""

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable

import numpy as np
from flax import nnx
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from kvcache import OutOfPagesError
from kvcache.prefix_transfer import PrefixImport, export_prefix
from kvcache.residency_view import view_sequence
from kvcache.tiers.page_states import PageState
from pallas_kernels.common.row_format import RowKind
from tests.helpers.cached_session import CachedSession, Expected, StoredRows, as_bytes, page_rows
from tests.helpers.random_models import micro_config, preset_params, random_tokens

LENGTH = 72
MAX_PROMPT, MAX_MORE, MAX_IMPORTED = 48, 24, 24
SLOTS = range(3)
PREFILL_ROWS, DECODE_ROWS = 16, 6
STREAMS = range(4)
FORKS = (LENGTH, 21, 24, 0)
"""Tokens that each stream has in common with the first: all, part of a page, whole pages, none."""

PAGES = {1: (8, 14), 2: (6, 8)}
"""Pages of the device and of the host, by number of devices."""


@functools.cache
def streams() -> list[np.ndarray]:
    """The tokens of each stream."""
    first, *others = (random_tokens(micro_config(), LENGTH, seed) for seed in STREAMS)
    forks = zip(others, FORKS[1:], strict=True)
    return [first, *(np.concatenate([first[:fork], other[fork:]]) for other, fork in forks)]


@dataclasses.dataclass
class Running:
    """A sequence in a slot: `done` of the first `total` tokens of a stream, `prompt` its prompt,
    and whether pages were reserved for all of them."""

    stream: int
    prompt: int
    total: int
    done: int
    reserved: bool


@dataclasses.dataclass(eq=False)
class Arriving:
    """An import of the first `total` tokens of a stream, of which `given` have come."""

    transfer: PrefixImport
    stream: int
    total: int
    given: int = 0


class Histories(RuleBasedStateMachine):
    """Sequences open, grow and close in a small store while pages move between the tiers.

    Subclasses name the model and the store, what steps must give, and a count of what happens.
    """

    row_kind: RowKind
    num_devices: int
    params: nnx.State
    expected: Expected
    counts: Counter[str]

    def __init__(self) -> None:
        super().__init__()
        self.session = CachedSession(
            micro_config(),
            self.params,
            num_devices=self.num_devices,
            max_step_rows=PREFILL_ROWS,
            row_kind=self.row_kind,
            rows_per_device=4,
            device_pages=PAGES[self.num_devices][0],
            host_pages=PAGES[self.num_devices][1],
            row_cache_rows=3,
            staging_pages=1,
            max_sequences=len(SLOTS),
            max_model_len=LENGTH,
        )
        self.cache, self.residency = self.session.cache, self.session.cache.residency
        self.geometry = self.session.geometry
        self.running: dict[int, Running] = {}
        self.arriving: list[Arriving] = []
        # Of each page that holds rows: a stream, the first position, and how many rows.
        self.contents: dict[int, tuple[int, int, int]] = {}

    @initialize(prompt=st.integers(8, MAX_PROMPT), more=st.integers(8, MAX_MORE))
    def start(self, prompt: int, more: int) -> None:
        self.open(1, 0, prompt, more, True)

    @precondition(lambda self: len(self.running) < len(SLOTS))
    @rule(
        data=st.data(),
        stream=st.sampled_from(STREAMS),
        prompt=st.integers(1, MAX_PROMPT),
        more=st.integers(0, MAX_MORE),
        use_prefix=st.sampled_from([True, True, True, False]),
        reserved=st.booleans(),
    )
    def open_one(
        self, data: st.DataObject, use_prefix: bool, reserved: bool, **sequence: int
    ) -> None:
        """Starts a sequence, often one that begins as one before it; or changes nothing."""
        slot = data.draw(st.sampled_from([slot for slot in SLOTS if slot not in self.running]))
        self.open(slot, use_prefix=use_prefix, reserved=reserved, **sequence)
        self.grow(data)

    def open(
        self,
        slot: int,
        stream: int,
        prompt: int,
        more: int,
        use_prefix: bool,
        reserved: bool = True,
    ) -> None:
        tokens, before = streams()[stream][:prompt].tolist(), self.bookkeeping()
        total = prompt + more
        try:
            done = self.cache.open(
                slot, tokens, total if reserved else prompt, use_prefix=use_prefix
            )
        except OutOfPagesError:
            assert self.bookkeeping() == before
            self.counts["refused"] += 1
            return
        self.counts["whole pages found"] += done >= self.geometry.rows_per_page
        self.counts["part of a page found"] += done % self.geometry.rows_per_page > 0
        self.running[slot] = Running(stream, prompt, total, done, reserved)
        self.note_contents(slot)

    def bookkeeping(self) -> tuple:
        """Everything that a refused sequence must leave as it is."""
        pool, residency = self.cache.pool, self.residency
        pages = [
            (
                pool.references(page),
                pool.is_cached(page),
                residency.states.state(page),
                residency.states.device_page_index(page),
                residency.states.host_page_index(page),
            )
            for page in range(self.geometry.num_pages)
        ]
        leases = [residency.leased_row_cache(slot) for slot in SLOTS]
        return pages, leases, residency.staged_pages, self.cache.index.num_cached

    def note_contents(self, slot: int) -> None:
        run, size = self.running[slot], self.geometry.rows_per_page
        for index, page in enumerate(self.cache.pages_of(slot)):
            start = index * size
            self.contents[page] = (run.stream, start, min(size, run.done - start))

    @property
    def growing(self) -> list[int]:
        return [slot for slot, run in self.running.items() if run.done < run.total]

    @precondition(lambda self: self.growing)
    @rule(data=st.data())
    def grow(self, data: st.DataObject) -> None:
        """Computes some chunks of a prompt, or all that is left, or tokens after it."""
        if not self.growing:
            return
        slot = data.draw(st.sampled_from(self.growing))
        if self.running[slot].done < self.running[slot].prompt:
            chunk = st.integers(1, PREFILL_ROWS)
            whole = st.just([PREFILL_ROWS] * (LENGTH // PREFILL_ROWS + 1))
            self.prefill(slot, data.draw(st.lists(chunk, max_size=2) | whole))
        else:
            counts = st.tuples(st.integers(1, DECODE_ROWS), st.integers(0, DECODE_ROWS))
            self.decode(
                data.draw(st.permutations([slot, -1, *self.ready(slot)]))[:2],
                data.draw(st.lists(counts, min_size=1, max_size=6)),
            )

    def ready(self, slot: int) -> list[int]:
        """Other slots whose sequences can be appended to in the same step."""
        return [
            other
            for other in self.growing
            if other != slot and self.running[other].done >= self.running[other].prompt
        ]

    def prefill(self, slot: int, counts: list[int]) -> None:
        run = self.running[slot]
        for count in counts:
            rows = min(count, run.prompt - run.done)
            if not rows or not self.step({slot: rows}, [slot], PREFILL_ROWS):
                return

    def decode(self, groups: list[int], counts: list[tuple[int, ...]]) -> None:
        """Appends tokens to one sequence, or to two in each step, or beside padding."""
        for step_counts in counts:
            rows = {}
            for slot, count in zip(groups, step_counts, strict=True):
                left = self.running[slot].total - self.running[slot].done if slot >= 0 else 0
                if min(count, left):
                    rows[slot] = min(count, left)
            listed = [slot if slot in rows else -1 for slot in groups]
            if not rows:
                return
            if not self.step(rows, listed, DECODE_ROWS):
                # As without drafts.
                fewer = self.step(dict.fromkeys(rows, 1), listed, DECODE_ROWS)
                if not fewer:
                    assert not all(run.reserved for run in self.running.values())
                    self.counts["preempted"] += 1
                    return self.close_slot(max(self.running), preempted=True)

    def step(self, rows: dict[int, int], groups: list[int], max_rows: int) -> bool:
        """One step, and all checks after it; False if there is no room for so many rows."""
        if not self.cache.can_prepare(rows):
            self.counts["fewer rows"] += 1
            return False
        runs = {slot: self.running[slot] for slot in rows}
        is_prefill = max_rows == PREFILL_ROWS
        output, reads = self.session.append(
            {
                slot: streams()[run.stream][run.done : run.done + rows[slot]]
                for slot, run in runs.items()
            },
            rows=max_rows,
            slots=groups,
            staging=is_prefill,
            complete=is_prefill
            and all(run.done + rows[slot] == run.prompt for slot, run in runs.items()),
        )
        assert output.trace is not None
        logits, selected = as_bytes(output.logits), np.array(output.trace.selected)
        selected = selected.reshape(len(selected), *logits.shape[:2], -1)
        for slot, run in runs.items():
            group, count = groups.index(slot), rows[slot]
            span = slice(run.done, run.done + count)
            where = f"stream {run.stream} from {run.done} in slot {slot}"
            same = selected[:, group, :count] == self.expected.selected[run.stream, :, span]
            assert same.all(), f"other positions are selected: {where}"
            same = logits[group, :count] == self.expected.logits[run.stream, span]
            assert same.all(), f"logits differ: {where}"
            run.done += count
            self.note_contents(slot)
        self.counts["steps"] += 1
        for column, count in dataclasses.asdict(reads).items():
            self.counts[f"{column} in {'prefill' if is_prefill else 'decode'}"] += count
        self.check_store()
        for slot in self.running:
            self.check_view(slot)
        return True

    def check_view(self, slot: int) -> None:
        """What is shown of a sequence is what the device's own tables say."""
        view, store = view_sequence(self.cache, slot), self.cache.device.store
        pages = np.asarray(self.cache.pages_of(slot), np.int64)
        assert np.array_equal(view.on_device, np.asarray(store.device_page_index)[pages] >= 0)
        assert store.host is not None
        row_cache_row = np.asarray(store.host.row_cache.row)[slot].reshape(-1, self.num_devices, 3)
        positions = row_cache_row * self.num_devices + np.arange(self.num_devices)[:, None]
        in_page = positions[row_cache_row >= 0] // self.geometry.rows_per_page
        leased = np.asarray(store.host.row_cache.page)[slot, 0] >= 0
        shown = [leased * np.count_nonzero(in_page == index) for index in range(len(pages))]
        assert view.row_cache.tolist() == shown
        self.counts["rows in a row cache"] += sum(shown)

    def check_store(self) -> None:
        """Every confirmed row has its bytes in each tier it lies; unused pages lie nowhere."""
        self.cache.check_integrity()
        self.cache.moves.flush()
        stored = StoredRows.of(self.cache.device.store)
        for page in range(self.geometry.num_pages):
            device, host = stored.device_page_index[page], stored.host_page_index[page]
            if self.residency.states.state(page) is PageState.FREE:
                assert (device, host) == (-1, -1), f"page {page} is free"
                self.contents.pop(page, None)
                continue
            stream, start, count = self.contents[page]
            span, in_page = slice(start, start + count), page_rows(self.geometry, count)
            where = f"page {page}, rows {start} to {start + count} of stream {stream}"
            keys = stored.keys[:, page, in_page].swapaxes(0, 1)
            assert np.array_equal(keys, self.expected.keys[stream, span]), f"index keys of {where}"
            assert max(device, host) >= 0, where
            rows = self.expected.rows[stream, span]
            if device >= 0:
                found = stored.device[:, device, in_page].swapaxes(0, 1)
                assert np.array_equal(found, rows), f"{where}, at device page {device}"
            if host >= 0:
                found = stored.host[host, in_page]
                assert np.array_equal(found, rows), f"{where}, at host page {host}"
            self.counts["only on the host"] += int(device < 0)
            self.counts["in both tiers"] += int(min(device, host) >= 0)
            self.counts["three different numbers"] += len({page, device, host} - {-1}) == 3

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        """Ends a sequence, in the middle or where it was to end."""
        self.close_slot(data.draw(st.sampled_from(sorted(self.running))))

    def close_slot(self, slot: int, *, preempted: bool = False) -> None:
        del self.running[slot]
        self.cache.close(slot, preempted=preempted)

    @precondition(lambda self: not self.arriving[1:])
    @rule(stream=st.sampled_from(STREAMS), total=st.integers(1, MAX_IMPORTED))
    def begin_import(self, stream: int, total: int) -> None:
        """Takes pages for a prefix that comes from elsewhere; or changes nothing."""
        before = self.bookkeeping()
        try:
            transfer = PrefixImport(self.cache, streams()[stream][:total].tolist())
        except OutOfPagesError:
            assert self.bookkeeping() == before
            self.counts["import refused"] += 1
            return
        self.arriving.append(Arriving(transfer, stream, total))

    @precondition(lambda self: self.arriving)
    @rule(data=st.data(), rows=st.integers(1, MAX_PROMPT), ends=st.sampled_from("yyyn"))
    def go_on_importing(self, data: st.DataObject, rows: int, ends: str) -> None:
        """Brings rows of an import, and ends it after the last, or in the middle."""
        self.bring(data.draw(st.sampled_from(self.arriving)), rows, ends)

    def bring(self, arriving: Arriving, rows: int, ends: str) -> None:
        transfer, total = arriving.transfer, arriving.total
        pages, size = list(transfer._pages), self.geometry.rows_per_page
        span = slice(arriving.given, min(arriving.given + rows, total))
        arriving.given = span.stop
        try:
            transfer.write(*self.stored(arriving.stream, span))
            if ends == "y" and span.stop == total:
                transfer.finish()
                self.counts["imports"] += 1
        except OutOfPagesError:
            self.counts["import without a page"] += 1
            ends = "n"
        for index, page in enumerate(pages[: transfer._written]):
            self.contents[page] = arriving.stream, index * size, min(size, total - index * size)
        if ends == "n":
            transfer.abort()
        if ends == "n" or span.stop == total:
            self.arriving.remove(arriving)
        self.check_store()

    def stored(self, stream: int, span: slice) -> tuple[np.ndarray, np.ndarray]:
        """Rows and index keys of a stream, as they are stored."""
        formats = self.geometry.row_format, self.geometry.index_row_format
        rows, keys = self.expected.rows[stream, span], self.expected.keys[stream, span]
        return rows.view(formats[0].dtype), keys.view(formats[1].dtype)

    @rule(stream=st.sampled_from(STREAMS), most=st.integers(1, LENGTH))
    def export(self, stream: int, most: int) -> None:
        """Reads what is cached of a stream, in whatever tier."""
        tokens = streams()[stream].tolist()
        count = self.cache.index.match(tokens, most).num_tokens
        if not count:
            return
        parts = zip(*export_prefix(self.cache, tokens[:count]), strict=True)
        expected = self.stored(stream, slice(0, count))
        for found, wanted in zip(map(np.concatenate, parts), expected, strict=True):
            assert found.tobytes() == wanted.tobytes(), f"the first {count} of stream {stream}"
        self.counts["exports"] += 1

    @precondition(lambda self: self.contents)
    @rule(data=st.data(), repeats=st.integers(1, 6))
    def change_residency(self, data: st.DataObject, repeats: int) -> None:
        """Does something to a page, or a lease, that can be done to it."""
        for _ in range(repeats):
            choices = [choice for choice in self.residency_changes() if choice[1]]
            action, targets = data.draw(st.sampled_from(choices))
            action(data.draw(st.sampled_from(targets)))
        self.grow(data)

    def residency_changes(self) -> list[tuple[Callable[[int], object], list[int]]]:
        """What can be done, and to which pages, slots, or as often."""
        residency = self.residency
        pages = {state: residency.states.pages_in(state).tolist() for state in PageState}
        clean, host = pages[PageState.CLEAN], pages[PageState.HOST]
        leased = [slot for slot in self.running if residency.leased_row_cache(slot)]
        return [
            (residency.offload, pages[PageState.DIRTY] if residency.states.num_free_host else []),
            (residency.drop, [page for page in clean if residency.states.is_droppable(page)]),
            (residency.drop_host_copy, clean),
            (self.onload, host if residency.states.room else []),
            (residency.lease_row_cache, [slot for slot in self.running if slot not in leased]),
            (residency.release_row_cache, leased),
            (lambda _: residency.lease_staging(), [1]),
            (lambda _: residency.release_staging(), [1]),
            (self.onload_hottest, [1, 2, 3, 4]),
            (self.evict, [1]),
        ]

    def onload(self, page: int) -> None:
        self.cache.pool.acquire(page)
        self.residency.onload(page)
        self.cache.pool.release(page)

    def onload_hottest(self, limit: int) -> None:
        self.evict(3)  # so that there may be room to spare
        heat = np.random.default_rng(limit).integers(1, 4, self.geometry.num_pages)
        self.residency.measure_heat()
        self.residency.update_heat(heat.astype(np.float32))
        self.counts["onloaded ahead"] += self.residency.onload_hottest(limit)

    def evict(self, count: int) -> None:
        for _ in range(count):
            self.counts["evicted"] += self.cache.index.evict(self.cache.tick())

    def walk(self) -> None:
        """A history of everything that `HAPPENS`, which random ones may miss."""
        self.begin_import(stream=3, total=10)
        self.bring(self.arriving[0], 10, "y")
        self.export(stream=3, most=LENGTH)
        self.open(0, 3, 20, 0, True)
        self.close_slot(0)
        self.spill()
        self.open(1, 0, LENGTH - 8, 8, False)
        self.open(0, 1, LENGTH - 8, 8, False)
        self.open(2, 2, 8, 16, False)
        self.begin_import(stream=2, total=MAX_IMPORTED)

    def spill(self) -> None:
        """Reads from all tiers at once, and a lease whose device page is needed."""
        self.open(0, 0, LENGTH - 8, 8, True)
        self.prefill(0, [PREFILL_ROWS, PREFILL_ROWS, PREFILL_ROWS, 8])
        self.drop_all()
        self.prefill(0, [PREFILL_ROWS])
        self.decode([0, -1], [(1, 0)] * 8)
        assert self.residency.leased_row_cache(0)
        self.close_slot(0)
        size = self.geometry.rows_per_page
        for slot, pages in enumerate((5, 3, 1)):
            self.open(slot, 3 - slot, pages * size - 1, 1 if slot else size, False)
            self.prefill(slot, [PREFILL_ROWS] * 3)
        self.decode([2, -1], [(1, 0)])
        self.drop_all()
        for slot in SLOTS:
            self.residency.lease_row_cache(slot)
        self.decode([0, -1], [(2, 0)])
        self.close_slot(1)
        self.close_slot(2)
        self.drop_all()
        self.onload_hottest(4)
        self.close_slot(0)
        self.grow_beyond_promises()

    def grow_beyond_promises(self) -> None:
        """Two sequences that grow until one must give way, and comes back."""
        prompt = (self.geometry.num_pages // 2 - 1) * self.geometry.rows_per_page
        for slot in range(2):
            self.open(slot, 3 * slot, prompt, LENGTH - prompt, True, reserved=False)
            self.prefill(slot, [PREFILL_ROWS] * 4)
        while len(self.running) == 2:
            self.decode([0, 1], [(1, 1)])
        self.decode([0, -1], [(1, 0)] * 4)
        self.close_slot(0)
        self.open(1, 3, prompt + 2, 4, True, reserved=False)
        self.prefill(1, [PREFILL_ROWS] * 4)
        self.decode([1, -1], [(1, 0)] * 4)
        self.close_slot(1)

    def drop_all(self) -> None:
        """Leaves on the device only what must lie there."""
        for page in self.residency.states.pages_in(PageState.DIRTY).tolist():
            if self.residency.states.num_free_host:
                self.residency.offload(page)
        for page in self.residency.states.pages_in(PageState.CLEAN).tolist():
            if self.residency.states.is_droppable(page):
                self.residency.drop(page)

    def teardown(self) -> None:
        for arriving in self.arriving:
            arriving.transfer.abort()
        for slot in list(self.running):
            self.cache.close(slot)
        self.check_store()
        while self.cache.index.evict(self.cache.tick()):
            pass
        self.residency.release_staging()
        self.check_store()
        assert not self.contents and self.cache.pool.num_free == self.geometry.num_pages
        assert self.residency.states.num_free_device == self.geometry.device_pages
        assert self.residency.states.num_free_host == self.geometry.host_pages
        self.counts["onloaded"] += self.residency.pages_onloaded
        self.counts["leases revoked"] += self.residency.leases_revoked


def make_histories(
    row_kind: RowKind, num_devices: int, params: nnx.State | None = None
) -> type[Histories]:
    params = preset_params(micro_config(), num_devices) if params is None else params
    attributes = {
        "row_kind": row_kind,
        "num_devices": num_devices,
        "params": params,
        "expected": Expected.compute(micro_config(), params, streams(), row_kind, num_devices),
        "counts": Counter(),
    }
    # Histories are drawn by the name.
    return type(f"Histories_{row_kind}_{num_devices}", (Histories,), attributes)
