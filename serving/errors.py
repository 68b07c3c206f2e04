"""Errors of requests and engines, and what is kept of an error."""


class GenerationError(RuntimeError):
    """A request failed while it ran. `__cause__` is what it failed with."""


class EngineDeadError(RuntimeError):
    """The engine has stopped, and a new `LLM` or `ServingLoop` is needed. `__cause__` is why."""


def describe_error(error: BaseException) -> str:
    """An error's message, or its type's name if it has none."""
    return str(error) or type(error).__name__


def drop_tracebacks(error: BaseException) -> None:
    """Has an error that is kept hold no frames, whose variables would keep the engine."""
    errors: list[BaseException | None] = [error]
    dropped: set[int] = set()
    while errors:
        one = errors.pop()
        if one is not None and id(one) not in dropped:
            dropped.add(id(one))
            one.__traceback__ = None
            errors += [one.__cause__, one.__context__]
