"""The serving loop for programs that embed it: requests from any thread, outputs as they grow."""

import asyncio
import atexit
import dataclasses
import itertools
import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType

from glm53.model.config import GLMConfig
from glm53.tokenizer import Tokenizer
from serving.engine.engine import Engine
from serving.engine.metrics import LoopMetrics
from serving.engine_access import EngineAccess
from serving.errors import EngineDeadError, describe_error, drop_tracebacks
from serving.options.engine_options import EngineOptions
from serving.options.other_names import ENGINE_NAMES, explain_unknown_names
from serving.requests.input_processor import Prompt
from serving.requests.request import Request
from serving.requests.sampling_params import SamplingParams
from serving.requests.stream import RequestStream

logger = logging.getLogger(__name__)

_NAMES = {
    **ENGINE_NAMES,
    **{
        field.name: f"pass ServingLoop(EngineOptions({field.name}=...))"
        for field in dataclasses.fields(EngineOptions)
    },
}
"""Of options that are no argument of the loop: what to do instead."""


@explain_unknown_names(_NAMES)
class ServingLoop:
    """A loaded model that serves requests from any number of threads and event loops.

    Either `start` gives it a thread of its own, until `close`; as a context manager, with `with` or
    `async with`, it does both. Or the program calls `step`.

    In a forked child every use but `close` raises a RuntimeError.

    Args:
        options: the model, and how to run it.
        warm_up: compile everything that serving may launch now, so that no request waits for the
            compiler.

    Attributes:
        config: the model's configuration.
        tokenizer: None if the model has none.
        max_model_len: longest prompt and output together, in tokens.

    Raises:
        FileNotFoundError: the model is not there.
        CheckpointError: its weights are damaged or of another model.
        TypeError: `options` is none, or an unknown argument.
        ValueError: an option is refused; the message names it.
    """

    def __init__(self, options: EngineOptions, *, warm_up: bool = True) -> None:
        if not isinstance(options, EngineOptions):
            raise TypeError(
                f"ServingLoop takes an EngineOptions, got {options!r}: pass "
                "ServingLoop(EngineOptions(model=...))"
            )
        self._access = EngineAccess("ServingLoop")
        self._engine = Engine(options, warm_up=warm_up)
        self.config: GLMConfig = self._engine.config
        self.tokenizer: Tokenizer | None = self._engine.tokenizer
        self.max_model_len: int = self._engine.max_model_len
        self._inbox = threading.Condition()  # Guards what follows.
        self._arrived: deque[Request] = deque()
        self._aborted: deque[Request] = deque()
        self._streams: dict[str, RequestStream] = {}
        self._requests: dict[str, Request] = {}
        self._thread: threading.Thread | None = None
        self._closed = False
        self._warned = False  # of callers that wait while nothing runs steps
        self._stepped = False
        self._cause: EngineDeadError | None = None  # Why it has closed itself.
        self._interrupted = False  # a step, unless it is being run
        self._numbers = itertools.count()
        self._metrics = self._engine.metrics()
        # Streams do not keep the loop, nor wait for one that is gone.
        weakref.finalize(self, _fail_orphans, self._streams).atexit = False

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        request_id: str | None = None,
    ) -> RequestStream:
        """Queues a prompt; returns at once.

        Args:
            prompt: text, token ids, or a dict with `prompt`, `prompt_token_ids` or `messages`, as
                for `LLM`.
            params: how to continue it; None is the defaults.
            priority: higher goes first, and is preempted last.
            request_id: its name; None gives it one that is new.

        Returns:
            Its output as it grows.

        Raises:
            ValueError, TypeError: the prompt or a parameter is refused, or a request that is not
                done has this name. Nothing has been queued then.
            RuntimeError: the loop is closed; as an EngineDeadError, if it has closed itself.
        """
        self._access.check_process()
        if not isinstance(request_id, str | None):
            raise TypeError(f"request_id must be text, got {request_id!r}")
        params = SamplingParams() if params is None else params
        request = self._engine.input_processor.read(request_id or "", prompt, params, priority)
        with self._inbox:
            self._check_open()
            self._engine.check_alive()
            if request_id is None:
                request.request_id = self._new_name()
            name = request.request_id
            if name in self._requests:
                raise ValueError(f"request_id {name!r} is already in use by an unfinished request")
            stream = RequestStream(
                request,
                self._engine.requests.output_lock,
                self._access,
                abort=_weakly(self._abort),
                note_wait=_weakly(self._note_wait),
            )
            self._requests[name], self._streams[name] = request, stream
            self._arrived.append(request)
            self._inbox.notify()
        return stream

    def abort(self, request_id: str) -> bool:
        """Ends a request, in whatever state, before the next step; returns at once.

        Returns:
            Whether there is such a request that is not done.
        """
        self._access.check_process()
        with self._inbox:
            request = self._requests.get(request_id)
        if request is None:
            return False
        self._abort(request)
        return True

    def step(self) -> bool:
        """Runs one step: takes in what has been submitted and aborted, launches, and hands out the
        results of the step before.

        Returns:
            Whether work is left.

        Raises:
            RuntimeError: the loop runs in its own thread, or is closed; or this is called while
                this thread is in a step, as by a signal handler.
        """
        self._access.check_process()
        self._check_open()
        if self._thread is not None:
            raise RuntimeError("the serving loop runs in its own thread")
        self._stepped = True
        return self._access.run(self._step)

    def reset_prefix_cache(self) -> bool:
        """Drops the cached pages that no request uses, between two steps.

        Returns:
            Whether nothing is cached any more.

        Raises:
            RuntimeError: the loop is closed.
        """
        self._check_open()
        return self._access.run(self._engine.reset_prefix_cache)

    def start(self) -> None:
        """Has the loop run in a thread of its own, which sleeps while there is nothing to do. The
        end of the program closes it.

        Raises:
            RuntimeError: it runs already, or is closed.
        """
        self._access.check_process()
        with self._inbox:
            if self._thread is not None or self._closed:
                raise RuntimeError("the serving loop runs already, or is closed")
            self._stepped = True
            self._thread = threading.Thread(target=self._run, name="serving-loop", daemon=True)
            self._thread.start()
        # A thread that is in the device when the interpreter goes takes the process down.
        atexit.register(self.close)

    def close(self) -> None:
        """Aborts all requests, ends the thread, if there is one, and frees the memory of the
        devices; waits for the last step. It may be called again, and from anywhere.

        In the middle of a step of this thread, as from a signal handler, it does not wait: the
        step ends first. In a forked child it does nothing.
        """
        if not self._access.in_own_process:
            return
        with self._inbox:
            self._closed = True
            self._inbox.notify()
            thread = self._thread
        if self._access.is_held:
            self._access.defer(self._end)
            return
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        atexit.unregister(self.close)
        self._access.run(self._end)

    def __enter__(self) -> "ServingLoop":
        self.start()
        return self

    async def __aenter__(self) -> "ServingLoop":
        self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # The last step may take long, and the event loop's streams end meanwhile.
        await asyncio.to_thread(self.close)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def metrics(self) -> LoopMetrics:
        """Metrics at the end of the last step; what was submitted since counts as waiting."""
        return self._metrics

    def _check_open(self) -> None:
        if self._cause is not None:
            raise EngineDeadError(str(self._cause)) from self._cause.__cause__
        if self._closed:
            raise RuntimeError("the serving loop is closed")

    def _new_name(self) -> str:
        """A name that no caller has given to a request of its own."""
        while (name := f"request-{next(self._numbers)}") in self._requests:
            pass
        return name

    def _abort(self, request: Request) -> None:
        if not self._access.in_own_process:
            return
        with self._inbox:
            if self._requests.get(request.request_id) is request:
                self._aborted.append(request)
                self._inbox.notify()

    def _note_wait(self, request: Request) -> None:
        """Warns once of a caller that waits for a loop that nothing runs, yet."""
        with self._inbox:
            warn = not (self._stepped or self._closed or self._warned)
            self._warned = self._warned or warn
        if warn:
            logger.warning(
                "request %r is waited for, but nothing runs the serving loop: call start(), use "
                "it in a with block, or call step()",
                request.request_id,
            )

    def _run(self) -> None:
        while True:
            with self._inbox:
                self._inbox.wait_for(
                    lambda: self._closed or self._arrived or self._aborted or self._engine.has_work
                )
                if self._closed:
                    return
            try:
                self._access.run(self._step)
            except BaseException as error:
                # No request may wait for a thread that is gone.
                logger.exception("the serving loop has ended")
                cause = EngineDeadError(f"the serving loop has ended: {describe_error(error)}")
                cause.__cause__ = error
                drop_tracebacks(cause)
                with self._inbox:
                    self._cause, self._closed = cause, True
                self._access.run(self._end)
                return

    def _step(self) -> bool:
        if self._interrupted:
            # Once more while the interruption was dealt with.
            self._end_interrupted(None)
        self._interrupted = True
        try:
            self._take_in()
            self._hand_out(self._engine.step())
        except BaseException as error:
            self._end_interrupted(error if isinstance(error, Exception) else None)
            raise
        self._interrupted = False
        with self._inbox:
            return bool(self._arrived or self._aborted or self._engine.has_work)

    def _end_interrupted(self, error: Exception | None) -> None:
        """Ends all that have been taken in, wherever an interruption or error came."""
        with self._inbox:
            arrived = set(self._arrived)
            taken_in = [one for one in self._requests.values() if one not in arrived]
        for request in taken_in:
            self._engine.requests.end(request, error, step_failed=True)
        if self._engine.has_work:  # It was not in the engine's step, which has done so.
            self._engine.abort_all()
        self._hand_out(taken_in)
        self._interrupted = False

    def _take_in(self) -> None:
        with self._inbox:
            arrived, self._arrived = self._arrived, deque()
            aborted, self._aborted = self._aborted, deque()
        for request in arrived:
            self._engine.add(request)
        for request in aborted:
            if not request.finished:
                self._engine.abort(request)
        self._hand_out(aborted)

    def _hand_out(self, changed: Iterable[Request]) -> None:
        """Notifies callers of what has grown or ended, after the metrics are updated."""
        self._metrics = self._engine.metrics()
        for request in changed:
            with self._inbox:
                stream = self._streams.get(request.request_id)
                if stream is None or self._requests[request.request_id] is not request:
                    continue
                if request.finished:
                    del self._streams[request.request_id], self._requests[request.request_id]
            stream.notify()

    def _end(self) -> None:
        """Ends all requests, and frees the engine's memory."""
        with self._inbox:
            rest, arrived = list(self._requests.values()), list(self._arrived)
            self._arrived.clear()
        for request in arrived:
            self._engine.requests.add(request)
        for request in rest:
            self._engine.requests.end(request, self._cause, step_failed=self._cause is not None)
        self._engine.close()
        self._hand_out(rest)


def _weakly(method: Callable[[Request], None]) -> Callable[[Request], None]:
    """A method of a loop, which does not keep the loop, and does nothing once that is gone."""
    reference = weakref.WeakMethod(method)

    def call(request: Request) -> None:
        found = reference()
        if found is not None:
            found(request)

    return call


def _fail_orphans(streams: Mapping[str, RequestStream]) -> None:
    """Fails the requests of a loop that nothing refers to: no step will follow."""
    for stream in list(streams.values()):
        stream.fail(RuntimeError("its serving loop was deleted: keep a reference to it"))
