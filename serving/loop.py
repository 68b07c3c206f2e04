"""The serving loop for programs that embed it: requests from any thread, outputs as they grow."""

import atexit
import itertools
import logging
import threading
from collections import deque
from collections.abc import Iterable
from types import TracebackType

from glm53.config import GLMConfig
from glm53.tokenizer import Tokenizer
from serving.engine import Engine
from serving.engine_options import EngineOptions
from serving.metrics import LoopMetrics
from serving.request import Request
from serving.request_reader import Prompt
from serving.request_stream import RequestStream
from serving.sampling_params import SamplingParams

logger = logging.getLogger(__name__)


class ServingLoop:
    """A loaded model that serves requests from any number of threads and event loops.

    Either `start` gives it a thread of its own, until `close`; as a context manager it does both.
    Or the program calls `step`, from one thread at a time.

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
        ValueError: an option is refused; the message names it.
    """

    def __init__(self, options: EngineOptions, *, warm_up: bool = True) -> None:
        self._engine = Engine(options, warm_up=warm_up)
        self.config: GLMConfig = self._engine.config
        self.tokenizer: Tokenizer | None = self._engine.tokenizer
        self.max_model_len: int = self._engine.max_model_len
        self._stepping = threading.Lock()  # Held by whoever is in the engine.
        self._inbox = threading.Condition()  # Guards what follows.
        self._arrived: deque[Request] = deque()
        self._aborted: deque[Request] = deque()
        self._streams: dict[str, RequestStream] = {}
        self._requests: dict[str, Request] = {}
        self._thread: threading.Thread | None = None
        self._closed = False
        self._numbers = itertools.count()
        self._metrics = self._engine.metrics()

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
            priority: higher goes first, and is parked last.
            request_id: its name; None gives it one that is new.

        Returns:
            Its output as it grows.

        Raises:
            ValueError, TypeError: the prompt or a parameter is refused, or a request that is not
                done has this name. Nothing has been queued then.
            RuntimeError: the loop is closed.
        """
        if not isinstance(request_id, str | None):
            raise TypeError(f"request_id must be text, got {request_id!r}")
        params = SamplingParams() if params is None else params
        request = self._engine.reader.read(request_id or "", prompt, params, priority)
        with self._inbox:
            if self._closed:
                raise RuntimeError("the serving loop is closed")
            if request_id is None:
                request.request_id = self._new_name()
            name = request.request_id
            if name in self._requests:
                raise ValueError(f"request_id {name!r} is the name of a request that is not done")
            stream = RequestStream(request, self._engine.output_lock, self._abort)
            self._requests[name], self._streams[name] = request, stream
            self._arrived.append(request)
            self._inbox.notify()
        return stream

    def abort(self, request_id: str) -> bool:
        """Ends a request, in whatever state, before the next step; returns at once.

        Returns:
            Whether there is such a request that is not done.
        """
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
            RuntimeError: the loop runs in its own thread, or is closed.
        """
        if self._closed:
            raise RuntimeError("the serving loop is closed")
        if self._thread is not None:
            raise RuntimeError("the serving loop runs in its own thread")
        return self._step()

    def start(self) -> None:
        """Has the loop run in a thread of its own, which sleeps while there is nothing to do. The
        end of the program closes it.

        Raises:
            RuntimeError: it runs already, or is closed.
        """
        with self._inbox:
            if self._thread is not None or self._closed:
                raise RuntimeError("the serving loop runs already, or is closed")
            self._thread = threading.Thread(target=self._run, name="serving-loop", daemon=True)
            self._thread.start()
        # A thread that is in the device when the interpreter goes takes the process down.
        atexit.register(self.close)

    def close(self) -> None:
        """Aborts all requests and ends the thread, if there is one; waits for its last step."""
        with self._inbox:
            self._closed = True
            self._inbox.notify()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        atexit.unregister(self.close)
        self._abort_rest()

    def __enter__(self) -> "ServingLoop":
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def metrics(self) -> LoopMetrics:
        """How the loop stood at the end of the last step; what was submitted since waits, too."""
        return self._metrics

    def _new_name(self) -> str:
        """A name that no caller has given to a request of its own."""
        while (name := f"request-{next(self._numbers)}") in self._requests:
            pass
        return name

    def _abort(self, request: Request) -> None:
        with self._inbox:
            if self._requests.get(request.request_id) is request:
                self._aborted.append(request)
                self._inbox.notify()

    def _run(self) -> None:
        while True:
            with self._inbox:
                self._inbox.wait_for(
                    lambda: self._closed or self._arrived or self._aborted or self._engine.has_work
                )
                if self._closed:
                    return
            try:
                self._step()
            except BaseException:
                # No request may wait for a thread that is gone.
                logger.exception("the serving loop has ended")
                with self._inbox:
                    self._closed = True
                self._abort_rest()
                return

    def _step(self) -> bool:
        with self._stepping:
            try:
                self._take_in()
                self._hand_out(self._engine.step())
            except BaseException:
                self._end_interrupted()
                raise
            with self._inbox:
                return bool(self._arrived or self._aborted or self._engine.has_work)

    def _end_interrupted(self) -> None:
        """Ends all that have been taken in, wherever an interruption came."""
        with self._inbox:
            arrived = set(self._arrived)
            taken_in = [one for one in self._requests.values() if one not in arrived]
        if self._engine.has_work:  # It was not in the engine's step, which has done so.
            self._engine.abort_all()
        for request in taken_in:
            self._engine.abort(request)
        self._hand_out(taken_in)

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
        """Tells callers of what has grown or ended; the metrics tell of it before they do."""
        self._metrics = self._engine.metrics()
        for request in changed:
            with self._inbox:
                stream = self._streams.get(request.request_id)
                if stream is None or self._requests[request.request_id] is not request:
                    continue
                if request.finished:
                    del self._streams[request.request_id], self._requests[request.request_id]
            stream.notify()

    def _abort_rest(self) -> None:
        with self._stepping:
            with self._inbox:
                rest = list(self._requests.values())
            self._take_in()
            for request in rest:
                if not request.finished:
                    self._engine.abort(request)
            self._hand_out(rest)
