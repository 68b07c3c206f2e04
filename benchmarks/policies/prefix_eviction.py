"""Hit rates of prefix caches when conversations outgrow their capacity.

Conversations take turns; each turn reads all pages of its conversation and may add some. The table
gives, by workload and policy, the pages found as a share of those that an unlimited cache would
find. `index` is `kvcache.prefix.index`. The others evict the last pages of one conversation: `lru`
of the least recently used, `random` of any, `clairvoyant` of the one whose next turn is furthest
ahead.

usage: python benchmarks/policies/prefix_eviction.py [--seed N]
"""

import argparse
import dataclasses
import math
import random
from collections.abc import Callable, Sequence

from kvcache.page_pool import PagePool
from kvcache.prefix.index import PrefixIndex

CAPACITY = 400  # pages of the cache
PAGES = 8  # of a conversation of fixed length
ROWS = 4  # tokens per page
ROUNDS = 30


@dataclasses.dataclass(frozen=True, slots=True)
class Turn:
    """Turn of a conversation, after which it has `num_pages` pages."""

    conversation: int
    num_pages: int


def index_pages_found(turns: Sequence[Turn], room: int) -> list[int]:
    """Returns the pages that the prefix index finds at each turn.

    Raises:
        OutOfPagesError: a turn has more pages than the cache.
    """
    pool = PagePool(room, on_free=lambda page: None)
    index = PrefixIndex(ROWS, pool)
    found = []
    for now, turn in enumerate(turns):
        num_rows = turn.num_pages * ROWS
        tokens = [turn.conversation * 10_000 + position for position in range(num_rows)]
        match = index.match(tokens, num_rows)
        publication = index.acquire(match, now)
        missing = turn.num_pages - len(match.pages)
        while pool.num_free < missing and index.evict(now):
            pass
        pages = [*match.pages, *pool.allocate(missing)]
        index.publish(publication, tokens, pages, num_rows, now)
        index.release(pages, now)
        found.append(len(match.pages))
    return found


# Returns the conversation to evict, of those in the order of their last turns.
Choice = Callable[[list[int], int], int]


def pages_found(turns: Sequence[Turn], room: int, choose: Choice) -> list[int]:
    """Returns the pages found at each turn by a cache that evicts the ends of chosen
    conversations."""
    cached: dict[int, int] = {}
    found = []
    for now, turn in enumerate(turns):
        found.append(cached.pop(turn.conversation, 0))
        while sum(cached.values()) + turn.num_pages > room:
            evicted = choose(list(cached), now)
            excess = sum(cached.values()) + turn.num_pages - room
            cached[evicted] -= min(cached[evicted], excess)
            if not cached[evicted]:
                del cached[evicted]
        cached[turn.conversation] = turn.num_pages
    return found


def lru_pages_found(turns: Sequence[Turn], room: int) -> list[int]:
    """Returns the pages found if the least recently used conversation is evicted."""
    return pages_found(turns, room, lambda conversations, _: conversations[0])


def random_pages_found(turns: Sequence[Turn], room: int) -> list[int]:
    """Returns the pages found if a random conversation is evicted."""
    rng = random.Random(0)
    return pages_found(turns, room, lambda conversations, _: rng.choice(conversations))


def clairvoyant_pages_found(turns: Sequence[Turn], room: int) -> list[int]:
    """Returns the pages found if the conversation that returns last is evicted."""
    upcoming: dict[int, float] = {}
    next_turn = [math.inf] * len(turns)
    for now in reversed(range(len(turns))):
        next_turn[now] = upcoming.get(turns[now].conversation, math.inf)
        upcoming[turns[now].conversation] = now
    last_turn: dict[int, int] = {}
    seen = 0

    def choose(conversations: list[int], now: int) -> int:
        nonlocal seen
        for past in range(seen, now):
            last_turn[turns[past].conversation] = past
        seen = now
        return max(conversations, key=lambda conversation: next_turn[last_turn[conversation]])

    return pages_found(turns, room, choose)


POLICIES = {
    "lru": lru_pages_found,
    "random": random_pages_found,
    "index": index_pages_found,
    "clairvoyant": clairvoyant_pages_found,
}


def share_found(turns: Sequence[Turn], found: Sequence[int]) -> float:
    """Returns the pages found as a share of those that earlier turns of the conversations
    computed."""
    made: dict[int, int] = {}
    possible = 0
    for turn in turns:
        possible += made.get(turn.conversation, 0)
        made[turn.conversation] = turn.num_pages
    return sum(found) / possible


def round_robin(working_set: float) -> list[Turn]:
    """Conversations in turn, together `working_set` times the capacity."""
    return [Turn(c, PAGES) for _ in range(ROUNDS) for c in range(_conversations(working_set))]


def shuffled_rounds(working_set: float, rng: random.Random) -> list[Turn]:
    """Each conversation once per round, in a new order each round."""
    conversations = list(range(_conversations(working_set)))
    turns = []
    for _ in range(ROUNDS):
        rng.shuffle(conversations)
        turns += [Turn(c, PAGES) for c in conversations]
    return turns


def zipf(rng: random.Random) -> list[Turn]:
    """Twenty times the capacity, where the n-th conversation returns at a rate of 1/n."""
    conversations = range(_conversations(20))
    weights = [1 / (rank + 1) for rank in conversations]
    chosen = rng.choices(conversations, weights, k=ROUNDS * _conversations(4))
    return [Turn(c, PAGES) for c in chosen]


def loop_and_scan(working_set: float) -> list[Turn]:
    """A round robin, with a conversation of a single turn after each of its turns."""
    turns = round_robin(working_set)
    scan = [Turn(len(turns) + number, PAGES) for number in range(len(turns))]
    return [turn for pair in zip(turns, scan, strict=True) for turn in pair]


def agents(working_set: float, rng: random.Random) -> list[Turn]:
    """Conversations that grow by a page per turn and end; a new one replaces each.

    Rounds are shuffled, so that the turns of one come at uneven times.
    """
    first, last = PAGES // 2, PAGES * 3 // 2
    count = _conversations(working_set)
    running = [Turn(c, rng.randint(first, last)) for c in range(count)]
    started = count
    turns = []
    for _ in range(ROUNDS):
        rng.shuffle(running)
        turns += running
        for index, turn in enumerate(running):
            if turn.num_pages < last:
                running[index] = Turn(turn.conversation, turn.num_pages + 1)
            else:
                running[index] = Turn(started, first)
                started += 1
    return turns


def _conversations(working_set: float) -> int:
    return round(working_set * CAPACITY / PAGES)


def workloads(seed: int) -> dict[str, list[Turn]]:
    """Returns the turns of each workload, by name."""
    rng = random.Random(seed)
    result = {f"round robin, W/C {w}": round_robin(w) for w in (0.9, 1.05, 1.25, 1.5, 2.0)}
    result |= {f"shuffled rounds, W/C {w}": shuffled_rounds(w, rng) for w in (0.9, 1.25, 2.0)}
    result |= {f"agents, W/C {w}": agents(w, rng) for w in (0.9, 1.25, 2.0)}
    result |= {"Zipf": zipf(rng)}
    result |= {f"loop of {w} C and scan": loop_and_scan(w) for w in (0.4, 0.8, 1.25)}
    return result


def format_table(shares: dict[str, dict[str, float]]) -> str:
    """Formats a Markdown table of shares by workload and policy."""
    lines = [f"| workload | {' | '.join(POLICIES)} |", "|---|" + "---|" * len(POLICIES)]
    for name, row in shares.items():
        cells = " | ".join(f"{row[policy]:.2f}" for policy in POLICIES)
        lines.append(f"| {name} | {cells} |")
    return "\n".join(lines)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    shares = {
        name: {policy: share_found(turns, run(turns, CAPACITY)) for policy, run in POLICIES.items()}
        for name, turns in workloads(options.seed).items()
    }
    print(format_table(shares))


if __name__ == "__main__":
    main()
