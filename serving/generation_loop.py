"""The loop that carries requests from prompt to output, one step after another."""

import collections
import dataclasses
from collections.abc import Callable, Generator, Sequence

import numpy as np

from kvcache.page_pool import OutOfPagesError
from serving.model_runner import ModelRunner
from serving.outputs import FinishReason
from serving.sampling_params import SamplingParams


@dataclasses.dataclass
class Request:
    """A validated request and what has been generated for it.

    Attributes:
        token_ids: the prompt.
        params: how to continue.
        max_tokens: most tokens to generate, the model's length limit taken into account.
        stop_ids: ids that end the output.
        on_logits: takes the logits of each chunk of the prompt, float32 [tokens, vocab].
        output_ids: generated so far.
        finish_reason: set when the request is done.
    """

    token_ids: Sequence[int]
    params: SamplingParams
    max_tokens: int
    stop_ids: frozenset[int]
    on_logits: Callable[[np.ndarray], None] | None = None
    output_ids: list[int] = dataclasses.field(default_factory=list)
    finish_reason: FinishReason | None = None

    @property
    def most_cached_tokens(self) -> int:
        """Tokens that can need a row: the last one generated needs none."""
        return len(self.token_ids) + self.max_tokens - 1

    def accept(self, token: int) -> None:
        """Takes the next token and decides whether it is the last."""
        self.output_ids.append(token)
        if token in self.stop_ids:
            self.finish_reason = "stop"
        elif len(self.output_ids) == self.max_tokens:
            self.finish_reason = "length"


class GenerationLoop:
    """Admits requests in order while slots and pages last, and decodes all that run together."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    def run(self, requests: Sequence[Request]) -> Generator[Request]:
        """Finishes all requests.

        Yields:
            Each request when it is done, in order of completion.

        Raises:
            Exception: whatever a step raised. The store is then empty again.
        """
        waiting = collections.deque(requests)
        running: dict[int, Request] = {}
        free_slots = list(range(self._runner.geometry.max_sequences - 1, -1, -1))
        if not self._runner.usable:
            self._runner.reset()
        done = False
        try:
            while waiting or running:
                while waiting and free_slots:
                    if not self._admit(waiting[0], free_slots[-1], alone=not running):
                        break
                    running[free_slots.pop()] = waiting.popleft()
                if running:
                    self._decode(running)
                for slot in [slot for slot, request in running.items() if request.finish_reason]:
                    yield running.pop(slot)
                    self._runner.close(slot)
                    free_slots.append(slot)
            done = True
        finally:
            if not done:
                self._runner.reset()

    def _admit(self, request: Request, slot: int, alone: bool) -> bool:
        """Computes a request's prompt and first token, if there are pages for all of it.

        Raises:
            OutOfPagesError: there are too few, and no other request runs that will free some.
        """
        try:
            self._runner.open(slot, request.most_cached_tokens)
        except OutOfPagesError:
            if alone:
                raise
            return False
        wanted = request.on_logits is not None
        next_token = None
        for chunk in self._runner.prefill(slot, request.token_ids, all_logits=wanted):
            next_token, logits = chunk
            if request.on_logits is not None and logits is not None:
                request.on_logits(logits)
        assert next_token is not None
        request.accept(next_token)
        return True

    def _decode(self, running: dict[int, Request]) -> None:
        """Gives every unfinished request one more token."""
        slots = [slot for slot, request in running.items() if not request.finish_reason]
        if slots:
            for slot, token in zip(slots, self._runner.decode(slots), strict=True):
                running[slot].accept(token)
