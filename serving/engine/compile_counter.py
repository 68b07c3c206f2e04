"""Counter of the programs that jax compiles in this process: serving must compile none."""

import threading

import jax.monitoring

_COMPILATION = "/jax/core/compile/backend_compile_duration"

_lock = threading.Lock()
_compiled = 0
_listening = False


class CompileCounter:
    """Counts programs compiled, or read from the persistent cache, since it was made.

    All of the process count: jax does not say for whom it compiles.
    """

    def __init__(self) -> None:
        _listen()
        self._before = _compiled

    @property
    def count(self) -> int:
        """Programs since the counter was made."""
        return _compiled - self._before


def _listen() -> None:
    """Registers with jax, once a process: counters have no end at which to unregister."""
    global _listening
    with _lock:
        if not _listening:
            jax.monitoring.register_event_duration_secs_listener(_on_duration)
            _listening = True


def _on_duration(event: str, duration_secs: float, **_: str | int) -> None:
    global _compiled
    if event == _COMPILATION:
        with _lock:
            _compiled += 1
