"""The tree of cached pages: each is a child of the page before it; siblings are ordered by tokens.

The child that shares most leading tokens with a page is next to where that page would stand, so it
is found by a binary search however many there are.
"""

import bisect
import hashlib
import struct
from collections.abc import Sequence

from kvcache.reuse_order import Reuse

ROOT_KEY = bytes(16)


class Entry(Reuse):
    """A cached page.

    Attributes:
        page: its id; -1 once given up, and for the root.
        key: chain key of a full page; empty for a partly filled one, which has no children.
        tokens: its tokens, four bytes each.
        parent: entry of the page before it; None for the root only.
        children: entries of the pages after it, ordered by tokens.
        lost_child: key of the child given up last.
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
