"""An engine that several callers run step by step, each until its own requests are done."""

import weakref
from collections.abc import Callable, Generator, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

from serving.engine.engine import Engine
from serving.engine_access import EngineAccess
from serving.options.engine_options import EngineOptions
from serving.requests.outputs import RequestOutput
from serving.requests.request import Request

OnError = Literal["raise", "return"]


class _Active(NamedTuple):
    """A request that a caller waits for, and the tokens that it has been given of it."""

    request: Request
    num_tokens: int


class SharedEngine:
    """The engine of an `LLM`. Threads take turns in it, a step at a time.

    Args:
        options: the model, and how to run it.
        warm_up: see `Engine`.

    Attributes:
        engine: the engine.
    """

    def __init__(self, options: EngineOptions, *, warm_up: bool) -> None:
        self._access = EngineAccess("LLM")
        self._closed = False
        self.engine = Engine(options, warm_up=warm_up)

    def check_usable(self) -> None:
        """Refuses a forked child, and whoever comes after `close`.

        Raises:
            RuntimeError: either.
        """
        self._access.check_process()
        if self._closed:
            raise RuntimeError("this LLM is closed")

    def run[Result](self, action: Callable[[], Result]) -> Result:
        """Runs an action of the engine while no other thread is in it.

        Raises:
            RuntimeError: see `check_usable` and `EngineAccess.run`.
        """

        def run() -> Result:
            self.check_usable()
            return action()

        return self._access.run(run)

    def close(self) -> None:
        """See `LLM.close`."""
        if not self._access.in_own_process:
            return
        self._closed = True
        if self._access.is_held:
            self._access.defer(self.engine.close)
        else:
            self._access.run(self.engine.close)

    def outputs(
        self, requests: Iterable[Request | RequestOutput], stream: bool, on_error: OnError | None
    ) -> Generator[tuple[int, RequestOutput]]:
        """Runs requests, drawn while few are waiting, and yields what is done or has grown.

        Of what fails, None raises only the engine's own failures.
        """
        return _outputs(weakref.ref(self), requests, stream, on_error)

    def has_room(self) -> bool:
        """Whether few sequences are waiting."""
        return self.engine.num_waiting < self.engine.runner.geometry.max_sequences

    def add(self, request: Request) -> None:
        """Queues a request."""
        self.run(partial(self.engine.add, request))

    def step(
        self, active: dict[int, _Active], *, stream: bool
    ) -> list[tuple[int, Request, RequestOutput]]:
        """Runs a step.

        Args:
            active: the caller's requests by place; those that are done are taken out.
            stream: also give outputs that have grown.

        Returns:
            Place, request and output of what is done or has grown.
        """

        def step() -> list[tuple[int, Request, RequestOutput]]:
            self.engine.step()
            found = []
            for place, (request, num_tokens) in list(active.items()):
                if request.finished:
                    del active[place]
                    _note_interruption(request)
                elif stream and request.num_output_tokens > num_tokens:
                    active[place] = _Active(request, request.num_output_tokens)
                else:
                    continue
                found.append((place, request, request.output()))
            return found

        return self.run(step)

    def export_prefix(self, request: Request, path: Path) -> None:
        """Runs a request and writes its prompt's rows, in one turn: pages may go between two.

        Raises:
            OSError: the file cannot be written.
            Exception: whatever the request failed with.
        """

        def export() -> None:
            self.engine.add(request)
            while not request.finished:
                self.engine.step()
            _raise_failure(request, "raise")
            self.engine.export_prefix(request.sequences[0].token_ids, path)

        self.run(export)

    def abandon(self, requests: Sequence[Request]) -> None:
        """Aborts requests as soon as that can be done without waiting."""

        def abort() -> None:
            if not self._closed:
                for request in requests:
                    self.engine.abort(request)

        self._access.defer(abort)


def dereference[Referent](reference: weakref.ref[Referent]) -> Referent:
    """Follows the weak reference of an iterator to its LLM.

    Raises:
        RuntimeError: it is gone.
    """
    referent = reference()
    if referent is None:
        raise RuntimeError(
            "the LLM of this iterator was deleted: keep a reference to it while you iterate"
        )
    return referent


def _outputs(
    engine: weakref.ref[SharedEngine],
    requests: Iterable[Request | RequestOutput],
    stream: bool,
    on_error: OnError | None,
) -> Generator[tuple[int, RequestOutput]]:
    """See `SharedEngine.outputs`. The engine is not kept from one output to the next."""
    drawn = enumerate(requests)
    active: dict[int, _Active] = {}
    more = True
    try:
        while more or active:
            # At least one, however many wait for another caller.
            while more and (not active or dereference(engine).has_room()):
                place, request = next(drawn, (0, None))
                more = request is not None
                if isinstance(request, RequestOutput):
                    yield place, request
                elif request is not None:
                    active[place] = _Active(request, 0)
                    dereference(engine).add(request)
            if not active:
                return
            for place, request, output in dereference(engine).step(active, stream=stream):
                if request.finished:
                    _raise_failure(request, on_error)
                yield place, output
    finally:
        # What an error or a caller that stops listening leaves behind.
        left = engine()
        if left is not None:
            left.abandon([one.request for one in active.values()])


def _note_interruption(request: Request) -> None:
    """Fails a request that an interruption of another call has ended."""
    if any(part.finish_reason == "abort" for part in request.sequences):
        request.error = request.error or RuntimeError(
            "a step was interrupted in another call, and the rows of this request are lost: submit "
            "it again"
        )
        request.step_failed = True


def _raise_failure(request: Request, on_error: OnError | None) -> None:
    if request.error is not None:
        raises = request.step_failed if on_error is None else on_error == "raise"
        if raises:
            raise request.error
