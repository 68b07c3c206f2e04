"""The tree of cached pages: each is a child of the page before it; siblings are ordered by tokens.

The child that shares most leading tokens with a page is next to where that page would stand, so it
is found by a binary search however many there are.
"""

import bisect
import hashlib
import struct
from collections.abc import Iterator, Sequence
from typing import overload

from kvcache.prefix.reuse_order import Reuse

ROOT_KEY = bytes(16)


class Entry(Reuse):
    """A cached page.

    Attributes:
        page: its id; -1 once evicted, and for the root.
        key: chain key of a full page; empty for a partly filled one, which has no children.
        tokens: its tokens, four bytes each.
        parent: entry of the page before it; None for the root only.
        children: entries of the pages after it, ordered by tokens.
        lost_child: key of the child evicted last.
    """

    __slots__ = ("children", "key", "lost_child", "page", "parent", "tokens")

    def __init__(self, page: int, key: bytes, tokens: bytes, parent: "Entry | None") -> None:
        super().__init__()
        self.page = page
        self.key = key
        self.tokens = tokens
        self.parent = parent
        self.children: list[Entry] = []
        self.lost_child = b""


class EncodedTokens(Sequence[int]):
    """Tokens that are looked up more than once, and are encoded once: it takes longest.

    Args:
        token_ids: the tokens, which stay as they are.
    """

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._token_ids = token_ids
        self._encoded: dict[tuple[int, int], bytes] = {}

    def __len__(self) -> int:
        return len(self._token_ids)

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...

    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        return self._token_ids[index]

    def __iter__(self) -> Iterator[int]:
        return iter(self._token_ids)

    def encoded(self, start: int, stop: int) -> bytes:
        """Tokens from `start` to `stop`, or the last."""
        key = start, stop
        if key not in self._encoded:
            self._encoded[key] = encode_tokens(self._token_ids[start:stop])
        return self._encoded[key]

    def encode_pages(self, rows_per_page: int) -> None:
        """Encodes all full pages."""
        for stop in range(rows_per_page, len(self) + 1, rows_per_page):
            self.encoded(stop - rows_per_page, stop)


def encode_tokens(token_ids: Sequence[int]) -> bytes:
    """Token ids as bytes, four each."""
    return struct.pack(f"<{len(token_ids)}i", *token_ids)


def chain_key(parent_key: bytes, tokens: bytes) -> bytes:
    """Key of a full page: a hash of its tokens and all before them."""
    return hashlib.blake2b(parent_key + tokens, digest_size=len(ROOT_KEY)).digest()


def tokens_of(entry: Entry) -> bytes:
    """The order of siblings."""
    return entry.tokens


def child_position(parent: Entry, tokens: bytes) -> int:
    """Where a child with these tokens is or belongs."""
    return bisect.bisect_left(parent.children, tokens, key=tokens_of)


def child_with(parent: Entry, tokens: bytes) -> Entry | None:
    """The child that holds exactly these tokens."""
    position = child_position(parent, tokens)
    if position < len(parent.children) and parent.children[position].tokens == tokens:
        return parent.children[position]
    return None


def shared_tokens(left: bytes, right: bytes) -> int:
    """Leading tokens that two pages have in common."""
    size = min(len(left), len(right))
    difference = int.from_bytes(left[:size]) ^ int.from_bytes(right[:size])
    return (size - (difference.bit_length() + 7) // 8) // 4


def closest_child(parent: Entry, tokens: bytes) -> tuple[Entry | None, int]:
    """The child that shares most leading tokens, and how many: a neighbour in their order."""
    position = child_position(parent, tokens)
    best, most = None, 0
    for child in parent.children[max(position - 1, 0) : position + 1]:
        shared = shared_tokens(child.tokens, tokens)
        if shared > most:
            best, most = child, shared
    return best, most
