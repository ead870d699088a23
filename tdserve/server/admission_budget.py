"""The memory that requests take in this process while they wait; beyond a limit new ones are sent away."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from tdserve.base.errors import ServerBusyError

REQUEST_BYTES = 4096
"""What a small request takes beside its content while it waits: its message, coroutine, task and timer (measured)."""

SESSION_SHARE = 2
"""A session may hold this part of the limit: one client cannot take all of it."""


class Holder(Protocol):
    """A session, as the requests under way are counted.

    Attributes:
        held_nbytes: Of its requests.
    """

    held_nbytes: int


UNARY_WAIT_BYTES = 20_480
"""What a unary call that waits takes beyond ``REQUEST_BYTES``: gRPC keeps a stream for each (measured)."""


@dataclass
class _UnaryCalls:
    """The holder of unary calls that wait, of whatever client: they belong to no session."""

    held_nbytes: int = 0


class AdmissionBudget:
    """Counts the bytes of requests under way: of each its message and ``REQUEST_BYTES``.

    Args:
        limit_bytes: Of all of them together.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.nbytes = 0
        self._unary_calls = _UnaryCalls()

    @contextmanager
    def holding(self, holder: Holder, what: str, nbytes: int) -> Iterator[None]:
        """A block in which the process holds a request.

        Raises:
            ServerBusyError: There is no room for it, in all or in what its session may take.
        """
        nbytes += REQUEST_BYTES
        free, limit = self.limit_bytes - self.nbytes, self.limit_bytes
        share = limit // SESSION_SHARE
        if share - holder.held_nbytes < free:
            free, limit = share - holder.held_nbytes, share
            what = f"{what} of one session"
        if nbytes > free:
            raise ServerBusyError(what=f"{what}, in bytes", asked=nbytes, free=max(free, 0), limit=limit)
        with self.counting(holder, nbytes):
            yield

    @contextmanager
    def holding_unary(self, *, must_wait: bool) -> Iterator[None]:
        """A block in which a unary call waits, if it must.

        Raises:
            ServerBusyError: It must, and too many do already.
        """
        if must_wait:
            with self.holding(self._unary_calls, "calls that wait", UNARY_WAIT_BYTES):
                yield
        else:
            yield

    @contextmanager
    def counting(self, holder: Holder, nbytes: int) -> Iterator[None]:
        """A block in which the process holds what cannot be refused any more."""
        self.count(holder, nbytes)
        try:
            yield
        finally:
            self.count(holder, -nbytes)

    def count(self, holder: Holder, nbytes: int) -> None:
        """Counts bytes that are held from now on; a negative number of bytes that no longer are."""
        self.nbytes += nbytes
        holder.held_nbytes += nbytes
