"""Errors of requests and engines, and what is kept of an error."""

import traceback


class GenerationError(RuntimeError):
    """A request failed while it ran. `__cause__` is what it failed with."""


class EngineDeadError(RuntimeError):
    """The engine has stopped, and a new `LLM` or `ServingLoop` is needed. `__cause__` is why."""


def describe_error(error: BaseException) -> str:
    """An error's message, or its type's name if it has none."""
    return str(error) or type(error).__name__


def release_frames(error: BaseException) -> None:
    """Has an error that is kept hold no local variables, among which the engine would be.

    Its traceback goes on telling where it was raised, within the functions that have ended.
    """
    errors: list[BaseException | None] = [error]
    released: set[int] = set()
    while errors:
        one = errors.pop()
        if one is None or id(one) in released:
            continue
        released.add(id(one))
        trace = one.__traceback__
        while trace is not None:
            try:
                trace.tb_frame.clear()
                break
            except RuntimeError:  # It is still executed, and cannot be cleared.
                trace = trace.tb_next
        one.__traceback__ = trace
        traceback.clear_frames(trace)
        errors += [one.__cause__, one.__context__]
