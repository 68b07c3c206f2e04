"""Access to an engine: one thread at a time, of the process that made it."""

import os
import threading
from collections import deque
from collections.abc import Callable

_first_process: int | None = None
"""The process that has made the first engine, and in which jax has its threads since."""


class EngineAccess:
    """Lock around an engine, which threads get in turn.

    It holds no reference to the engine, so that iterators and streams may keep it.

    Args:
        owner: name of the class that the engine is in, for errors.

    Raises:
        RuntimeError: this is a forked child of a process that has made an engine.
    """

    def __init__(self, owner: str) -> None:
        global _first_process
        if _first_process is None:
            _first_process = os.getpid()
        self._owner, self._process = owner, _first_process
        # Re-entrant locks: a thread that does not have one cannot release it.
        self._lock = threading.RLock()
        # Held by whoever gets the other lock next, whose signal handlers may overtake it.
        self._next_in_turn = threading.RLock()
        self._holder: int | None = None  # the thread in the middle of an action
        self._deferred: deque[Callable[[], object]] = deque()
        self.check_process()

    @property
    def in_own_process(self) -> bool:
        """Whether this is the process that made the engine."""
        return os.getpid() == self._process

    @property
    def is_held(self) -> bool:
        """Whether this thread has access: it comes from a signal handler or a finalizer."""
        return self._holder == threading.get_ident()

    def check_process(self) -> None:
        """Refuses a forked child, which has none of the threads of jax, and would wait for them.

        Raises:
            RuntimeError: this is another process.
        """
        if not self.in_own_process:
            raise RuntimeError(
                f"process {os.getpid()} was forked from process {self._process}, which had made an "
                f"engine: jax does not work in a forked child. Start the process with "
                f"multiprocessing.get_context('spawn'), and make its own {self._owner} there"
            )

    def run[Result](self, action: Callable[[], Result]) -> Result:
        """Runs an action once it is this thread's turn.

        Raises:
            RuntimeError: this is a forked child; or this thread has access already, and an action
                in the middle of another would find the engine half changed.
        """
        self.check_process()
        if self.is_held:
            raise RuntimeError(
                f"the {self._owner} was called from inside its own step, as by a signal handler"
            )
        thread = threading.get_ident()
        try:
            # A thread that comes back at once waits here until the one that has waited is in.
            with self._next_in_turn:
                self._lock.acquire()
            self._holder = thread
            return action()
        finally:
            # Nothing is called before the release: an interruption could come in its stead.
            if self._holder == thread:
                self._holder = None
            try:  # noqa: SIM105 suppress() is a call
                self._lock.release()
            except RuntimeError:  # The interruption came before this thread had it.
                pass
            self._run_deferred()

    def defer(self, action: Callable[[], object]) -> None:
        """Runs an action now if no thread has access, or else at the end of the holder's turn.

        Never waits, so finalizers and signal handlers may call it. A forked child does nothing.
        """
        if self.in_own_process:
            self._deferred.append(action)
            self._run_deferred()

    def _run_deferred(self) -> None:
        thread = threading.get_ident()
        # Again after the lock is released: what came while it was held was left to its holder.
        while self._deferred and self._holder != thread:
            try:
                if not self._lock.acquire(blocking=False):
                    return
                self._holder = thread
                while self._deferred:
                    self._deferred.popleft()()
            finally:
                if self._holder == thread:
                    self._holder = None
                try:  # noqa: SIM105 suppress() is a call
                    self._lock.release()
                except RuntimeError:  # It was not to be had.
                    pass
