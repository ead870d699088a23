"""A limit on the memory of non-tensor values that a data worker has read and not sent yet."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

from tdserve.base.errors import ServerBusyError, TooLargeError

READ_SHARE = 2
"""A worker's reads of values may take its memory limit divided by this."""

NUM_COPIES = 2
"""Copies of values that are read at the same time: as they lie in the database, and as one message."""


class ReadValues:
    """The values of one read; called with the size of each further part, before the next is read.

    Raises (the call):
        TooLargeError: No read may have that many.
        ServerBusyError: Other reads have them now.
    """

    def __init__(self, budget: ValuesBudget) -> None:
        self._budget = budget
        self.nbytes = 0

    def __call__(self, nbytes: int) -> None:
        self.nbytes += self._budget.take(nbytes, already=self.nbytes)


class ValuesBudget:
    """The bytes of values of all reads under way. Threads: safe.

    Args:
        limit_bytes: Most bytes of all of them together; of one, too.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes // NUM_COPIES
        self._nbytes = 0
        self._lock = Lock()

    @contextmanager
    def begin_read(self) -> Iterator[ReadValues]:
        """Yields what counts the values of a read; they are given back when the block ends."""
        read = ReadValues(self)
        try:
            yield read
        finally:
            with self._lock:
                self._nbytes -= read.nbytes

    def take(self, nbytes: int, *, already: int) -> int:
        """Counts more values of a read that has ``already`` some; returns ``nbytes``. Errors as in ``ReadValues``."""
        limit = self._limit_bytes
        if already + nbytes > limit:
            what = "the values of one read, in bytes (a share of --memory-limit): read fewer rows or keys at a time"
            raise TooLargeError(what=what, asked=already + nbytes, free=limit)
        with self._lock:
            if self._nbytes + nbytes > limit:
                free = max(limit - self._nbytes, 0)
                raise ServerBusyError(what="values of reads, in bytes", asked=nbytes, free=free, limit=limit)
            self._nbytes += nbytes
        return nbytes
