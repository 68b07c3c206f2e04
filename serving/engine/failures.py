"""Steps that fail one after another, and when to give up."""

import logging

from serving.errors import EngineDeadError, describe_error

logger = logging.getLogger(__name__)

MAX_FAILURES = 5
"""Steps that may fail without a token between them."""


class FailureRun:
    """The failed steps since the last token: after `MAX_FAILURES` the engine stops."""

    def __init__(self) -> None:
        self._errors: list[Exception] = []

    @property
    def cause(self) -> Exception | None:
        """The first failure, once the engine has stopped."""
        return self._errors[0] if len(self._errors) >= MAX_FAILURES else None

    def check_alive(self) -> None:
        """Refuses further requests once the engine has stopped. Any thread may call it.

        Raises:
            EngineDeadError: it has.
        """
        if self.cause is not None:
            raise EngineDeadError(self._message) from self.cause

    def add(self, error: Exception) -> None:
        """Notes and logs a failed step; the first of a run with its traceback."""
        logger.error(
            "a step failed, and all requests that had started: %s",
            describe_error(error),
            exc_info=None if self._errors else error,
        )
        self._errors.append(error)
        if len(self._errors) == MAX_FAILURES:
            logger.error("%s", self._message)

    def end(self) -> None:
        """Ends the run of failures, as a token has come."""
        self._errors.clear()

    @property
    def _message(self) -> str:
        return (
            f"the engine has stopped: {MAX_FAILURES} steps failed without a token between them, "
            f"the first with: {describe_error(self._errors[0])}"
        )
