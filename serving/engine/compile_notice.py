"""Notice that something is compiled, for whoever waits meanwhile."""

import contextlib
import contextvars
import logging
import sys
import threading
from collections.abc import Iterator

import jax
from tqdm import tqdm

logger = logging.getLogger(__name__)

PATIENCE_SECONDS = 2.0
"""How long nothing is said: programs that are kept are traced and read in less."""

_given = contextvars.ContextVar("given", default=False)


@contextlib.contextmanager
def compile_notice(what: str) -> Iterator[None]:
    """Says what is compiled in the block, if that takes a while: a line that goes when the block
    ends on a terminal, else a warning in the log. One within another says nothing.

    Args:
        what: what may have to be compiled.
    """
    if _given.get():
        yield
        return
    done = threading.Event()
    thread = threading.Thread(target=_give, args=(what, done), name="compile-notice", daemon=True)
    thread.start()
    try:
        with without_compile_notices():
            yield
    finally:
        done.set()
        thread.join()


@contextlib.contextmanager
def without_compile_notices() -> Iterator[None]:
    """Context whose owner says by itself what is compiled."""
    token = _given.set(True)
    try:
        yield
    finally:
        _given.reset(token)


def _give(what: str, done: threading.Event) -> None:
    if done.wait(PATIENCE_SECONDS):
        return
    text = f"compiling {what} for its first use{_where_kept()}"
    if not sys.stderr.isatty():
        logger.warning("%s", text)
        return
    with tqdm(bar_format="{desc}: {elapsed}", desc=text, leave=False) as line:
        while not done.wait(1):
            line.refresh()


def _where_kept() -> str:
    config = jax.config
    kept = config.jax_enable_compilation_cache and config.jax_compilation_cache_dir
    return f" (kept in {kept})" if kept else ""
