import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from kvcache.page_pool import PagePool
from kvcache.prefix import index as prefix_index
from kvcache.prefix import tree as page_tree
from kvcache.prefix.index import PrefixIndex, PrefixMatch, Publication
from kvcache.prefix.tree import EncodedTokens

Tokens = tuple[int, ...]
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=12)


def shared(left: Sequence[int], right: Sequence[int]) -> int:
    """Leading tokens in common."""
    differ = (i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b)
    return next(differ, min(len(left), len(right)))


@dataclass
class Running:
    tokens: list[int]
    pages: list[int]
    publication: Publication
    published: int


class IndexMachine(RuleBasedStateMachine):
    """Drives an index and a pool beside a plain map from the tokens up to a page's end to it."""

    @initialize(rows=st.integers(2, 4), num_pages=st.integers(5, 9))
    def create(self, rows: int, num_pages: int) -> None:
        self.rows, self.now = rows, 0
        self.pool = PagePool(num_pages, self.on_free)
        self.index = PrefixIndex(rows, self.pool)
        self.cached: dict[Tokens, int] = {}
        self.sequences: list[Running] = []
        self.borrowed: list[int] = []
        self.freed: list[int] = []

    def on_free(self, page: int) -> None:
        assert page not in self.index._by_page
        self.freed.append(page)

    def siblings(self, prefix: Tokens) -> list[Tokens]:
        """Cached pages whose first rows follow `prefix`, which ends with a page."""
        size = len(prefix)
        return [t for t in self.cached if t[:size] == prefix and 0 < len(t) - size <= self.rows]

    def check_match(self, tokens: list[int], limit: int) -> PrefixMatch:
        match = self.index.match(tokens, limit)
        limit, full = min(limit, len(tokens)), []
        while len(full) < limit // self.rows:
            page = self.cached.get(tuple(tokens[: (len(full) + 1) * self.rows]))
            if page is None:
                break
            full.append(page)
        assert match.pages == tuple(full)
        start = len(full) * self.rows
        rest = tokens[start : min(limit, start + self.rows)]
        counts = {
            self.cached[sibling]: shared(sibling[start:], rest)
            for sibling in self.siblings(tuple(tokens[:start]))
        }
        most = max(counts.values(), default=0)
        assert match.num_tokens == start + most
        if most:
            assert match.partial is not None
            assert match.partial[1] == most == counts[match.partial[0]]
        else:
            assert match.partial is None
        return match

    def evict(self) -> bool:
        leaves = {
            page
            for tokens, page in self.cached.items()
            if self.pool.references(page) == 0
            and not any(len(t) > len(tokens) == shared(t, tokens) for t in self.cached)
        }
        self.freed.clear()
        assert self.index.evict(self.now) == bool(leaves)
        if leaves:
            (page,) = self.freed
            assert page in leaves
            self.cached = {t: p for t, p in self.cached.items() if p != page}
        return bool(leaves)

    def allocate(self, count: int) -> list[int] | None:
        while self.pool.num_free < count:
            if not self.evict():
                return None
        return self.pool.allocate(count)

    def publish(self, sequence: Running, num_rows: int, partial: bool) -> None:
        args = (sequence.tokens, sequence.pages, num_rows, self.now)
        self.index.publish(sequence.publication, *args, partial=partial)
        sequence.published = num_rows
        ends = list(range(self.rows, num_rows + 1, self.rows))
        if partial and num_rows % self.rows:
            ends.append(num_rows)
        for end in ends:
            tokens = tuple(sequence.tokens[:end])
            siblings = self.siblings(tokens[: (end - 1) // self.rows * self.rows])
            if tokens in self.cached or (
                end % self.rows and any(shared(sibling, tokens) == end for sibling in siblings)
            ):
                continue
            for sibling in siblings:
                if len(sibling) % self.rows and shared(sibling, tokens) == len(sibling):
                    del self.cached[sibling]
            self.cached[tokens] = sequence.pages[(end - 1) // self.rows]

    @rule(tokens=TOKENS, limit=st.integers(0, 13))
    def look_up(self, tokens: list[int], limit: int) -> None:
        self.check_match(tokens, limit)

    @rule(tokens=TOKENS, alone=st.booleans())
    def start(self, tokens: list[int], alone: bool) -> None:
        """Begins a sequence; one that is alone has pages of its own, as two started at once do."""
        self.now += 1
        match = PrefixMatch() if alone else self.check_match(tokens, len(tokens) - 1)
        publication = self.index.acquire(match, self.now)
        pages = list(match.pages)
        new = self.allocate(math.ceil(len(tokens) / self.rows) - len(pages))
        if new is None:
            self.index.release(pages, self.now)
            return
        self.sequences.append(Running(tokens, pages + new, publication, len(pages) * self.rows))

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), tokens=TOKENS)
    def extend(self, data: st.DataObject, tokens: list[int]) -> None:
        sequence = data.draw(st.sampled_from(self.sequences))
        total = len(sequence.tokens) + len(tokens)
        new = self.allocate(math.ceil(total / self.rows) - len(sequence.pages))
        if new is not None:
            sequence.tokens += tokens
            sequence.pages += new

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), partial=st.booleans())
    def publish_some(self, data: st.DataObject, partial: bool) -> None:
        self.now += 1
        sequence = data.draw(st.sampled_from(self.sequences))
        num_rows = data.draw(st.integers(sequence.published, len(sequence.tokens)))
        self.publish(sequence, num_rows, partial)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), due=st.none() | st.integers(0, 50))
    def finish(self, data: st.DataObject, due: int | None) -> None:
        self.now += 1
        sequence = data.draw(st.sampled_from(self.sequences))
        self.sequences.remove(sequence)
        self.publish(sequence, len(sequence.tokens), partial=data.draw(st.booleans()))
        self.index.release(sequence.pages, self.now, due=due)

    @rule()
    def evict_one(self) -> None:
        self.evict()

    @precondition(lambda self: self.cached)
    @rule(data=st.data())
    def borrow(self, data: st.DataObject) -> None:
        """A reference beside those of sequences, as for the time of a copy."""
        page = data.draw(st.sampled_from(sorted(self.cached.values())))
        self.pool.acquire(page)
        self.borrowed.append(page)

    @precondition(lambda self: self.borrowed)
    @rule()
    def give_back(self) -> None:
        self.pool.release(self.borrowed.pop())

    @invariant()
    def agrees(self) -> None:
        self.index.check_integrity()
        self.pool.check_integrity()
        assert self.index.num_cached == len(self.cached)
        pages = sorted(self.cached.values())
        assert sorted(self.index._by_page) == pages
        held = {*pages, *self.borrowed}.union(*(s.pages for s in self.sequences))
        assert self.pool.num_free == self.pool._num_pages - len(held)


class TestIndex(IndexMachine.TestCase):
    """A wrong page found or a right one missed, a page leaked or evicted too early."""

    settings = settings(max_examples=60, stateful_step_count=30)


class Cache:
    """An index and its pool, used a whole turn at a time."""

    def __init__(self, rows: int, num_pages: int) -> None:
        self.rows = rows
        self.pool = PagePool(num_pages, lambda page: None)
        self.index = PrefixIndex(rows, self.pool)
        self.now = 0

    def start(self, tokens: list[int], *, alone: bool = False) -> tuple[Publication, list[int]]:
        """Begins a sequence; `alone` does not look for cached pages."""
        self.now += 1
        match = PrefixMatch() if alone else self.index.match(tokens, len(tokens))
        publication = self.index.acquire(match, self.now)
        missing = math.ceil(len(tokens) / self.rows) - len(match.pages)
        while self.pool.num_free < missing:
            assert self.index.evict(self.now)
        return publication, [*match.pages, *self.pool.allocate(missing)]

    def turn(self, tokens: list[int], due: int | None = None) -> int:
        """Runs a sequence and returns how many pages it found."""
        found = len(self.index.match(tokens, len(tokens)).pages)
        publication, pages = self.start(tokens)
        self.index.publish(publication, tokens, pages, len(tokens), self.now, partial=True)
        self.index.release(pages, self.now, due=due)
        return found


@given(
    pages=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), max_size=20),
    wanted=st.lists(st.integers(0, 2), max_size=6),
)
def test_closest_of_many_siblings(pages: list[list[int]], wanted: list[int]) -> None:
    """A sibling that shares more tokens, missed because it is no neighbour in the order."""
    cache = Cache(6, 40)
    for page in pages:
        cache.turn(page)
    match = cache.index.match(wanted, len(wanted))
    assert match.num_tokens == max((shared(page, wanted) for page in pages), default=0)


def test_collision_is_harmless(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page served for other tokens, or not found, because two keys are equal."""
    monkeypatch.setattr(prefix_index, "chain_key", lambda parent, tokens: b"same")
    cache = Cache(2, 12)
    cache.turn([1, 2, 3, 4, 5])
    cache.turn([6, 7, 8, 9])
    cache.index.check_integrity()
    assert cache.index.num_cached == 5
    assert cache.index.match([1, 2, 3, 4], 4).num_tokens == 4
    assert cache.index.match([6, 7, 8, 9], 4).num_tokens == 4
    assert cache.index.match([1, 2, 1, 2], 4).num_tokens == 2
    assert cache.index.match([6, 7, 3, 4], 4).num_tokens == 2
    while cache.index.evict(cache.now):
        cache.index.check_integrity()
    assert cache.pool.num_free == 12


class Calls:
    """Counts the calls of a function."""

    def __init__(self, function: Callable) -> None:
        self.function, self.count = function, 0

    def __call__(self, *args):
        self.count += 1
        return self.function(*args)


def count_calls(monkeypatch: pytest.MonkeyPatch, owner: object, name: str) -> Calls:
    calls = Calls(getattr(owner, name))
    monkeypatch.setattr(owner, name, calls)
    return calls


def test_lookup_cost_is_independent_of_conversations(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search through all conversations that leave the same page."""
    cache = Cache(4, 600)
    system = [1, 2, 3, 4, 5, 6, 7, 8]
    for conversation in range(500):
        cache.turn([*system, 9, conversation, 9, 9])
    assert cache.index.num_cached == 502
    hashes = count_calls(monkeypatch, prefix_index, "chain_key")
    searches = count_calls(monkeypatch, page_tree, "tokens_of")
    compares = count_calls(monkeypatch, page_tree, "shared_tokens")
    tokens = [*system, 9, 250, 9, 8, 7, 7, 7, 7]
    assert cache.index.match(tokens, 16).num_tokens == 11
    assert (hashes.count, compares.count) == (0, 2)
    # Two pages with one child each, and two binary searches among 500.
    assert searches.count <= 2 + 2 * 10


def test_tokens_that_were_looked_at_are_not_encoded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt encoded by every lookup, or one that answers for other tokens or another limit."""
    cache = Cache(4, 20)
    cache.turn(list(range(11)))
    tokens = EncodedTokens(list(range(10)))
    encodings = count_calls(monkeypatch, page_tree, "encode_tokens")
    assert cache.index.match(tokens, 9).num_tokens == 9
    assert encodings.count == 3
    assert cache.index.match(tokens, 9).num_tokens == 9
    assert encodings.count == 3
    assert [cache.index.match(tokens, limit).num_tokens for limit in range(11)] == [*range(11)]
    assert cache.index.match(list(range(10)), 10).num_tokens == 10
    assert cache.index.match(EncodedTokens([0, 1, 2, 3, 4, 9]), 6).num_tokens == 5


@pytest.mark.parametrize("count", [0, 3, 8, 11])
def test_only_the_last_page_is_left_to_encode(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Pages encoded ahead that a lookup encodes again, or that hold other tokens."""
    cache = Cache(4, 20)
    cache.turn(list(range(11)))
    tokens = EncodedTokens(list(range(count)))
    tokens.encode_pages(4)
    encodings = count_calls(monkeypatch, page_tree, "encode_tokens")
    assert cache.index.match(tokens, count).num_tokens == count
    assert encodings.count == 1


def test_publication_costs_its_new_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """A growing sequence whose every page is hashed at every step."""
    cache = Cache(2, 50)
    tokens = list(range(100))
    publication, pages = cache.start(tokens)
    hashes = count_calls(monkeypatch, prefix_index, "chain_key")
    for num_rows in range(101):
        cache.index.publish(publication, tokens, pages, num_rows, 1)
    assert hashes.count == 50
    hashes.count = 0
    match = cache.index.match(tokens, 99)
    publication = cache.index.acquire(match, 2)
    hashes.count = 0
    cache.index.publish(publication, tokens, pages, 98, 2)
    assert hashes.count == 0


def test_eviction_looks_at_few_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every leaf looked at for every page evicted."""
    cache = Cache(2, 600)
    for conversation in range(200):
        cache.turn([conversation, 0, 1, 2, 3, 4])
    looks = count_calls(monkeypatch, cache.pool, "references")
    for _ in range(500):
        assert cache.index.evict(cache.now)
    assert looks.count == 500


def test_duplicate_does_not_hang_on_a_lost_page() -> None:
    """Pages published below another's page that was evicted meanwhile: never to be found."""
    cache = Cache(2, 20)
    index, pool = cache.index, cache.pool
    tokens = [1, 2, 3, 4, 5, 6, 7]
    first, theirs = cache.start(tokens[:4], alone=True)
    second, ours = cache.start(tokens, alone=True)
    index.publish(first, tokens, theirs, 4, cache.now)
    index.publish(second, tokens, ours, 4, cache.now)
    index.release(theirs, cache.now)
    assert index.match(tokens, 7).pages == tuple(theirs)
    assert index.evict(cache.now)
    assert index.match(tokens, 7).pages == (theirs[0],)
    index.publish(second, tokens, ours, 6, cache.now)
    index.check_integrity()
    assert index.match(tokens, 7).pages == (theirs[0], *ours[1:3])
    # The first page is not referenced, but what hangs on it is.
    assert not index.evict(cache.now)
    index.publish(second, tokens, ours, 7, cache.now, partial=True)
    index.release(ours, cache.now)
    index.check_integrity()
    for _ in range(4):
        assert index.evict(cache.now)
    assert pool.num_free == 20


def test_finished_turns_leave_one_partial_page() -> None:
    """A partly filled page of every turn of a conversation, each a part of the next one's."""
    cache = Cache(8, 20)
    for length in range(3, 24, 2):
        cache.turn(list(range(length)))
    assert cache.index.num_cached == 3
    assert cache.pool.num_free == 17
    assert cache.index.match(list(range(30)), 30).num_tokens == 23


def test_growing_page_replaces_its_entry() -> None:
    """A page still found by its earlier rows only, or cached twice."""
    cache = Cache(4, 4)
    tokens = [1, 2, 3, 4, 5]
    publication, pages = cache.start(tokens)
    for num_rows in (2, 3, 4, 5):
        cache.index.publish(publication, tokens, pages, num_rows, 1, partial=True)
        cache.index.check_integrity()
        assert cache.index.match(tokens, 5).num_tokens == num_rows
    assert cache.index.num_cached == 2


@pytest.mark.parametrize("working_set", [1.1, 1.5, 2.0])
def test_no_cliff_in_a_round_robin(working_set: float) -> None:
    """Conversations that just outnumber the room, of which none is found when its turn comes."""
    cache = Cache(2, 80)
    count = round(working_set * 20)
    turns = [[c * 100 + i for i in range(8)] for _ in range(8) for c in range(count)]
    found = [cache.turn(tokens) for tokens in turns][-4 * count :]
    assert sum(found) / (4 * len(found)) > 0.85 / working_set
    whole = sum(1 for pages in found if pages in (0, 4))
    assert whole >= 0.95 * len(found), "conversations lost by halves"


def test_single_uses_leave_a_loop_alone() -> None:
    """Prompts that never return, that evict conversations that do."""
    cache = Cache(2, 80)
    found = []
    for turn in range(120):
        found.append(cache.turn([turn % 16 * 100 + i for i in range(8)]))
        cache.turn([10_000 + turn * 10 + i for i in range(8)])
    assert sum(found[-60:]) / 240 > 0.9


def test_abandoned_conversations_go() -> None:
    """Conversations with a short interval, kept for good after they end."""
    cache = Cache(2, 80)
    for turn in range(100):
        cache.turn([turn % 20 * 100 + i for i in range(8)])
    found = [cache.turn([10_000 + turn % 18 * 100 + i for i in range(8)]) for turn in range(180)]
    assert sum(found[-90:]) / 360 > 0.9


def test_shared_beginning_stays() -> None:
    """A system prompt lost with the conversations that begin with it."""
    cache = Cache(2, 80)
    for turn in range(200):
        found = cache.turn([1, 2, 3, 4, *(turn % 30 * 100 + i for i in range(8))])
        assert turn == 0 or found >= 2


def test_known_next_use_is_believed() -> None:
    """Pages of a preempted sequence evicted before those of conversations that return later."""
    cache = Cache(2, 40)
    for turn in range(30):
        cache.turn([turn % 10 * 100 + i for i in range(4)])
    preempted = [5000, 5001, 5002, 5003]
    cache.turn(preempted, due=cache.now + 1)
    for _ in range(20):
        assert cache.index.evict(cache.now)
    assert cache.index.match(preempted, 4).num_tokens == 4
    cache.turn(preempted)
    assert cache.index._by_page[cache.index.match(preempted, 4).pages[0]].interval is None


def test_pages_end_last_first() -> None:
    """A beginning freed, and its id reused, before what hangs on it."""
    freed: list[int] = []
    pool = PagePool(4, freed.append)
    index = PrefixIndex(2, pool)
    pages = pool.allocate(3)
    index.release(pages, 1)
    assert freed == pages[::-1]


def test_history_follows_the_conversation() -> None:
    """Predictions from uses that are another's, or from a history dropped as a page grows."""
    cache = Cache(8, 20)
    index = cache.index
    cache.turn([1, 2, 3])
    cache.turn([1, 2, 3, 4])
    cache.turn([1, 2, 3, 4, 5])
    (entry,) = index._by_page.values()
    last_use = entry.last_use
    assert entry.interval == 1.0
    cache.turn([1, 2, 9, 9, 9, 9])
    assert entry.last_use == last_use, "two tokens of five were no return to it"
    lone = Cache(2, 40)
    for conversation in range(5):
        lone.turn([1, 2, 3, 4, 10 + conversation, 0, 0, 0])
    for _ in range(5):
        lone.now += 50
        lone.turn([1, 2, 3, 4, 99 + lone.now, 0, 0, 0])
    assert lone.index._leaves._prior == 1.0, "a shared beginning taught the prior"
    while lone.index.evict(lone.now):
        pass
    lost = len(lone.index._leaves._lost)
    assert lost == 10, f"{lost} memories of 10 lost branches"


def test_wrong_use_is_refused() -> None:
    """A mistake of the caller that shows only later, as wrong tokens or a lost page."""
    cache = Cache(2, 8)
    index = cache.index
    publication, pages = cache.start([1, 2, 3, 4])
    with pytest.raises(ValueError, match="num_rows 5 exceeds 4 token_ids or 2 pages"):
        index.publish(publication, [1, 2, 3, 4], pages, 5, 1)
    with pytest.raises(ValueError, match="num_rows 3 exceeds 4 token_ids or 1 pages"):
        index.publish(publication, [1, 2, 3, 4], pages[:1], 3, 1)
    index.publish(publication, [1, 2, 3, 4], pages, 4, 1)
    with pytest.raises(ValueError, match="num_rows 3 is less than the 2 pages published"):
        index.publish(publication, [1, 2, 3, 4], pages, 3, 1)
    other = index.acquire(PrefixMatch(), 1)
    with pytest.raises(ValueError, match=f"page {pages[0]} is cached for other tokens"):
        index.publish(other, [5, 6], pages, 2, 1)
    with pytest.raises(ValueError, match="limit must not be negative, got -1"):
        index.match([1], -1)
    with pytest.raises(ValueError, match="named twice"):
        index.release([pages[0], pages[0]], 1)
    with pytest.raises(ValueError, match=r"not referenced: \[7\]"):
        index.release([*pages, 7], 1)
    assert [cache.pool.references(page) for page in pages] == [1, 1]
    match = index.match([1, 2, 3, 4], 4)
    index.release(pages, 1)
    assert index.evict(1)
    with pytest.raises(ValueError, match=f"page {pages[1]} was evicted since the match"):
        index.acquire(match, 2)
    assert [cache.pool.references(page) for page in pages] == [0, 0]
    index.check_integrity()


@pytest.mark.parametrize(
    ("corrupt", "message"),
    [
        (lambda index, entry: index._by_page.pop(entry.page), "lost its parent|children"),
        (lambda index, entry: entry.parent.children.remove(entry), "is no child"),
        (lambda index, entry: entry.parent.children.append(entry), "out of order"),
        (lambda index, entry: setattr(entry, "key", b"other"), "has a wrong key"),
        (lambda index, entry: setattr(entry, "key", b""), "has 2 tokens"),
        (lambda index, entry: setattr(entry, "tokens", entry.tokens[:4]), "has 1 tokens"),
        (lambda index, entry: setattr(entry, "parent", index._by_page[1]), "is no child"),
        (lambda index, entry: setattr(entry, "parent", None), "has no parent"),
        (lambda index, entry: setattr(entry, "page", 7), "is indexed as 7"),
        (lambda index, entry: index._pool.uncache(entry.page), "is not cached by the pool"),
        (lambda index, entry: index._leaves.discard(entry.children[0]), "never be evicted"),
        (lambda index, entry: index._leaves.add(entry), "is ranked, but no leaf"),
        (lambda index, entry: setattr(entry.children[0], "due", 99.0), "due at 99.0"),
    ],
)
def test_integrity_check_finds_corruption(corrupt: Callable, message: str) -> None:
    """A damaged tree, that the check which every engine test runs would let pass."""
    cache = Cache(2, 8)
    publication, pages = cache.start([1, 2, 3, 4])
    cache.index.publish(publication, [1, 2, 3, 4], pages, 4, 1)
    cache.index.release(pages, 1)
    cache.pool.acquire(pages[0])
    cache.index.check_integrity()
    corrupt(cache.index, cache.index._by_page[pages[0]])
    with pytest.raises(AssertionError, match=message):
        cache.index.check_integrity()
