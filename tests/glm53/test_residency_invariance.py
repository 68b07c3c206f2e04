"""Where a row lies changes no bit of an answer.

Random histories of sequences that share prefixes, with pages moved between the tiers at will, in a
store that holds a fraction of them on the device: each step's logits and selections, and every
stored row, are those of one whole prefill in a store that never moves a page.
"""

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from glm53.config import GLMConfig
from glm53.presets import preset
from kvcache import KVGeometry, OutOfPagesError
from kvcache.page_states import PageState
from pallas_kernels.row_format import RowKind
from tests.cached_session import CachedSession, StoredRows, as_bytes
from tests.support import Session, preset_params, random_tokens

LENGTH = 80
SLOTS = range(3)
PREFILL_ROWS, DECODE_ROWS = 16, 6
STREAMS = range(4)
FORKS = (LENGTH, 21, 24, 0)
"""Tokens that each stream has in common with the first: all, part of a page more, whole pages."""


@functools.cache
def micro_config() -> GLMConfig:
    """Two index groups of two layers, which are scanned, and ten selected positions."""
    return preset("test-small").replace(
        compute_dtype="float32",
        num_hidden_layers=4,
        indexer_types=("full", "shared") * 2,
        mlp_layer_types=("dense", "sparse") * 2,
        num_nextn_predict_layers=0,
        n_routed_experts=4,
        index_topk=10,
    )


@functools.cache
def streams() -> list[np.ndarray]:
    """The tokens of each stream."""
    first, *others = (random_tokens(micro_config(), LENGTH, seed) for seed in STREAMS)
    forks = zip(others, FORKS[1:], strict=True)
    return [first, *(np.concatenate([first[:fork], other[fork:]]) for other, fork in forks)]


def page_rows(geometry: KVGeometry, count: int) -> np.ndarray:
    """Where the first positions lie on their pages."""
    return np.array([geometry.page_row(position) for position in range(count)])


def without_index_weights(params: nnx.State) -> nnx.State:
    """The parameters with index weights that make all scores equal."""
    return params


@dataclasses.dataclass(frozen=True)
class Expected:
    """What each position of a stream gives, from one prefill with all pages on the device.

    Attributes:
        logits: bytes [streams, positions, ...].
        selected: [streams, layers, positions, index_topk].
        rows: bytes [streams, positions, layers, ...].
        keys: bytes [streams, positions, index_layers, ...].
    """

    logits: np.ndarray
    selected: np.ndarray
    rows: np.ndarray
    keys: np.ndarray

    @classmethod
    def compute(cls, params: nnx.State, row_kind: RowKind, num_devices: int) -> "Expected":
        session = Session(
            micro_config(),
            params,
            num_devices=num_devices,
            row_kind=row_kind,
            rows_per_device=4,
            max_model_len=LENGTH,
            max_sequences=len(STREAMS),
        )
        logits, selected = [], []
        for stream, tokens in enumerate(streams()):
            session.open(stream, LENGTH)
            output = session.append({stream: tokens}, trace=True)
            assert output.trace is not None
            logits.append(as_bytes(output.logits)[0])
            selected.append(np.array(output.trace.selected))
        positions = np.arange(LENGTH)
        geometry, store = session.geometry, session.store
        pages = np.array(session.sequences.block_table)[:, positions // geometry.rows_per_page]
        places, rows = np.array(store.device_page)[pages], page_rows(geometry, LENGTH)
        return cls(
            np.stack(logits),
            np.stack(selected),
            np.moveaxis(as_bytes(store.slab)[:, places, rows], 0, 2),
            np.moveaxis(as_bytes(store.index_keys)[:, pages, rows], 0, 2),
        )


@dataclasses.dataclass
class Running:
    """A sequence in a slot: `done` of the first `total` tokens of a stream, `prompt` its prompt."""

    stream: int
    prompt: int
    total: int
    done: int


class Histories(RuleBasedStateMachine):
    """Sequences open, grow and close in a small store while pages move between the tiers.

    Attributes:
        row_kind, num_devices, device_pages, host_pages: the store.
        params: the model's parameters.
        expected: what steps must give.
        counts: what happened in all histories.
    """

    row_kind: RowKind
    num_devices: int
    device_pages: int
    host_pages: int
    params: nnx.State
    expected: Expected
    counts: Counter[str]

    def __init__(self) -> None:
        super().__init__()
        self.session = CachedSession(
            micro_config(),
            self.params,
            num_devices=self.num_devices,
            most_step_rows=PREFILL_ROWS,
            row_kind=self.row_kind,
            rows_per_device=4,
            device_pages=self.device_pages,
            host_pages=self.host_pages,
            hot_rows=3,
            staging_pages=1,
            max_sequences=len(SLOTS),
            max_model_len=LENGTH,
        )
        self.cache, self.residency = self.session.cache, self.session.cache.residency
        self.geometry = self.session.geometry
        self.running: dict[int, Running] = {}
        # Of each page that holds rows: a stream, the first position, and how many rows.
        self.contents: dict[int, tuple[int, int, int]] = {}

    @precondition(lambda self: len(self.running) < len(SLOTS))
    @rule(
        data=st.data(),
        stream=st.sampled_from(STREAMS),
        prompt=st.integers(1, LENGTH - 1),
        use_prefix=st.sampled_from([True, True, True, False]),
    )
    def open(self, data: st.DataObject, stream: int, prompt: int, use_prefix: bool) -> None:
        slot = data.draw(st.sampled_from([slot for slot in SLOTS if slot not in self.running]))
        total = data.draw(st.integers(prompt, LENGTH))
        tokens, before = streams()[stream][:prompt].tolist(), self.account()
        try:
            done = self.cache.open(slot, tokens, total, use_prefix=use_prefix)
        except OutOfPagesError:
            assert self.account() == before
            self.counts["refused"] += 1
            return
        self.counts["prefix hits"] += done > 0
        self.counts["partial hits"] += done % self.geometry.rows_per_page > 0
        self.running[slot] = Running(stream, prompt, total, done)
        self.note_contents(slot)

    def account(self) -> tuple:
        """Everything that a refused sequence must leave as it is."""
        pool, residency = self.cache.pool, self.residency
        pages = [
            (
                pool.references(page),
                pool.is_cached(page),
                residency.state(page),
                residency.device_place(page),
                residency.host_place(page),
            )
            for page in range(self.geometry.num_pages)
        ]
        leases = [residency.hot_places(slot) for slot in SLOTS]
        return pages, leases, residency.staging_places, self.cache.index.num_cached

    def note_contents(self, slot: int) -> None:
        run, size = self.running[slot], self.geometry.rows_per_page
        for index, page in enumerate(self.cache.pages_of(slot)):
            start = index * size
            self.contents[page] = (run.stream, start, min(size, run.done - start))

    @property
    def in_prompt(self) -> list[int]:
        return [slot for slot, run in self.running.items() if run.done < run.prompt]

    @property
    def in_output(self) -> list[int]:
        return [slot for slot, run in self.running.items() if run.prompt <= run.done < run.total]

    @precondition(lambda self: self.in_prompt)
    @rule(data=st.data(), count=st.integers(1, PREFILL_ROWS))
    def prefill(self, data: st.DataObject, count: int) -> None:
        slot = data.draw(st.sampled_from(self.in_prompt))
        run = self.running[slot]
        self.step({slot: min(count, run.prompt - run.done)}, [slot], PREFILL_ROWS)

    @precondition(lambda self: self.in_prompt)
    @rule(data=st.data())
    def prefill_rest(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(self.in_prompt))
        run = self.running[slot]
        while run.done < run.prompt:
            count = min(PREFILL_ROWS, run.prompt - run.done)
            if not self.step({slot: count}, [slot], PREFILL_ROWS):
                return

    @precondition(lambda self: self.in_output)
    @rule(
        data=st.data(),
        counts=st.lists(st.integers(1, DECODE_ROWS), min_size=1, max_size=2),
        repeats=st.integers(1, 3),
    )
    def decode(self, data: st.DataObject, counts: list[int], repeats: int) -> None:
        for _ in range(repeats):
            slots = data.draw(st.permutations(self.in_output))[: len(counts)]
            left = {slot: self.running[slot].total - self.running[slot].done for slot in slots}
            rows = {
                slot: min(count, left[slot])
                for slot, count in zip(slots, counts, strict=False)
            }
            if not rows:
                return
            groups = data.draw(st.permutations([*rows, -1])) if len(rows) == 1 else list(rows)
            if not self.step(rows, groups, DECODE_ROWS):
                # As serving decodes without drafts: must always do.
                assert self.step(dict.fromkeys(rows, 1), groups, DECODE_ROWS)

    def fits(self, rows: dict[int, int]) -> bool:
        """Whether the pages that must lie on the device during a step have places there."""
        pages = range(self.geometry.num_pages)
        on_device = (PageState.TAIL, PageState.DIRTY, PageState.CLEAN)
        stuck = [
            page
            for page in pages
            if self.residency.state(page) in on_device and not self.residency.is_droppable(page)
        ]
        new = 0
        for slot, count in rows.items():
            needed = self.geometry.pages_for(self.running[slot].done + count)
            new += needed - len(self.cache.pages_of(slot))
        return len(stuck) + new <= self.geometry.device_pages

    def step(self, rows: dict[int, int], groups: list[int], most_rows: int) -> bool:
        """One step, and all checks after it; False without a step if there is no room for it."""
        if max(rows.values()) > 1 and not self.fits(rows):
            self.counts["no room"] += 1
            return False
        tokens = {
            slot: streams()[self.running[slot].stream][self.running[slot].done :][:count]
            for slot, count in rows.items()
        }
        is_prefill = most_rows == PREFILL_ROWS
        complete = is_prefill and all(
            self.running[slot].done + count == self.running[slot].prompt
            for slot, count in rows.items()
        )
        output = self.session.append(
            tokens, rows=most_rows, slots=groups, staging=is_prefill, complete=complete, trace=True
        )
        assert output.trace is not None
        logits, selected = as_bytes(output.logits), np.array(output.trace.selected)
        selected = selected.reshape(len(selected), *logits.shape[:2], -1)
        for slot, count in rows.items():
            run, group = self.running[slot], groups.index(slot)
            span = slice(run.done, run.done + count)
            where = f"stream {run.stream} from {run.done} in slot {slot}"
            np.testing.assert_array_equal(
                selected[:, group, :count], self.expected.selected[run.stream, :, span], where
            )
            np.testing.assert_array_equal(
                logits[group, :count], self.expected.logits[run.stream, span], where
            )
            run.done += count
            self.note_contents(slot)
        self.counts["steps"] += 1
        self.check_store()
        return True

    def check_store(self) -> None:
        """Every confirmed row has its bytes in each place it lies; unused pages lie nowhere."""
        self.cache.check_integrity()
        self.cache.moves.flush()
        stored, size = StoredRows.of(self.cache.store), self.geometry.rows_per_page
        for page in range(self.geometry.num_pages):
            device, host = stored.device_page[page], stored.host_page[page]
            if self.residency.state(page) is PageState.FREE:
                assert (device, host) == (-1, -1), f"page {page} is free"
                self.contents.pop(page, None)
                continue
            stream, start, count = self.contents[page]
            span = slice(start, start + count)
            in_page = page_rows(self.geometry, count)
            rows = self.expected.rows[stream, span]
            assert count <= size and max(device, host) >= 0
            np.testing.assert_array_equal(
                stored.keys[:, page, in_page].swapaxes(0, 1),
                self.expected.keys[stream, span],
                f"index keys of page {page}",
            )
            if device >= 0:
                found = stored.device[:, device, in_page].swapaxes(0, 1)
                np.testing.assert_array_equal(found, rows, f"page {page} at device place {device}")
            if host >= 0:
                found = stored.host[host, in_page]
                np.testing.assert_array_equal(found, rows, f"page {page} at host place {host}")
            self.counts["only on the host"] += device < 0
            self.counts["in both tiers"] += min(device, host) >= 0
            self.counts["three numbers"] += len({page, device, host}) == 3

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        """Ends a sequence, in the middle or where it was to end."""
        slot = data.draw(st.sampled_from(sorted(self.running)))
        del self.running[slot]
        self.cache.close(slot)

    @rule(data=st.data(), repeats=st.integers(1, 4))
    def change_residency(self, data: st.DataObject, repeats: int) -> None:
        """Does something to a page, or a lease, that can be done to it."""
        for _ in range(repeats):
            choices = [choice for choice in self.residency_changes() if choice[1]]
            if not choices:
                return
            action, targets = data.draw(st.sampled_from(choices))
            action(data.draw(st.sampled_from(targets)))

    def residency_changes(self) -> list[tuple[Callable[[int], object], list[int]]]:
        residency = self.residency
        pages = {state: sorted(residency.pages_in(state)) for state in PageState}
        clean, host = pages[PageState.CLEAN], pages[PageState.HOST]
        leased = [slot for slot in self.running if residency.hot_places(slot)]
        unleased = [slot for slot in self.running if not residency.hot_places(slot)]
        return [
            (residency.clean, pages[PageState.DIRTY] if residency.num_free_host else []),
            (residency.drop, [page for page in clean if residency.is_droppable(page)]),
            (residency.give_up_host, clean),
            (self.restore, host if residency.room else []),
            (residency.lease_hot, unleased),
            (residency.release_hot, leased),
        ]

    def restore(self, page: int) -> None:
        self.cache.pool.acquire(page)
        self.residency.restore(page)
        self.cache.pool.release(page)

    @rule()
    def lease_staging(self) -> None:
        self.residency.lease_staging()

    @rule()
    def release_staging(self) -> None:
        self.residency.release_staging()

    @rule(data=st.data(), limit=st.integers(1, 4))
    def promote(self, data: st.DataObject, limit: int) -> None:
        size = self.geometry.num_pages
        heat = data.draw(st.lists(st.integers(0, 3), min_size=size, max_size=size))
        self.residency.update_heat(np.array(heat, np.float32))
        self.counts["promoted"] += self.residency.promote(limit)

    @rule()
    def evict(self) -> None:
        self.counts["evicted"] += self.cache.index.evict(self.cache.tick())

    def teardown(self) -> None:
        for slot in list(self.running):
            self.cache.close(slot)
        self.check_store()
        while self.cache.index.evict(self.cache.tick()):
            pass
        self.check_store()
        assert not self.contents and self.cache.pool.num_free == self.geometry.num_pages
        assert self.residency.num_free_device == self.device_pages - len(
            self.residency.staging_places
        )
        assert self.residency.num_free_host == self.host_pages
        for name in ("resident_reads", "hot_reads", "staged_reads", "host_reads"):
            self.counts[name] += getattr(self.cache.total, name)


def run_histories(row_kind: RowKind, num_devices: int, params: nnx.State, examples: int) -> Counter:
    pages = (8, 12) if num_devices == 1 else (8, 9)

    class Machine(Histories):
        pass

    Machine.row_kind, Machine.num_devices, Machine.params = row_kind, num_devices, params
    Machine.device_pages, Machine.host_pages = pages
    Machine.expected = Expected.compute(params, row_kind, num_devices)
    Machine.counts = Counter()
    run_state_machine_as_test(
        Machine, settings=settings(max_examples=examples, stateful_step_count=40)
    )
    return Machine.counts


@pytest.mark.parametrize(
    ("row_kind", "num_devices"), [("float32", 1), ("float32", 2), ("bfloat16", 1), ("fp8", 2)]
)
def test_residency_changes_no_bit(row_kind: RowKind, num_devices: int) -> None:
    """A stale or misplaced row, an order that depends on the tier, a page mapped too late."""
    params = preset_params(micro_config(), num_devices)
    counts = run_histories(row_kind, num_devices, params, 10)
    print(counts)
