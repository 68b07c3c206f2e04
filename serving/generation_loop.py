"""The loop that carries sequences from prompt to output, one step after another."""

import collections

from kvcache.page_pool import OutOfPagesError
from serving.model_runner import ModelRunner
from serving.request import Continuation


class GenerationLoop:
    """Admits sequences in order while slots and pages last, and decodes all that run together.

    A step computes one waiting prompt and then one token of everything that runs, so that neither
    holds up the other for longer than that.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._waiting: collections.deque[Continuation] = collections.deque()
        self._running: dict[int, Continuation] = {}
        self._free_slots = list(range(runner.geometry.max_sequences - 1, -1, -1))

    @property
    def num_waiting(self) -> int:
        """Sequences that have not started."""
        return len(self._waiting)

    def add(self, sequence: Continuation) -> None:
        """Queues a sequence."""
        self._waiting.append(sequence)

    def step(self) -> None:
        """Computes a waiting prompt, if there is one and room for it, and a token of each sequence.

        Raises:
            Exception: whatever a step raised. All sequences are gone then, and the store is empty.
        """
        done = False
        try:
            if not self._runner.usable:
                self._runner.reset()
            if self._waiting and self._free_slots and self._admit(self._waiting[0]):
                self._waiting.popleft()
            self._decode()
            # Last, so that whoever waits for a sequence finds its pages still cached.
            self._close_finished()
            done = True
        finally:
            if not done:
                self.abort_all()

    def abort(self, sequences: list[Continuation]) -> None:
        """Ends those of the sequences that are not done."""
        for sequence in sequences:
            if sequence.finish_reason is None:
                sequence.finish_reason = "abort"
        self._waiting = collections.deque(
            sequence for sequence in self._waiting if sequence.finish_reason is None
        )
        self._close_finished()

    def abort_all(self) -> None:
        """Ends everything and builds an empty store, as after a step that failed."""
        for sequence in (*self._waiting, *self._running.values()):
            sequence.finish_reason = "abort"
        self._free_slots += self._running
        self._waiting.clear()
        self._running.clear()
        self._runner.reset()

    def _admit(self, sequence: Continuation) -> bool:
        """Computes a prompt and its first token, if there are pages for all of the sequence.

        Raises:
            OutOfPagesError: there are too few, and nothing runs that will free some.
        """
        slot = self._free_slots[-1]
        try:
            self._runner.open(slot, sequence)
        except OutOfPagesError:
            if not self._running:
                raise
            return False
        self._running[self._free_slots.pop()] = sequence
        sequence.accept(*self._runner.prefill(slot, sequence))
        return True

    def _decode(self) -> None:
        """Gives every running sequence that is not done one more token."""
        unfinished = {
            slot: sequence
            for slot, sequence in self._running.items()
            if sequence.finish_reason is None
        }
        if unfinished:
            chosen = self._runner.decode(unfinished)
            for sequence, (token, logprobs) in zip(unfinished.values(), chosen, strict=True):
                sequence.accept(token, logprobs)

    def _close_finished(self) -> None:
        finished = [slot for slot, sequence in self._running.items() if sequence.finish_reason]
        for slot in finished:
            self._runner.close(slot, self._running.pop(slot))
            self._free_slots.append(slot)
