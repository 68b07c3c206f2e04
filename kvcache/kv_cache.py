"""Cache of running sequences: bookkeeping of their pages that keeps a device in step with it."""

from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Int, Int64

from kvcache.admission import Admission
from kvcache.counters import CacheCounters, ReadCounts
from kvcache.device.interface import CacheDevice
from kvcache.device.page_moves import PageMoves
from kvcache.device_tables import DeviceTables
from kvcache.geometry import KVGeometry
from kvcache.page_pool import OutOfPagesError, PagePool
from kvcache.pins import Pins
from kvcache.prefix.index import PrefixIndex, PrefixMatch
from kvcache.running_sequences import RunningSequences, SequencePages
from kvcache.tiers.free_list import FreeList
from kvcache.tiers.offload_policy import OffloadPolicy
from kvcache.tiers.page_states import PageState
from kvcache.tiers.residency import Residency

_MOVES_A_LAUNCH = 16


class KVCache[DeviceT: CacheDevice]:
    """Sequences in numbered slots, their pages, and where those lie.

    Some pages are reserved when a sequence opens, and are there when it needs them. It may grow
    beyond them as long as `can_prepare` says so.

    Args:
        geometry: sizes of the store.
        device: what executes the changes.
        max_step_rows: most rows of one sequence in a step.
        with_hidden: the steps continue from the hidden state of a sequence's last token, which is
            not cached: of a prompt that is cached, that token is computed again.

    Attributes:
        geometry: sizes of the store.
        device: what executes the changes.
        pool: reference counts of pages.
        residency: where pages lie.
        index: pages by the tokens they hold.
        total: counters of everything that has closed.
    """

    def __init__(
        self,
        geometry: KVGeometry,
        device: DeviceT,
        *,
        max_step_rows: int,
        with_hidden: bool = False,
    ) -> None:
        self.geometry = geometry
        self.device = device
        self.total = CacheCounters()
        self._with_hidden = with_hidden
        self._tables = DeviceTables(geometry, device)
        self.moves = PageMoves(device.move, _MOVES_A_LAUNCH)
        self.pool = PagePool(geometry.num_pages, lambda page: self.residency.forget(page))
        self.index = PrefixIndex(geometry.rows_per_page, self.pool)
        self.residency = Residency(
            # From the last on, while page ids are taken from the first on: an id that is used as an
            # index by mistake is seldom the right one.
            free_device=FreeList(range(geometry.device_pages)),
            free_host=FreeList(range(geometry.host_pages)),
            max_sequences=geometry.max_sequences,
            row_cache_pages=geometry.row_cache_pages,
            staging_pages=geometry.staging_pages,
            moves=self.moves,
            referenced=lambda: self.pool.referenced,
            evict=lambda: self.index.evict(self._clock),
            on_change=self._on_change,
            on_lease=self._tables.set_lease,
            on_revoke=lambda slot: self._policy.note_revoked(slot),
        )
        self._running = RunningSequences(geometry)
        self._admission = Admission(
            geometry, self.pool, self.residency.states, self._running, max_step_rows
        )
        self._policy = OffloadPolicy(geometry, device, self.residency, self.pool)
        self._pins = Pins(geometry, self.residency)
        self._reads = ReadCounts(geometry.max_sequences)
        self._held: set[int] = set()  # pages that are filled from elsewhere
        self._clock = 0

    def pages_of(self, slot: int) -> tuple[int, ...]:
        """Pages of the sequence in a slot, in order."""
        return tuple(self._running[slot].pages)

    def num_pages(self, slot: int) -> int:
        """Pages of the sequence in a slot."""
        return len(self._running[slot].pages)

    def reserved_pages(self, slot: int) -> int:
        """Pages of the sequence in a slot and those still reserved for it: at most so many come
        free when it ends."""
        return max(len(self._running[slot].pages), self._running[slot].reserved_pages)

    def length(self, slot: int) -> int:
        """Tokens of the sequence in a slot whose rows are computed."""
        return self._running.length(slot)

    def has_row_cache(self, slot: int) -> bool:
        """Whether the device has a row cache for the sequence in a slot."""
        leased = self.residency.leased_row_cache(slot)
        return bool(leased) and not self._tables.is_queued(slot)

    def num_cached(self, token_ids: Sequence[int]) -> int:
        """Tokens of a prompt, less its last, that are cached now."""
        return self.index.match(token_ids, len(token_ids) - 1).num_tokens

    def open(
        self,
        slot: int,
        token_ids: Sequence[int],
        reserved_tokens: int,
        *,
        use_prefix: bool = True,
        spare_pages: int = 0,
    ) -> int:
        """Starts a sequence in a free slot.

        Args:
            slot: the slot.
            token_ids: its prompt.
            reserved_tokens: tokens to reserve pages for, at least its prompt.
            use_prefix: continue cached pages that hold the beginning of the prompt, and cache the
                sequence's own.
            spare_pages: pages to leave for those that run.

        Returns:
            Tokens of the prompt whose rows were found and are not computed again, at most all but
            the last.

        Raises:
            OutOfPagesError: too few pages, or pages of the device, are free. Nothing has changed.
        """
        reserved_pages = self.geometry.pages_for(reserved_tokens)
        if use_prefix:
            found = self._find(token_ids, reserved_pages, spare_pages)
        else:
            found = PrefixMatch()
            self._admission.check(len(token_ids), reserved_pages, found, spare_pages)
        self.tick()
        publication = self.index.acquire(found, self._clock)
        rows_per_page = self.geometry.rows_per_page
        num_full = found.num_tokens // rows_per_page * rows_per_page
        known = token_ids[:num_full]
        sequence = SequencePages(
            known if isinstance(known, list) else list(known),
            list(found.pages),
            reserved_pages,
            publication if use_prefix else None,
            [],
            CacheCounters(cached_tokens=found.num_tokens),
        )
        self._running.open(slot, sequence, token_ids[num_full : found.num_tokens])
        self._admission.reserve(sequence)
        self._tables.assign(slot, found.pages, found.num_tokens)
        if found.partial is not None:
            self.pool.acquire(found.partial[0])
        if self.geometry.has_host_tier:
            self._pins.bring_back(sequence)
        if found.partial is not None:
            source, _ = found.partial
            (page,) = self._allocate(1)
            self.residency.copy_of(source, page)
            self.pool.release(source)
            self._add_page(slot, page)
        if any(self.residency.states.state(page) is PageState.HOST for page in found.pages):
            self._policy.note_spilled((slot,))
        return found.num_tokens

    def can_prepare(self, rows: Mapping[int, int]) -> bool:
        """Whether there are pages, and pages of the device, for a step that appends rows by slot.

        There always are for rows within what was reserved, as long as one sequence runs alone.
        """
        missing = self._running.missing_pages(rows)
        return self._admission.can_grow((self._running[slot], count) for slot, count in missing)

    def prepare(self, rows: Mapping[int, int], *, staging: bool = False) -> None:
        """Makes the device ready for a step.

        Args:
            rows: how many rows the step appends, by slot.
            staging: whether the step is a prefill, which stages pages rather than rows.

        Raises:
            OutOfPagesError: `can_prepare` would have said no.
        """
        for slot, missing in self._running.missing_pages(rows):
            for page in self._allocate(missing):
                self.residency.start(page)
                self._add_page(slot, page)
        if self.geometry.has_host_tier:
            self._policy.before_step(rows.keys(), self._running.slots, staging=staging)
            self._tables.launch_leases(self.residency.staged_pages)
        self.moves.flush()
        self._tables.launch_pages()

    def advance(
        self, slot: int, token_ids: Sequence[int], *, prompt_complete: bool = False
    ) -> None:
        """Notes that a step computes the rows of these tokens.

        Args:
            slot: the slot.
            token_ids: the tokens.
            prompt_complete: others may continue from here, in the middle of a page.
        """
        if not self._running.append(slot, token_ids) and not prompt_complete:
            return
        sequence = self._running[slot]
        filled = self._running.fill_pages(slot)
        for page in filled:
            self.residency.seal(page)
        if filled and self.geometry.has_host_tier:
            self._pins.keep(sequence, filled)
        self._publish(slot, sequence, partial=prompt_complete)

    def close(self, slot: int, *, preempted: bool = False) -> CacheCounters:
        """Ends a sequence; its pages stay as cached prefix as long as there is room for them.

        Args:
            slot: the slot.
            preempted: the sequence comes back as soon as there is room for it.

        Returns:
            What was counted for it here: its reads come with its launches (`note_reads`).
        """
        sequence = self._running[slot]
        self._admission.release(sequence)
        self.tick()
        self._pins.release(sequence)
        self._publish(slot, sequence, partial=True)
        self._running.close(slot)
        states = self.residency.states
        for page in sequence.pages[len(sequence.token_ids) // self.geometry.rows_per_page :]:
            if states.state(page) is PageState.TAIL and self.pool.is_cached(page):
                self.residency.seal(page)
        self._tables.forget(slot)
        self.index.release(sequence.pages, self._clock, due=self._clock if preempted else None)
        if self.geometry.has_host_tier:
            self._policy.close(slot, sequence.pages)
        self.total += sequence.counters
        return sequence.counters

    def note_reads(
        self,
        slots: Int[np.ndarray, " sequences"],
        reads: Int[np.ndarray, "sequences reads_by_device"],
    ) -> Int64[np.ndarray, "sequences reads"]:
        """Takes what a launch has counted for different slots, in the order of launches.

        Args:
            slots: the slots.
            reads: their `HostTier.reads` after the launch.

        Returns:
            How much each has read since the launch before; see `read_counters`.
        """
        new = self._reads.update(slots, reads)
        self.total += self.read_counters(new.sum(axis=0))
        return new

    def read_counters(self, reads: Int64[np.ndarray, " reads"]) -> CacheCounters:
        """Counters of reads that `note_reads` has returned."""
        return CacheCounters.of_reads(reads, self.geometry.row_format.row_bytes)

    def warm_up(self) -> None:
        """Launches everything once that steps may need, with padding, to compile it.

        Nothing changes, but that counts of selections are halved.
        """
        self._tables.warm_up()
        self.moves.launch()
        if self.geometry.reads_host:
            self.device.decay()

    def drop_cached(self) -> bool:
        """Drops the cached pages that no sequence uses.

        Returns:
            Whether nothing is cached any more.
        """
        while self.index.evict(self._clock):
            pass
        return not self.index.num_cached

    def tick(self) -> int:
        """The next time of the logical clock by which prefixes age."""
        self._clock += 1
        return self._clock

    def hold_pages(self, count: int) -> list[int]:
        """Takes pages for rows that come from elsewhere than a step.

        Raises:
            OutOfPagesError: too few are free or can be evicted.
        """
        self._admission.check_pages(count)
        pages = self._allocate(count)
        self._held.update(pages)
        return pages

    def release_held(self, pages: Sequence[int], *, due: int | None) -> None:
        """Ends `hold_pages`; pages that the prefix index knows stay, expected in use at `due`."""
        self._held.difference_update(pages)
        self.index.release(pages, self._clock, due=due)

    def check_integrity(self) -> None:
        """Proves that every page is in one state, and every count right.

        Raises:
            AssertionError: naming what is not.
        """
        self.pool.check_integrity()
        self.index.check_integrity()
        self.residency.check_integrity()
        references = {}
        for page in range(self.geometry.num_pages):
            count = self.pool.references(page) - (page in self._held)
            assert count >= 0, f"page {page} is filled without a reference"
            if count:
                references[page] = count
            free = not (count or page in self._held or self.pool.is_cached(page))
            state = self.residency.states.state(page)
            unfilled = page in self._held and state is PageState.FREE
            assert unfilled or free == (state is PageState.FREE), f"page {page} is {state.name}"
        self._running.check_integrity(references)
        self._admission.check_integrity()

    def _allocate(self, count: int) -> list[int]:
        while self.pool.num_free < count:
            if not self.index.evict(self._clock):
                raise OutOfPagesError(f"{count} pages wanted, {self.pool.num_free} free")
        return self.pool.allocate(count)

    def _add_page(self, slot: int, page: int) -> None:
        sequence = self._running[slot]
        self._tables.add_page(slot, len(sequence.pages), page)
        self._admission.take_reserved(sequence)
        self._running.add_page(slot, page)

    def _publish(self, slot: int, sequence: SequencePages, *, partial: bool) -> None:
        if sequence.publication is None:
            return
        tokens, pages, rows = sequence.token_ids, sequence.pages, self.geometry.rows_per_page
        for index in range(sequence.publication.num_pages, len(tokens) // rows):
            self.index.publish(sequence.publication, tokens, pages, (index + 1) * rows, self._clock)
            if not self.pool.is_cached(pages[index]):
                # Pages after another's, which it does not hold, could not be evicted in order.
                self._adopt(slot, sequence, index)
        if partial:
            known = len(tokens)
            tokens += self._running.new_tokens(slot)
            self.index.publish(
                sequence.publication, tokens, pages, len(tokens), self._clock, partial=True
            )
            del tokens[known:]

    def _adopt(self, slot: int, sequence: SequencePages, index: int) -> None:
        """Has a sequence read the page that is cached with the same rows, and frees its own, in
        whose place that page comes back if it has left the device."""
        assert sequence.publication is not None
        page, own = sequence.publication.page(index), sequence.pages[index]
        self.index.adopt(sequence.publication, index)
        pinned = self._pins.drop(sequence, own)
        self._running.replace_page(slot, index, page)
        self._tables.add_page(slot, index, page)
        self.pool.release(own)
        if self.residency.states.state(page) is PageState.HOST:
            self.residency.onload(page)
        if pinned:
            self._pins.add(sequence, page)

    def _find(self, token_ids: Sequence[int], reserved_pages: int, spare_pages: int) -> PrefixMatch:
        """The cached prefix to continue, with a page to copy only if there is room for both.

        Raises:
            OutOfPagesError: there is no room for the sequence either way.
        """
        found = self.index.match(token_ids, len(token_ids) - 1)
        if self._with_hidden:
            found = found.cut_short(self.geometry.rows_per_page)
        try:
            self._admission.check(len(token_ids), reserved_pages, found, spare_pages)
        except OutOfPagesError:
            if found.partial is None:
                raise
            # The page that it would copy may be the one that it needs.
            whole = 0 if self._with_hidden else len(found.pages) * self.geometry.rows_per_page
            found = self.index.match(token_ids, whole)
            self._admission.check(len(token_ids), reserved_pages, found, spare_pages)
        return found

    def _on_change(self, page: int, old: PageState, new: PageState) -> None:
        slots = self._running.readers(page)
        if new is PageState.HOST:
            self._policy.note_spilled(slots)
        if old is PageState.DIRTY and new is PageState.CLEAN:
            counted = CacheCounters(offloaded_pages=1, offloaded_bytes=self.geometry.page_bytes)
            if slots:
                self._running[min(slots)].counters += counted
            else:
                self.total += counted
