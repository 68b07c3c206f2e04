"""A disk without room, for tests of what writers leave behind."""

import contextlib
import resource
from collections.abc import Iterator


@contextlib.contextmanager
def full_disk(room: int) -> Iterator[None]:
    """Fails writes of this process beyond the first `room` bytes of a file."""
    before, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (before, most))
