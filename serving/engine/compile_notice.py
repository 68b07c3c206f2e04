"""Notice that something is compiled, for whoever waits meanwhile."""

import contextlib
import contextvars
import logging
import threading
from collections.abc import Iterator

import jax
from tqdm import tqdm

from glm53.terminal import terminal_columns

logger = logging.getLogger(__name__)

PATIENCE_SECONDS = 2.0
"""Seconds without a notice: programs that are kept are traced and read in less."""

_given = contextvars.ContextVar("given", default=False)


@contextlib.contextmanager
def compile_notice(what: str) -> Iterator[None]:
    """Says what is compiled in the block, if that takes a while: on a terminal, by a line that goes
    when the block ends, else by a warning in the log. One within another says nothing.

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
    text, place = f"compiling {what} for first use", _where_kept()
    columns = terminal_columns()
    if not columns:
        logger.warning("%s%s", text, place)
        return
    if len(f"00:00 {text}{place}") < columns:
        text += place
    with tqdm(bar_format="{elapsed} {desc}", desc=text, leave=False) as line:
        while not done.wait(1):
            line.refresh()


def _where_kept() -> str:
    config = jax.config
    kept = config.jax_enable_compilation_cache and config.jax_compilation_cache_dir
    return f" (kept in {kept})" if kept else ""
