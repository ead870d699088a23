"""Rows on lease: taken from a table until they are acknowledged; if they are not, others may take them again.

``server/README.md`` has a reading order of leases.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from tdserve.base.deadline import Deadline
from tdserve.base.errors import (
    InvalidRequestError,
    TDServeError,
    TransferAbortedError,
    TransportError,
    WrongStateError,
)
from tdserve.client.content.devices import to_device
from tdserve.client.content.outer_modes import leave_modes_in_calls
from tdserve.client.session.calls.call_conditions import is_passing
from tdserve.client.session.finalizing import run_from_finalizer
from tdserve.client.session.session import Session
from tdserve.client.session.session_client import SessionClient
from tdserve.client.tables.change_requests import change
from tdserve.client.tables.draws.draw_arguments import check_lease_s
from tdserve.client.tables.draws.query import Query
from tdserve.client.tables.draws.sampled import LeaseGrant, Sampled
from tdserve.client.tables.draws.sampling import ask, receive_sample
from tdserve.client.tables.row_arguments import is_batch, to_generations, to_row_numbers
from tdserve.messages.content import GENERATION_KEY, INDEX_KEY
from tdserve.messages.row_numbers import encode_few_bytes
from tdserve.v1 import control_pb2

GIVE_BACK_TIMEOUT_S = 5.0
"""Longest time for giving rows back after their work has failed; after it, they are free when the session ends."""

NO_REQUEST = (1 << 64) - 1
"""A number that no request has."""

MIN_GIVE_BACK_S = 0.1
"""Time for the same in a call whose own time is over: a server that is up needs less."""


class Lease(NamedTuple):
    """Rows on lease, as requests name them.

    Attributes:
        rows: A tensordict of them, or a dict of their numbers and generations.
        grant: The request that leased the rows. If this client has leased them again since, this grant cannot
            acknowledge them. None: any lease of the session.
    """

    rows: Any
    grant: LeaseGrant | None = None


def take_rows(client: SessionClient, query: Query, num_rows: int, deadline: Deadline) -> Lease:
    """Takes rows on lease, with a tensordict of them; errors as in ``take_sampled``."""
    return build_taken(client, query, take_sampled(client, query, num_rows, deadline), deadline)


def take_and_acknowledge(client: SessionClient, query: Query, num_rows: int, deadline: Deadline) -> Any:
    """Takes rows, gives them the form that the caller asked for, and acknowledges them when only the return is left.

    Rows of a call that raises are given back. It takes others if the lease has ended in the meantime, as with a restart
    of the server. Errors as in ``take_sampled``.
    """
    while True:
        lease = take_rows(client, query, num_rows, deadline)
        try:
            found = query.hand_over(to_device(lease.rows, query.device))
            acknowledge(client, query, lease, deadline)
            return found
        except WrongStateError:
            if deadline.expired:
                raise
        except BaseException:  # this call does not return them
            give_back_later(client, query, lease)
            raise


def take_sampled(client: SessionClient, query: Query, num_rows: int, deadline: Deadline) -> Sampled:
    """Takes rows on lease.

    Raises:
        EndOfStreamError: The table was closed and is drained.
        DeadlineExceededError: There were not enough in time. Nothing was taken.
        InvalidRequestError, NotSupportedError: The rows cannot be combined as requested, or have values that this
            client may not decode. They were given back.
    """

    def attempt(session: Session, request: int, deadline: Deadline) -> Sampled:
        try:
            asked = ask(client, session, request, query, num_rows, num_batches=1, deadline=deadline)
            rows = receive_sample(client, session, request, asked, query=query, deadline=deadline)
            rows.grant = LeaseGrant(request, session.requests)
        except TDServeError:
            session.cancel(request)  # they may have been granted in an answer that is lost
            raise
        if rows.num_torn:
            give_back(client, query, name_rows(rows), compute_give_back_s(deadline), uncounts=True)
            raise TransferAbortedError(transfer=request, reason="rows were overwritten while they were copied")
        return rows

    return client.call(attempt, deadline, store=query.name)


def build_taken(client: SessionClient, query: Query, found: Sampled, deadline: Deadline) -> Lease:
    """Builds the tensordict of rows on lease; gives them back if that fails."""
    try:
        return Lease(found.build(), found.grant)
    except TDServeError:
        give_back(client, query, name_rows(found), compute_give_back_s(deadline))
        raise


def name_rows(rows: Sampled) -> Lease:
    """Returns the lease of rows with the numbers and generations that identify them."""
    generations = rows.tensors[(GENERATION_KEY,)].abs()  # negative for rows that changed while they were copied
    return Lease({INDEX_KEY: rows.tensors[(INDEX_KEY,)], GENERATION_KEY: generations}, rows.grant)


def to_numbers(rows: Any, *, table: str) -> NDArray[np.int64]:
    """Returns the numbers of rows that are acknowledged by hand. Raises InvalidRequestError, with what to give, if the
    argument names none."""
    try:
        return to_row_numbers(rows, table=table)
    except InvalidRequestError:
        remedy = f"give the batch that take(n, ack=False) returned, or rows of it with their {INDEX_KEY!r}"
        reason = f"{_describe_unnamed(rows)} names no rows of {table!r}; {remedy}, in one call for each batch"
        raise InvalidRequestError(argument="rows", reason=reason) from None


def _describe_unnamed(rows: Any) -> str:
    if is_batch(rows):
        return f"a batch without {INDEX_KEY!r}"
    if callable(getattr(rows, "give_back", None)):
        return "the result of take(n), which has an ack() of its own that the end of its block calls,"
    dtype = getattr(rows, "dtype", None)
    return type(rows).__name__ if dtype is None else f"{type(rows).__name__} of {dtype}"


def acknowledge_given(client: SessionClient, query: Query, rows: Any, timeout_s: float | None) -> None:
    """Acknowledges rows by hand; no rows are acknowledged at once. Errors as in ``to_numbers`` and ``acknowledge``."""
    deadline = client.make_deadline(timeout_s)
    if len(to_numbers(rows, table=query.name)):
        acknowledge(client, query, Lease(rows), deadline)


def acknowledge(client: SessionClient, query: Query, lease: Lease, deadline: Deadline) -> None:
    """Acknowledges rows.

    Raises:
        WrongStateError: This client does not hold them: they were acknowledged before, or its session was lost and they
            were given to others. Nothing was changed.
    """
    _change_lease(client, query, lease, deadline, acknowledge=_encode_lease(query, lease))


def renew(client: SessionClient, query: Query, lease: Lease, lease_s: float, deadline: Deadline) -> None:
    """Has the lease of rows last this many seconds from now on.

    Raises:
        WrongStateError: As in ``acknowledge``.
    """
    leased = _encode_lease(query, lease)
    leased.lease_s = lease_s
    _change_lease(client, query, lease, deadline, renew=leased)


def choose_lease_s(query: Query, lease_s: Any) -> float:
    """Returns for how long a lease is renewed; None: as long as the query had it last.

    Raises:
        InvalidRequestError: It is no time, or None although the lease has no end.
    """
    chosen = check_lease_s(lease_s) or query.lease_s
    if not chosen:
        raise InvalidRequestError(argument="lease_s", reason="the rows were taken without it, so it must be given here")
    return chosen


def compute_give_back_s(deadline: Deadline) -> float:
    """Returns how long giving rows back may keep a caller waiting, as a step of a call with this deadline."""
    return max(deadline.limit(GIVE_BACK_TIMEOUT_S), MIN_GIVE_BACK_S)


def give_back(client: SessionClient, query: Query, lease: Lease, timeout_s: float, *, uncounts: bool = False) -> None:
    """Gives rows of a lease back to others; if that fails, they are free when the session ends.

    Args:
        timeout_s: For how long the caller waits. Another thread continues for as long as the longest time, if a retry
            may help: the table is at rest, say.
        uncounts: Whether they do not count as sampled, because no caller has seen them.
    """
    leased = _encode_lease(query, lease)
    leased.uncounts = uncounts
    try:
        _change_lease(client, query, lease, Deadline.after(timeout_s), give_back=leased)
    except TDServeError as error:
        is_held = is_passing(error) and not isinstance(error, TransportError)  # which ends the session, and the lease
        if is_held and timeout_s < GIVE_BACK_TIMEOUT_S:
            give_back_later(client, query, lease, uncounts=uncounts)


def give_back_later(client: SessionClient, query: Query, lease: Lease, *, uncounts: bool = False) -> None:
    """Gives rows back from another thread; for what is dropped, and for servers that do not answer."""
    with suppress(TDServeError):  # the client was closed: its rows are free with its session
        client.run_later(partial(give_back, client, query, lease, GIVE_BACK_TIMEOUT_S, uncounts=uncounts))


def _encode_lease(query: Query, lease: Lease) -> control_pb2.Leased:
    numbers = to_row_numbers(lease.rows)
    return control_pb2.Leased(
        rows=encode_few_bytes(numbers),
        consumer=query.consumer,
        generations=to_generations(lease.rows, None, len(numbers)).tobytes(),
    )


def _change_lease(
    client: SessionClient, query: Query, lease: Lease, deadline: Deadline, **body: control_pb2.Leased
) -> None:
    """Requests a change of a lease, with the number of the request that took it. That has never been at a server to
    which the table has moved since: there the same number may be another request's, which has the rows now."""
    grant, (leased,) = lease.grant, body.values()

    def name_request(session: Session) -> None:
        if grant is not None:
            leased.request = grant.request if grant.numbers is session.requests else NO_REQUEST

    change(client, query.name, deadline, kind=query.kind, prepare=name_request, **body)


def describe_taken(taken: object, num_rows: int, name: str) -> str:
    """Returns what is shown of rows on lease before they are read, with what to do."""
    what = f"{num_rows} rows of {name!r} on lease"
    return f"<{type(taken).__name__}: {what}; use it in a with block or take .rows>"


def make_subscript_error(name: str) -> InvalidRequestError:
    """Returns the error of rows on lease that are read before they are taken out, with what to do."""
    reason = (
        "rows on lease are read within a block, 'with queue.take(n) as rows: rows[key]', which acknowledges them; "
        "or take them by take(n, ack=False), and call queue.ack(rows)"
    )
    return InvalidRequestError(argument=f"subscript of rows taken from {name!r}", reason=reason)


@leave_modes_in_calls
class LeaseBlock(ABC):
    """What blocks of rows on lease do, of one server or of several: acknowledged at a clean exit, given back if the
    block raises, unless it has done either itself; given back, too, if they are dropped before they were read.

    Args:
        name: Name of the table.
        query: By which they were taken.
        give_back_unseen: Gives them back from a finalizer; it must not refer to this.
    """

    def __init__(self, name: str, query: Query, give_back_unseen: Callable[[], None]) -> None:
        self._name = name
        self._query = query
        self._unseen = weakref.finalize(self, run_from_finalizer, give_back_unseen)
        self._unseen.atexit = False  # with their sessions the rows are free

    @property
    @abstractmethod
    def _content(self) -> Any:
        """The tensordict of the rows."""

    @property
    @abstractmethod
    def _is_over(self) -> bool:
        """Whether none is to be acknowledged or given back any more."""

    @abstractmethod
    def ack(self, *, timeout_s: float | None = None) -> None:
        """Acknowledges the rows; after an error it may be called again."""

    @abstractmethod
    def renew(self, lease_s: float | None = None, *, timeout_s: float | None = None) -> None:
        """Renews their lease."""

    @abstractmethod
    def give_back(self) -> None:
        """Gives the rows back to others."""

    @abstractmethod
    def give_back_later(self) -> None:
        """Gives the rows back without waiting for that."""

    def __getitem__(self, key: Any) -> NoReturn:
        """Raises InvalidRequestError with what to do instead: rows that are read have to be acknowledged."""
        raise make_subscript_error(self._name)

    @property
    def rows(self) -> Any:
        """The tensordict, or dict of arrays. From now on the caller must acknowledge the rows or give them back."""
        rows = self._query.hand_over(self._content)
        self._unseen.detach()  # only now: rows that were not returned are given back
        return rows

    def __enter__(self) -> Any:
        try:
            return self.rows
        except BaseException:  # no block begins, whose end would give them back
            self.give_back_later()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._is_over:  # the block has done it
            return
        if error is None:
            self.ack()
        else:
            self.give_back()


@leave_modes_in_calls
class Taken(LeaseBlock):
    """Rows on lease, as a context manager: acknowledged at a clean exit, given back if the block raises, unless the
    block has called :meth:`ack` or :meth:`give_back` itself.

    If it is dropped before its rows were read, for example because the result of ``take`` is not used, the rows are
    given back too.
    """

    def __init__(self, client: SessionClient, query: Query, lease: Lease) -> None:
        super().__init__(query.name, query, partial(give_back_later, client, query, lease))
        self._lease = lease
        self._client = client
        self._has_ended = False

    def __repr__(self) -> str:
        return describe_taken(self, len(self._lease.rows), self._name)

    @property
    def _content(self) -> Any:
        return self._lease.rows

    @property
    def _is_over(self) -> bool:
        return self._has_ended

    def _hold(self) -> Lease:
        self._unseen.detach()
        return self._lease

    def ack(self, *, timeout_s: float | None = None) -> None:
        """Acknowledges the rows. Raises WrongStateError if this client does not hold them any more.

        Args:
            timeout_s: None is the client's default.
        """
        acknowledge(self._client, self._query, self._hold(), self._client.make_deadline(timeout_s))
        self._has_ended = True

    def renew(self, lease_s: float | None = None, *, timeout_s: float | None = None) -> None:
        """Renews the lease: it lasts this many seconds from now on. Any thread may call it while another works.

        Args:
            lease_s: None is the ``lease_s`` of ``take``.
            timeout_s: None is the client's default.

        Raises:
            WrongStateError: This client does not hold the rows any more: the lease was over before, or they were
                acknowledged or given back.
        """
        seconds = choose_lease_s(self._query, lease_s)
        renew(self._client, self._query, self._lease, seconds, self._client.make_deadline(timeout_s))

    def give_back(self) -> None:
        """Gives the rows back to others."""
        give_back(self._client, self._query, self._hold(), compute_give_back_s(self._client.make_deadline(None)))
        self._has_ended = True

    def give_back_later(self) -> None:
        """Gives the rows back without waiting for that."""
        give_back_later(self._client, self._query, self._hold())
