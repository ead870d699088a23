"""A limit on the memory that waiting requests take in this process; requests beyond it are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Protocol

from tdserve.base.errors import ServerBusyError, TooLargeError
from tdserve.messages.content import MAX_INLINE_VALUES_BYTES
from tdserve.v1 import control_pb2

REQUEST_BYTES = 4096
"""Memory of a small waiting request besides its content: message, coroutine, task and timer (measured)."""

SESSION_SHARE = 2
"""A session may hold at most the limit divided by this, so that one client cannot take all of it."""


VALUES_SHARE = 4
"""The values of one write may have the limit divided by this: the worker that stores them has them twice in memory, as
they came and as pages of the database."""


ANSWER_SHARE = 2
"""Answers to reads have a budget of their own, the memory limit divided by this: waiting writes must not keep out the
reads that they wait for."""


class Holder(Protocol):
    """The part of a session that counts its requests under way.

    Attributes:
        held_nbytes: Bytes of its requests.
    """

    held_nbytes: int


ANSWER_BYTES = 100 * 1024
"""Memory of the answer to a read on its way to the client: what is larger travels apart."""

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
            ServerBusyError: The limit, or the share of its session, has no room for it now.
            TooLargeError: The share of a session is less than that.
        """
        nbytes += REQUEST_BYTES
        free, limit = self.limit_bytes - self.nbytes, self.limit_bytes
        share = limit // SESSION_SHARE
        if nbytes > share:
            what = f"{what}, in bytes (a share of --memory-limit)"
            raise TooLargeError(what=what, asked=nbytes, free=share)
        if share - holder.held_nbytes < free:
            free, limit = share - holder.held_nbytes, share
            what = f"{what} of one session"
        if nbytes > free:
            raise ServerBusyError(what=f"{what}, in bytes", asked=nbytes, free=max(free, 0), limit=limit)
        return _Counted(self, holder, nbytes)

    def check_values(self, content: control_pb2.Content) -> None:
        """Checks the size of the values of a write, which a data worker will hold.

        Raises:
            TooLargeError: No write may have that many.
        """
        nbytes, limit = max(content.values_nbytes, content.spool_nbytes), self.limit_bytes // VALUES_SHARE
        if nbytes > limit:
            what = "non-tensor values of one write, in bytes (a share of --memory-limit): write fewer rows at a time"
            raise TooLargeError(what=what, asked=nbytes, free=limit)

    def admit_unary(self, *, must_wait: bool) -> AbstractContextManager[None]:
        """Returns the context of a unary call, which counts if it has to wait.

        Raises:
            ServerBusyError: It has to wait, and too many calls wait already.
        """
        return self.admit(self._unary_calls, "calls that wait", UNARY_WAIT_BYTES) if must_wait else nullcontext()

    def admit_answer(self, holder: Holder, accepted: control_pb2.Accepted, *, takes_values: bool) -> _Counted:
        """Returns the context of the answer to a read, of which ``accepted`` is a part; errors as in ``admit``.

        Without it a client that asks for many reads and takes no answers would leave all of them in memory.
        """
        nbytes = ANSWER_BYTES if takes_values else MAX_INLINE_VALUES_BYTES
        return self.admit(holder, "the answer to a read", nbytes + accepted.ByteSize())

    @contextmanager
    def count_growing(self, holder: Holder, what: str) -> Iterator[Callable[[int], None]]:
        """Yields what counts each further part of something that grows, until the block ends; errors as in ``admit``,
        raised by that."""
        total = 0

        def grow(nbytes: int) -> None:
            nonlocal total
            self.admit(holder, what, nbytes)
            total += nbytes
            self.count(holder, nbytes)

        try:
            yield grow
        finally:
            self.count(holder, -total)

    def hold_answer(self, nbytes: int) -> Callable[[], None]:
        """Counts the answer to a unary call until what it returns is called, once.

        Raises:
            ServerBusyError, TooLargeError: As in ``admit``.
        """
        counted = self.admit(self._unary_calls, "answers to calls", nbytes)
        counted.__enter__()
        return lambda: counted.__exit__(None, None, None)

    def count_during(self, holder: Holder, nbytes: int) -> _Counted:
        """Counts bytes that cannot be refused any more; a context manager."""
        return _Counted(self, holder, nbytes)

    def count(self, holder: Holder, nbytes: int) -> None:
        """Adds bytes that are held from now on; a negative number removes bytes that are no longer held."""
        self.nbytes += nbytes
        holder.held_nbytes += nbytes


def make_budgets(limit_bytes: int) -> tuple[AdmissionBudget, AdmissionBudget]:
    """Returns the budget of requests, and that of answers."""
    return AdmissionBudget(limit_bytes), AdmissionBudget(limit_bytes // ANSWER_SHARE)
