"""The memory that requests take in this process while they wait; beyond a limit new ones are sent away."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tdserve.errors import ServerBusyError

UNCOUNTED_BYTES = 4096
"""A client has at most 64 writes under way: of this size they take less memory than its session."""


class HeldContent:
    """Counts the bytes of requests under way.

    Args:
        limit_bytes: Of all of them together.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.nbytes = 0

    @contextmanager
    def holding(self, what: str, nbytes: int) -> Iterator[None]:
        """A block in which the process holds a request.

        Raises:
            ServerBusyError: There is no room for it.
        """
        if nbytes <= UNCOUNTED_BYTES:
            yield
            return
        free = self.limit_bytes - self.nbytes
        if nbytes > free:
            raise ServerBusyError(what=what, asked=nbytes, free=free, limit=self.limit_bytes)
        self.nbytes += nbytes
        try:
            yield
        finally:
            self.nbytes -= nbytes
