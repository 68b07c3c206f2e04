"""Exact bookkeeping of pages and cached prefixes, as simple as can be."""

import dataclasses
from collections.abc import Mapping, Sequence

from kvcache import CacheCounters, OutOfPagesError
from serving.scheduler import SequenceCache

Prefix = tuple[int, ...]


@dataclasses.dataclass
class FakeSequence:
    """Tokens of a slot; the cached prefixes whose pages it shares, and how many others it has."""

    tokens: list[int]
    reserved_pages: int
    shared: list[Prefix]
    own_pages: int = 0

    @property
    def num_pages(self) -> int:
        return len(self.shared) + self.own_pages

    @property
    def outstanding(self) -> int:
        return max(self.reserved_pages - self.num_pages, 0)


class FakeCache(SequenceCache):
    """Full pages are cached by all tokens up to their end; the last used go last, ends first."""

    def __init__(self, num_pages: int, rows_per_page: int = 4) -> None:
        self.num_pages, self.rows_per_page = num_pages, rows_per_page
        self.running: dict[int, FakeSequence] = {}
        self.cached: dict[Prefix, int] = {}  # references, the least recently used first
        self.num_looked_up = self.num_tried = 0

    @property
    def num_free(self) -> int:
        own = sum(sequence.own_pages for sequence in self.running.values())
        return self.num_pages - len(self.cached) - own

    def room(self, kept: Sequence[Prefix] = ()) -> int:
        unused = sum(count == 0 for key, count in self.cached.items() if key not in kept)
        reserved = sum(sequence.outstanding for sequence in self.running.values())
        return self.num_free + unused - reserved

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.rows_per_page)

    def num_cached(self, token_ids: Sequence[int]) -> int:
        self.num_looked_up += 1
        return len(self._find(token_ids)) * self.rows_per_page

    def open(
        self,
        slot: int,
        token_ids: Sequence[int],
        reserved_tokens: int,
        *,
        use_prefix: bool = True,
        spare_pages: int = 0,
    ) -> int:
        assert slot not in self.running, f"slot {slot} is opened twice"
        self.num_tried += 1
        shared = self._find(token_ids) if use_prefix else []
        reserved_pages = self.pages_for(reserved_tokens)
        missing = reserved_pages - len(shared) + spare_pages - self.room(shared)
        if missing > 0:
            raise OutOfPagesError(f"{reserved_pages} pages wanted", missing)
        for prefix in shared:
            self.cached[prefix] = self.cached.pop(prefix) + 1
        found = len(shared) * self.rows_per_page
        self.running[slot] = FakeSequence(list(token_ids[:found]), reserved_pages, shared)
        return found

    def can_prepare(self, rows: Mapping[int, int]) -> bool:
        beyond = 0
        for slot, count in rows.items():
            sequence = self.running[slot]
            pages = self.pages_for(len(sequence.tokens) + count)
            beyond += max(pages - max(sequence.num_pages, sequence.reserved_pages), 0)
        return beyond <= self.room()

    def prepare(self, rows: Mapping[int, int], *, staging: bool = False) -> None:
        for slot, count in rows.items():
            sequence = self.running[slot]
            new = self.pages_for(len(sequence.tokens) + count) - sequence.num_pages
            while new > self.num_free:
                self._evict()
            sequence.own_pages += max(new, 0)

    def advance(
        self, slot: int, token_ids: Sequence[int], *, prompt_complete: bool = False
    ) -> None:
        sequence = self.running[slot]
        sequence.tokens += token_ids
        assert self.pages_for(len(sequence.tokens)) <= sequence.num_pages, "rows without pages"
        for page in range(len(sequence.shared), len(sequence.tokens) // self.rows_per_page):
            prefix = tuple(sequence.tokens[: (page + 1) * self.rows_per_page])
            if prefix in self.cached or len(sequence.shared) < page:
                return  # Another's page is cached for it, or for one before it.
            self.cached[prefix] = 1
            sequence.shared.append(prefix)
            sequence.own_pages -= 1

    def reserved_pages(self, slot: int) -> int:
        return self.running[slot].num_pages + self.running[slot].outstanding

    def length(self, slot: int) -> int:
        return len(self.running[slot].tokens)

    def close(self, slot: int, *, preempted: bool = False) -> CacheCounters:
        sequence = self.running.pop(slot)
        for prefix in sequence.shared:
            self.cached[prefix] = self.cached.pop(prefix) - 1
        return CacheCounters(cached_tokens=1, resident_reads=1)

    def check_integrity(self) -> None:
        held = [prefix for sequence in self.running.values() for prefix in sequence.shared]
        for prefix, count in self.cached.items():
            assert count == held.count(prefix), f"{count} references to {prefix}"
        assert self.num_free >= 0 and self.room() >= 0, "more pages reserved than there are"

    def _find(self, token_ids: Sequence[int]) -> list[Prefix]:
        found = []
        for end in range(self.rows_per_page, len(token_ids), self.rows_per_page):
            prefix = tuple(token_ids[:end])
            if prefix not in self.cached:
                break
            found.append(prefix)
        return found

    def _evict(self) -> None:
        unused = [prefix for prefix, count in self.cached.items() if not count]
        parents = {prefix[: -self.rows_per_page] for prefix in self.cached}
        del self.cached[next(prefix for prefix in unused if prefix not in parents)]
