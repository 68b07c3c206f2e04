"""The requests that an engine has taken and not ended."""

import threading
import time

from serving.engine.metrics import EngineCounters
from serving.requests.request import Request
from serving.requests.sequence import RequestSequence
from serving.scheduler import Sequence


class OpenRequests:
    """Requests that have not ended, apart from their rows.

    Everything else that it keeps can be built anew from this, so nothing here depends on the
    scheduler, the cache or the device.

    Args:
        counters: where ends are counted.

    Attributes:
        output_lock: held while outputs change, and nothing is waited for.
    """

    def __init__(self, counters: EngineCounters) -> None:
        self._counters = counters
        self._owners: dict[Sequence, Request] = {}  # in the order in which they came
        self._grown: dict[Request, None] = {}
        # A signal handler may read an output while its thread changes one.
        self.output_lock = threading.RLock()

    def __len__(self) -> int:
        """Sequences that have not ended."""
        return len(self._owners)

    @property
    def requests(self) -> list[Request]:
        """All, in the order in which they came."""
        return list(dict.fromkeys(self._owners.values()))

    @property
    def started(self) -> list[Request]:
        """Those with rows on the device: a sequence of theirs has had a slot."""
        started = (self._owners[part] for part in self._owners if part.opened is not None)
        return list(dict.fromkeys(started))

    @property
    def sequences(self) -> list[RequestSequence]:
        """All sequences, in the order in which they came."""
        parts = (part for request in self.requests for part in request.sequences)
        return [part for part in parts if part in self._owners]

    def add(self, request: Request) -> None:
        """Takes a request."""
        self._owners.update(dict.fromkeys(request.sequences, request))

    def owner(self, sequence: Sequence) -> Request:
        """The request of a sequence that has not ended."""
        return self._owners[sequence]

    def note_started(self, sequence: Sequence) -> None:
        """Notes when the request of a sequence starts."""
        request = self._owners[sequence]
        request.started = request.started or time.monotonic()

    def note_grown(self, request: Request) -> None:
        """Notes that a request's output has grown or ended."""
        self._grown[request] = None

    def take_grown(self) -> list[Request]:
        """Those noted since the last call."""
        grown, self._grown = self._grown, {}
        return list(grown)

    def end(self, request: Request, error: Exception | None, *, step_failed: bool) -> None:
        """Ends what of a request is not done, see `Request.end`, and leaves it here."""
        with self.output_lock:
            request.end(error, step_failed=step_failed)

    def remove(self, sequence: RequestSequence) -> bool:
        """Takes out a sequence that has ended; whether it was here."""
        request = self._owners.pop(sequence, None)
        if request is None:
            return False
        self.note_grown(request)
        reason = "error" if request.error is not None else sequence.finish_reason
        self._counters.finished[reason or "abort"] += 1
        return True
