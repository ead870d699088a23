"""A limit on the memory that waiting requests take in this process; requests beyond it are refused."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

from tdserve.base.errors import ServerBusyError

REQUEST_BYTES = 4096
"""Memory of a small waiting request besides its content: message, coroutine, task and timer (measured)."""

SESSION_SHARE = 2
"""A session may hold at most the limit divided by this, so that one client cannot take all of it."""


class Holder(Protocol):
    """The part of a session that counts its requests under way.

    Attributes:
        held_nbytes: Bytes of its requests.
    """

    held_nbytes: int


UNARY_WAIT_BYTES = 20_480
"""Memory of a waiting unary call beyond ``REQUEST_BYTES``: gRPC keeps a stream for each (measured)."""


@dataclass
class _UnaryCalls:
    """The holder of the waiting unary calls of all clients: they belong to no session."""

    held_nbytes: int = 0


class _Counted:
    """A block during which bytes count. Every request enters one: a generator would cost three times as much."""

    __slots__ = ("_budget", "_holder", "_nbytes")

    def __init__(self, budget: AdmissionBudget, holder: Holder, nbytes: int) -> None:
        self._budget = budget
        self._holder = holder
        self._nbytes = nbytes

    def __enter__(self) -> None:
        self._budget.count(self._holder, self._nbytes)

    def __exit__(self, *_: object) -> None:
        self._budget.count(self._holder, -self._nbytes)


class AdmissionBudget:
    """The bytes of all requests under way. Each counts with its message and ``REQUEST_BYTES``.

    Args:
        limit_bytes: Limit for all requests together, bytes.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.nbytes = 0
        self._unary_calls = _UnaryCalls()

    def admit(self, holder: Holder, what: str, nbytes: int) -> _Counted:
        """Returns the context of a request that counts.

        Raises:
            ServerBusyError: The limit, or the share of its session, has no room for it.
        """
        nbytes += REQUEST_BYTES
        free, limit = self.limit_bytes - self.nbytes, self.limit_bytes
        share = limit // SESSION_SHARE
        if share - holder.held_nbytes < free:
            free, limit = share - holder.held_nbytes, share
            what = f"{what} of one session"
        if nbytes > free:
            raise ServerBusyError(what=f"{what}, in bytes", asked=nbytes, free=max(free, 0), limit=limit)
        return _Counted(self, holder, nbytes)

    def admit_unary(self, *, must_wait: bool) -> AbstractContextManager[None]:
        """Returns the context of a unary call, which counts if it has to wait.

        Raises:
            ServerBusyError: It has to wait, and too many calls wait already.
        """
        return self.admit(self._unary_calls, "calls that wait", UNARY_WAIT_BYTES) if must_wait else nullcontext()

    def count_during(self, holder: Holder, nbytes: int) -> _Counted:
        """Counts bytes that cannot be refused any more; a context manager."""
        return _Counted(self, holder, nbytes)

    def count(self, holder: Holder, nbytes: int) -> None:
        """Adds bytes that are held from now on; a negative number removes bytes that are no longer held."""
        self.nbytes += nbytes
        holder.held_nbytes += nbytes
