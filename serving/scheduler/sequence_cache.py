"""Interface of the cache to the scheduler."""

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from kvcache.counters import CacheCounters


@runtime_checkable
class SequenceCache(Protocol):
    """Sequences in numbered slots and their pages: `kvcache.KVCache`, or a simulation of one."""

    def open(
        self,
        slot: int,
        token_ids: Sequence[int],
        reserved_tokens: int,
        *,
        use_prefix: bool = True,
        spare_pages: int = 0,
    ) -> int:
        """Starts a sequence in a free slot, with pages reserved for `reserved_tokens` tokens.

        Args:
            slot: the slot.
            token_ids: its tokens.
            reserved_tokens: as many or more.
            use_prefix: cached rows may stand for computed ones.
            spare_pages: pages to leave for those that run.

        Returns:
            Leading tokens whose rows are there, at most all but the last.

        Raises:
            OutOfPagesError: it does not fit beside what runs, and will not before as many pages
                come free as it says. Nothing has changed.
        """
        ...

    def num_cached(self, token_ids: Sequence[int]) -> int:
        """Tokens that `open` would find now."""
        ...

    def can_prepare(self, rows: Mapping[int, int]) -> bool:
        """Whether a step that appends these rows, by slot, finds its pages."""
        ...

    def prepare(self, rows: Mapping[int, int], *, staging: bool = False) -> None:
        """Readies pages and device for a step that appends these rows, by slot.

        Args:
            rows: how many rows it appends, by slot.
            staging: whether it is a prefill.

        Raises:
            OutOfPagesError: the pages cannot be had.
        """
        ...

    def advance(
        self, slot: int, token_ids: Sequence[int], *, prompt_complete: bool = False
    ) -> None:
        """Notes the tokens of the next rows, for which it is prepared."""
        ...

    def reserved_pages(self, slot: int) -> int:
        """Pages of a sequence and those still reserved for it: at most so many come free when it
        ends."""
        ...

    def length(self, slot: int) -> int:
        """Rows passed to `advance`, and those that `open` found."""
        ...

    def close(self, slot: int, *, preempted: bool = False) -> CacheCounters:
        """Ends a sequence; its rows may serve others, or itself if it is preempted."""
        ...
