"""Index of cached pages by the tokens they hold, which evicts those least needed.

Pages form a tree, each below the page that holds the tokens before its own; partly filled pages are
leaves. A full page's key, a hash of its parent's key and its own tokens, is what is remembered of
it once it is evicted. The index knows page ids only, not the tier of a page.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from kvcache.prefix.reuse_order import ReuseOrder
from kvcache.prefix.tree import (
    ROOT_KEY,
    EncodedTokens,
    Entry,
    chain_key,
    child_position,
    child_with,
    closest_child,
    encode_tokens,
)


@runtime_checkable
class CachingPool(Protocol):
    """Page pool, as far as the index uses it."""

    def acquire(self, page: int) -> None:
        """Takes a reference."""
        ...

    def release(self, page: int) -> None:
        """Drops a reference; the last one frees a page that is not cached."""
        ...

    def cache(self, page: int) -> None:
        """Keeps a page without references."""
        ...

    def uncache(self, page: int) -> None:
        """Ends `cache`; frees a page without references."""
        ...

    def references(self, page: int) -> int:
        """References to a page."""
        ...

    def is_cached(self, page: int) -> bool:
        """Whether `cache` keeps the page."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class PrefixMatch:
    """Cached pages that hold the beginning of a prompt.

    Attributes:
        pages: full pages, in order.
        partial: a page whose first rows follow them, and how many; a copy of it can be continued.
        num_tokens: tokens of both.
    """

    pages: tuple[int, ...] = ()
    partial: tuple[int, int] | None = None
    num_tokens: int = 0
    _entries: tuple[Entry, ...] = dataclasses.field(default=(), repr=False, compare=False)

    def cut_short(self, rows_per_page: int) -> "PrefixMatch":
        """The match less its last token, so that this one is computed again, on a copied page.

        Less one more where the last token starts a page, of which there would be nothing to copy.
        """
        num_tokens = max(self.num_tokens - 1, 0)
        if num_tokens % rows_per_page == 0:
            num_tokens = max(num_tokens - 1, 0)
        num_pages, rows = divmod(num_tokens, rows_per_page)
        if rows == 0:
            return PrefixMatch()
        entries = self._entries[: num_pages + 1]
        return PrefixMatch(self.pages[:num_pages], (entries[-1].page, rows), num_tokens, entries)


class Publication:
    """Progress of publishing a sequence's pages to the index. Made by `PrefixIndex.acquire`."""

    __slots__ = ("_entries", "_started")

    def __init__(self, entries: list[Entry], started: int) -> None:
        # Entries of the sequence's first pages. Some may be another's duplicates, which can go
        # while this sequence runs: last page first, so those that are gone are at the end.
        self._entries = entries
        self._started = started

    @property
    def num_pages(self) -> int:
        """Full pages that are known."""
        return len(self._entries)

    def page(self, index: int) -> int:
        """The page that is cached for the sequence's page of an index: its own or another's."""
        return self._entries[index].page


class PrefixIndex:
    """Cached pages by the tokens they and all pages before them hold.

    A lookup compares each page with the tokens. All costs per page are independent of the number
    of pages and conversations, but for binary searches in two sorted lists: of a page's children
    and of the leaves. An insertion there moves pointers, one memmove.

    References that `acquire` took and those of pages that `publish` saw must end by `release`.

    Args:
        rows_per_page: tokens of a full page.
        pool: counts references and keeps cached pages.
    """

    def __init__(self, rows_per_page: int, pool: CachingPool) -> None:
        self._rows = rows_per_page
        self._pool = pool
        self._root = Entry(-1, ROOT_KEY, b"", None)
        self._by_page: dict[int, Entry] = {}
        # Every leaf, but for those that sequences published or acquired and still hold.
        self._leaves: ReuseOrder[Entry] = ReuseOrder()

    @property
    def num_cached(self) -> int:
        """Pages in the index."""
        return len(self._by_page)

    def match(self, token_ids: Sequence[int], limit: int) -> PrefixMatch:
        """Finds the longest cached prefix of at most `limit` tokens; takes no reference.

        What of `EncodedTokens` has been looked at is not encoded again.

        Raises:
            ValueError: `limit` is negative.
        """
        if limit < 0:
            raise ValueError(f"limit must not be negative, got {limit}")
        limit = min(limit, len(token_ids))
        if not isinstance(token_ids, EncodedTokens):
            token_ids = EncodedTokens(token_ids)
        parent, entries, num_tokens = self._root, [], 0
        while num_tokens + self._rows <= limit:
            entry = child_with(parent, token_ids.encoded(num_tokens, num_tokens + self._rows))
            if entry is None:
                break
            entries.append(entry)
            parent, num_tokens = entry, num_tokens + self._rows
        pages = tuple(entry.page for entry in entries)
        rest = token_ids.encoded(num_tokens, min(num_tokens + self._rows, limit))
        child, rows = closest_child(parent, rest)
        if child is None:
            return PrefixMatch(pages, None, num_tokens, tuple(entries))
        return PrefixMatch(pages, (child.page, rows), num_tokens + rows, (*entries, child))

    def acquire(self, match: PrefixMatch, now: int) -> Publication:
        """Takes a reference to each full page of a match; the partial one only counts as used.

        Returns:
            Where the sequence's publication starts.

        Raises:
            ValueError: a page was evicted since the match; nothing is taken.
        """
        entries = match._entries
        pages = match.pages if match.partial is None else (*match.pages, match.partial[0])
        for page, entry in zip(pages, entries, strict=True):
            if entry.page != page:
                raise ValueError(f"page {page} was evicted since the match; match again")
        used = list(entries)
        if match.partial is not None and 2 * match.partial[1] < len(used[-1].tokens) // 4:
            used.pop()  # Few shared tokens are no return to the conversation that wrote them.
        # A shared beginning is used far more often than any one conversation comes back.
        if used and len(used[-1].children) <= 1:
            self._leaves.learn_prior(used[-1], now)
        for page, entry in zip(match.pages, entries, strict=False):
            self._pool.acquire(page)
            self._leaves.discard(entry)
            self._leaves.reuse(entry, now)
        for entry in used[len(match.pages) :]:
            ranked = entry.rank is not None
            self._leaves.discard(entry)
            self._leaves.reuse(entry, now)
            if ranked:
                self._leaves.add(entry)
        return Publication(list(entries[: len(match.pages)]), now)

    def publish(
        self,
        publication: Publication,
        token_ids: Sequence[int],
        pages: Sequence[int],
        num_rows: int,
        now: int,
        *,
        partial: bool = False,
    ) -> None:
        """Caches a sequence's pages whose rows are confirmed, as far as they are new.

        A page whose tokens and prefix are cached under another id is left alone.

        Args:
            publication: the sequence's own; advanced.
            token_ids: its tokens from the first, at least `num_rows`.
            pages: its pages in order, which it holds.
            num_rows: confirmed rows, never fewer than before.
            now: clock.
            partial: also caches the last page if partly filled, in place of its earlier rows.

        Raises:
            ValueError: `num_rows` is beyond the tokens or pages or fewer than before, or a page is
                cached for other tokens.
        """
        entries = publication._entries
        if num_rows > min(len(token_ids), len(pages) * self._rows):
            raise ValueError(
                f"num_rows {num_rows} exceeds {len(token_ids)} token_ids or {len(pages)} pages"
            )
        if num_rows < len(entries) * self._rows:
            raise ValueError(f"num_rows {num_rows} is less than the {len(entries)} pages published")
        while entries and entries[-1].page < 0:
            entries.pop()
        num_full = num_rows // self._rows
        for index in range(len(entries), num_full):
            parent = entries[-1] if entries else self._root
            tokens = encode_tokens(token_ids[index * self._rows : (index + 1) * self._rows])
            entry = child_with(parent, tokens)
            if entry is None:
                key = chain_key(parent.key, tokens)
                entry = self._insert(pages[index], key, tokens, parent, publication._started, now)
            entries.append(entry)
        tokens = encode_tokens(token_ids[num_full * self._rows : num_rows])
        if partial and tokens:
            parent = entries[-1] if entries else self._root
            self._insert_partial(pages[num_full], tokens, parent, publication._started, now)

    def adopt(self, publication: Publication, index: int) -> None:
        """Takes a reference to the page that is cached for a sequence's page of an index."""
        entry = publication._entries[index]
        self._pool.acquire(entry.page)
        self._leaves.discard(entry)

    def release(self, pages: Sequence[int], now: int, *, due: int | None = None) -> None:
        """Ends a sequence's references to its pages, last page first.

        Args:
            pages: its pages in order, published or not.
            now: clock.
            due: clock of the next use where it is known, as for a preempted sequence.

        Raises:
            ValueError: a page is not referenced or named twice; nothing is released.
        """
        if len(set(pages)) != len(pages):
            raise ValueError(f"pages named twice: {list(pages)}")
        wrong = [page for page in pages if self._pool.references(page) < 1]
        if wrong:
            raise ValueError(f"pages not referenced: {wrong}")
        for page in reversed(pages):
            entry = self._by_page.get(page)
            if entry is not None:
                self._leaves.discard(entry)
                self._leaves.predict(entry, now)
                if due is not None:
                    entry.last_use, entry.due = None, float(due)
                if not entry.children:
                    self._leaves.add(entry)
            self._pool.release(page)

    def evict(self, now: int) -> bool:
        """Evicts the unreferenced leaf whose next use is predicted furthest away.

        Looks at two leaves, and at one more for each referenced one that it passes.

        Returns:
            Whether there was one; its page is then free.
        """
        for entry in self._leaves.furthest_first(now):
            if self._pool.references(entry.page) == 0:
                self._evict(entry)
                return True
        return False

    def check_integrity(self) -> None:
        """Proves that chains are closed, leaves in order, and the pool keeps every page.

        Raises:
            AssertionError: naming the page at fault.
        """
        for page, entry in self._by_page.items():
            self._check_entry(page, entry)
        for parent in (self._root, *self._by_page.values()):
            for left, right in itertools.pairwise(parent.children):
                assert left.tokens < right.tokens, f"page {left.page} is out of order"
                covered = not left.key and right.tokens.startswith(left.tokens)
                assert not covered, f"page {left.page} holds nothing that {right.page} does not"
        cached = [self._root, *self._by_page.values()]
        num_children = sum(len(entry.children) for entry in cached)
        assert num_children == self.num_cached, f"{num_children} children, not one a page"
        num_ranked = sum(1 for entry in cached if entry.rank is not None)
        assert num_ranked == len(self._leaves), f"{len(self._leaves)} leaves, {num_ranked} cached"
        self._leaves.check_integrity()

    def _check_entry(self, page: int, entry: Entry) -> None:
        parent = entry.parent
        assert parent is not None, f"page {page} has no parent"
        assert entry.page == page, f"page {page} is indexed as {entry.page}"
        assert self._pool.is_cached(page), f"page {page} is not cached by the pool"
        known = parent is self._root or self._by_page.get(parent.page) is parent
        assert known, f"page {page} has lost its parent"
        assert any(child is entry for child in parent.children), f"page {page} is no child"
        size = len(entry.tokens) // 4
        if entry.key:
            key = chain_key(parent.key, entry.tokens)
            assert size == self._rows, f"page {page} has {size} tokens"
            assert entry.key == key, f"page {page} has a wrong key"
            assert child_with(parent, entry.tokens) is entry, f"page {page} is not found"
        else:
            assert 0 < size < self._rows, f"page {page} has {size} tokens"
            assert not entry.children, f"page {page} is partly filled and has children"
        if entry.children:
            assert entry.rank is None, f"page {page} is ranked, but no leaf"
        elif self._pool.references(page) == 0:
            assert entry.rank is not None, f"page {page} can never be evicted"

    def _insert(
        self, page: int, key: bytes, tokens: bytes, parent: Entry, started: int, now: int
    ) -> Entry:
        """Adds a full page, or one partly filled if `key` is empty."""
        entry = self._by_page.get(page)
        if entry is not None:
            if entry.key or entry.parent is not parent or not tokens.startswith(entry.tokens):
                raise ValueError(f"page {page} is cached for other tokens")
            self._unlink(entry)
            entry.key, entry.tokens = key, tokens
        else:
            self._pool.cache(page)
            entry = Entry(page, key, tokens, parent)
            self._start_history(entry, started)
            self._by_page[page] = entry
        position = child_position(parent, tokens)
        if position > 0:
            covered = parent.children[position - 1]
            if not covered.key and tokens.startswith(covered.tokens):
                entry.interval = covered.interval
                self._remove(covered)
                position -= 1
        self._leaves.discard(parent)
        parent.children.insert(position, entry)
        self._leaves.predict(entry, now)
        return entry

    def _insert_partial(
        self, page: int, tokens: bytes, parent: Entry, started: int, now: int
    ) -> None:
        """Adds a partly filled page, unless another child begins with its tokens."""
        position = child_position(parent, tokens)
        if position < len(parent.children):
            child = parent.children[position]
            if child.tokens.startswith(tokens):
                return
        self._insert(page, b"", tokens, parent, started, now)

    def _unlink(self, entry: Entry) -> None:
        assert entry.parent is not None
        del entry.parent.children[child_position(entry.parent, entry.tokens)]
        self._leaves.discard(entry)

    def _remove(self, entry: Entry) -> None:
        """Takes a leaf out of the index; the page is free if it has no references."""
        self._unlink(entry)
        page, entry.page = entry.page, -1
        del self._by_page[page]
        # Last: it may call back, and must find the page gone.
        self._pool.uncache(page)

    def _start_history(self, entry: Entry, started: int) -> None:
        """Gives a new page the history it had before it was lost, else that of its conversation."""
        parent = entry.parent
        assert parent is not None
        recovered = self._leaves.recover(entry, entry.key, started)
        if not recovered and parent is not self._root and not parent.children:
            entry.interval = parent.interval

    def _evict(self, entry: Entry) -> None:
        """Evicts a leaf of the order; its parent, if now a leaf, takes its turn among equals."""
        parent, rank = entry.parent, entry.rank
        assert parent is not None and rank is not None
        if entry.key:
            # One memory a branch: a conversation comes back to its first lost page.
            self._leaves.forget(entry.lost_child)
            self._leaves.lose(entry, entry.key)
            parent.lost_child = entry.key
        self._remove(entry)
        if parent is not self._root and not parent.children:
            self._leaves.add(parent, rank[1])
