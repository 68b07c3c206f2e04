"""Sequences with the same prompt: one computes it, the others find it in the cache."""

import dataclasses
import itertools
from collections import OrderedDict
from collections.abc import Iterator

from serving.scheduler.sequence import Sequence

_LAST_TOKENS = 8  # by which prompts are looked up; then they are compared

Ends = tuple[int, tuple[int, ...]]


@dataclasses.dataclass(eq=False, slots=True)
class _Group[SequenceT: Sequence]:
    """Sequences with one prompt.

    Attributes:
        leader: computes it.
        followers: by priority, those that wait for it, in the order in which they came.
    """

    leader: SequenceT
    followers: dict[int, OrderedDict[SequenceT, None]] = dataclasses.field(default_factory=dict)

    def add(self, sequence: SequenceT) -> None:
        self.followers.setdefault(sequence.priority, OrderedDict())[sequence] = None

    def remove(self, sequence: SequenceT) -> None:
        same = self.followers[sequence.priority]
        del same[sequence]
        if not same:
            del self.followers[sequence.priority]

    def __iter__(self) -> Iterator[SequenceT]:
        return itertools.chain.from_iterable(self.followers.values())


class SharedPrompts[SequenceT: Sequence]:
    """Sequences that wait for the prompt of another.

    The first sequence with a prompt leads until that is computed, and those that come meanwhile
    with the same prompt follow, unless their priority is higher. A lookup costs no pass over the
    prompt, unless there is one that ends alike, and the end of a sequence none over those that wait
    with it.
    """

    def __init__(self) -> None:
        self._led: dict[Ends, _Group[SequenceT]] = {}
        self._groups: dict[SequenceT, _Group[SequenceT]] = {}  # of those that wait

    @property
    def num_held(self) -> int:
        """Sequences that wait for another's prompt."""
        return len(self._groups)

    def follows(self, sequence: SequenceT) -> bool:
        """Takes a new sequence; whether it is to wait for another's prompt."""
        if not sequence.reuse_prefix:
            return False
        group = self._led.setdefault(_ends(sequence), _Group(sequence))
        leader = group.leader
        if leader is sequence:
            return False
        same = leader.token_ids == sequence.token_ids
        if not same or sequence.priority > leader.priority:
            return False
        group.add(sequence)
        self._groups[sequence] = group
        return True

    def computed(self, sequence: SequenceT) -> list[SequenceT]:
        """Notes that a prompt is computed; the sequences that waited for it."""
        group = self._led.get(_ends(sequence))
        if group is None or group.leader is not sequence:
            return []
        del self._led[_ends(sequence)]
        followers = list(group)
        for follower in followers:
            del self._groups[follower]
        return followers

    def ended(self, sequence: SequenceT) -> SequenceT | None:
        """Notes that a sequence is gone; returns the one that leads in its place and waits no
        more."""
        group = self._groups.pop(sequence, None)
        if group is not None:
            group.remove(sequence)
            return None
        group = self._led.get(_ends(sequence))
        if group is None or group.leader is not sequence:
            return None
        if not group.followers:
            del self._led[_ends(sequence)]
            return None
        group.leader = next(iter(group.followers[max(group.followers)]))
        group.remove(group.leader)
        del self._groups[group.leader]
        return group.leader

    def check_integrity(self, held: set[SequenceT]) -> None:
        """Proves that exactly the sequences `held` wait, each for one leader.

        Raises:
            AssertionError: they do not.
        """
        listed = {follower: group for group in self._led.values() for follower in group}
        assert listed == self._groups, "followers lost"
        assert set(listed) == held, "sequences held without a leader, or not held"
        leaders = {group.leader for group in self._led.values()}
        assert not held & leaders, "a sequence leads and follows"
        for ends, group in self._led.items():
            assert _ends(group.leader) == ends, "a leader of another prompt"
            assert all(group.followers.values()), "a priority without followers"


def _ends(sequence: Sequence) -> Ends:
    token_ids = sequence.token_ids
    return len(token_ids), tuple(token_ids[-_LAST_TOKENS:])
