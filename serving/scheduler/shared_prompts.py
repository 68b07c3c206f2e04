"""Sequences with the same prompt: one computes it, the others find it in the cache."""

from serving.scheduler.sequence import ScheduledSequence

_LAST_TOKENS = 8  # by which prompts are looked up; then they are compared

Ends = tuple[int, tuple[int, ...]]


class SharedPrompts:
    """Who waits for whom.

    The first sequence with a prompt leads until that is computed, and those that come meanwhile
    with the same prompt follow, unless their priority is higher. A lookup costs no pass over the
    prompt, unless there is one that ends alike.
    """

    def __init__(self) -> None:
        self._leaders: dict[Ends, ScheduledSequence] = {}
        self._followers: dict[ScheduledSequence, dict[ScheduledSequence, None]] = {}
        self._followed: dict[ScheduledSequence, ScheduledSequence] = {}

    @property
    def num_held(self) -> int:
        """Sequences that wait for another's prompt."""
        return len(self._followed)

    def follows(self, record: ScheduledSequence) -> bool:
        """Takes a new sequence; whether it is to wait for another's prompt."""
        if not record.sequence.reuse_prefix:
            return False
        leader = self._leaders.setdefault(_ends(record), record)
        if leader is record:
            self._followers[record] = {}
            return False
        same = leader.sequence.token_ids == record.sequence.token_ids
        if not same or record.sequence.priority > leader.sequence.priority:
            return False
        self._followers[leader][record] = None
        self._followed[record] = leader
        return True

    def computed(self, record: ScheduledSequence) -> list[ScheduledSequence]:
        """Notes that a prompt is computed; the sequences that waited for it."""
        followers = self._followers.pop(record, None)
        if followers is None:
            return []
        del self._leaders[_ends(record)]
        for follower in followers:
            del self._followed[follower]
        return list(followers)

    def ended(self, record: ScheduledSequence) -> ScheduledSequence | None:
        """Notes that a sequence is gone; who leads in its place and waits for nobody now."""
        leader = self._followed.pop(record, None)
        if leader is not None:
            del self._followers[leader][record]
            return None
        followers = self.computed(record)
        if not followers:
            return None
        first = max(followers, key=lambda follower: follower.sequence.priority)
        others = [follower for follower in followers if follower is not first]
        self._leaders[_ends(first)] = first
        self._followers[first] = dict.fromkeys(others)
        self._followed |= dict.fromkeys(others, first)
        return first

    def check_integrity(self, held: set[ScheduledSequence]) -> None:
        """Proves that exactly the sequences `held` wait, each for one leader.

        Raises:
            AssertionError: they do not.
        """
        assert set(self._leaders.values()) == set(self._followers), "leaders lost"
        listed = {
            follower: leader
            for leader, followers in self._followers.items()
            for follower in followers
        }
        assert listed == self._followed, "followers lost"
        assert set(listed) == held, "sequences held for nobody, or not held"
        assert not held & set(self._followers), "a sequence leads and follows"


def _ends(record: ScheduledSequence) -> Ends:
    token_ids = record.sequence.token_ids
    return len(token_ids), tuple(token_ids[-_LAST_TOKENS:])
