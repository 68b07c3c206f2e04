"""A request that a serving loop runs, as its caller sees it."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import AbstractContextManager

from serving.engine_access import EngineAccess
from serving.errors import GenerationError, describe_error
from serving.requests.outputs import RequestOutput
from serving.requests.request import Request


class RequestStream:
    """The output of a request, as it grows. Any thread, and any event loop, may use it.

    Iterating, with `for` or `async for`, gives the output so far whenever it has grown since it was
    last asked for, and at last the finished one. A slow reader may skip intermediate outputs but
    never misses tokens. An iteration that is left early aborts the request, and one of a request
    that fails ends with a GenerationError. `await` gives the finished output alone, and aborts the
    request when it is cancelled.

    In a forked child every use raises a RuntimeError.

    Attributes:
        request_id: the request's name.
    """

    def __init__(
        self,
        request: Request,
        output_lock: AbstractContextManager[object],
        access: EngineAccess,
        *,
        abort: Callable[[Request], None],
        note_wait: Callable[[Request], None],
    ) -> None:
        self.request_id = request.request_id
        self._request, self._output_lock = request, output_lock
        self._access, self._abort, self._note_wait = access, abort, note_wait
        self._changed = threading.Condition()
        self._num_tokens = 0  # as of the last step
        self._ended = False
        self._wakers: set[Callable[[], None]] = set()

    @property
    def finished(self) -> bool:
        """Whether nothing will be added."""
        return self._ended

    def output(self) -> RequestOutput:
        """Output so far. Of a request that failed, it has `error`."""
        self._access.check_process()
        with self._output_lock:
            return self._request.output()

    def result(self, timeout: float | int | None = None) -> RequestOutput:
        """Waits for the finished output.

        Args:
            timeout: seconds to wait at most; the request goes on after them.

        Raises:
            TimeoutError: it is not finished by then.
            GenerationError: the request failed.
        """
        self._begin_wait()
        with self._changed:
            if not self._changed.wait_for(lambda: self._ended, timeout):
                raise TimeoutError(
                    f"request {self.request_id!r} is not finished after {timeout} seconds"
                )
        return self._final()

    def abort(self) -> None:
        """Ends the request; its output then has `finish_reason` "abort", or is as it was if it had
        ended."""
        self._access.check_process()
        self._abort(self._request)

    def __iter__(self) -> Generator[RequestOutput]:
        seen = 0
        try:
            self._begin_wait()
            while True:
                self._access.check_process()
                with self._changed:
                    self._changed.wait_for(lambda seen=seen: self._ended or self._num_tokens > seen)
                    ended, seen = self._ended, self._num_tokens
                if ended:
                    break
                output = self.output()
                seen = max(seen, output.num_output_tokens)  # may be ahead of what was returned
                # The finished one comes when the engine has closed it.
                if not output.finished:
                    yield output
        finally:
            if not self._ended:
                self._abort(self._request)
        yield self._final()

    async def __aiter__(self) -> AsyncGenerator[RequestOutput]:
        seen = 0
        with self._waking() as changed:
            while not self._ended:
                changed.clear()
                count = self._num_tokens
                if count <= seen:
                    if not self._ended:
                        await changed.wait()
                    continue
                output = self.output()
                seen = max(count, output.num_output_tokens)
                if not output.finished:
                    yield output
        yield self._final()

    def __await__(self) -> Generator[object, None, RequestOutput]:
        return self._wait().__await__()

    async def _wait(self) -> RequestOutput:
        with self._waking() as changed:
            while not self._ended:
                changed.clear()
                if not self._ended:
                    await changed.wait()
        return self._final()

    @contextlib.contextmanager
    def _waking(self) -> Generator[asyncio.Event]:
        """An event of this event loop, set at each change. Aborts what is not finished by its
        end."""
        self._begin_wait()
        loop, changed = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            try:
                loop.call_soon_threadsafe(changed.set)
            except RuntimeError:  # The event loop is closed, and the iteration with it.
                self._wakers.discard(wake)
                if not self._ended:
                    self._abort(self._request)

        with self._changed:
            self._wakers.add(wake)
        try:
            yield changed
        finally:
            self._wakers.discard(wake)
            if not self._ended:
                self._abort(self._request)

    def _begin_wait(self) -> None:
        self._access.check_process()
        if not self._ended:
            self._note_wait(self._request)

    def fail(self, error: Exception) -> None:
        """Ends the request with an error; for what runs it, when it no longer can."""
        with self._output_lock:
            self._request.end(error, step_failed=True)
        self.notify()

    def notify(self) -> None:
        """Notifies those that wait that the request's output has grown, or ended; for the loop."""
        with self._changed:
            self._num_tokens = self._request.num_output_tokens
            self._ended = self._request.finished
            self._changed.notify_all()
            wakers = list(self._wakers)
        for wake in wakers:
            wake()

    def _final(self) -> RequestOutput:
        error = self._request.error
        if error is not None:
            message = f"request {self.request_id!r} failed: {describe_error(error)}"
            raise GenerationError(message) from error
        return self.output()
