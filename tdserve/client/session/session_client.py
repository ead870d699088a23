"""The client that handles and calls hold: each call has a request number, a deadline, and the sessions it needs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from threading import Lock
from typing import Any, Protocol, TypeVar
from weakref import WeakSet

from tdserve.base.config import TransportName, check_transport
from tdserve.base.deadline import Deadline, compute_grace_s
from tdserve.base.errors import (
    ConnectError,
    ServerBusyError,
    StoreMovedError,
    TDServeError,
    TransferAbortedError,
    TransportError,
)
from tdserve.base.tls import TLS
from tdserve.client.content.devices import choose_arrays
from tdserve.client.content.gpu import find_gpu
from tdserve.client.content.outer_modes import leave_modes_first
from tdserve.client.local.root_files import FileAccess
from tdserve.client.session.calls.awaitable_future import AwaitableFuture
from tdserve.client.session.calls.background_calls import BackgroundCalls
from tdserve.client.session.calls.call_conditions import (
    REFUSED_FOR_NOW,
    RETRY_BACKOFF_S,
    choose_pauses_s,
    explain_late,
    explain_rest,
    explain_sent,
    has_to_wait,
    is_cancelled,
    is_over,
    lengthen,
)
from tdserve.client.session.calls.call_traces import find_call_traces, note_retry
from tdserve.client.session.calls.observed_calls import ObservedCalls
from tdserve.client.session.calls.reach import get_reach, is_patient
from tdserve.client.session.calls.step_counts import StepCounts
from tdserve.client.session.calls.timeouts import compute_answer_timeout_s, compute_min_channel_s
from tdserve.client.session.catalog.catalog_client import CatalogClient
from tdserve.client.session.client_connections import ClientConnections, ask_weakly, end_with
from tdserve.client.session.one_port import OnePort, explain_one_port
from tdserve.client.session.recipe import Recipe
from tdserve.client.session.requests.client_mover import ClientMovers
from tdserve.client.session.requests.elsewhere import FindMoved, Follow, find_no_server, follow_nowhere, renumber
from tdserve.client.session.requests.known_stores import KnownStores
from tdserve.client.session.session import Session
from tdserve.client.session.session_opener import Opening
from tdserve.messages.call_names import READ
from tdserve.messages.span_attributes import name_rows
from tdserve.structure.building.array_views import to_arrays
from tdserve.transport.pool import BufferPool
from tdserve.transport.rendezvous import CONNECT_TIMEOUT_S
from tdserve.v1 import control_pb2

CLOSE_FLUSH_S = 3.0
"""Time for sending the rows of writers that were not closed before their client."""

CATALOG_FIELDS = {"DescribeStore": "describe_store", "ListStores": "list_stores", "ListKeys": "list_keys"}
"""Methods of the server that a session answers too, with their fields of CatalogRequest and CatalogAnswer."""

_Result = TypeVar("_Result")
_Self = TypeVar("_Self", bound="SessionClient")


class Sender(Protocol):
    """The thread that sends the rows of a writer."""

    def close(self, deadline: Deadline) -> None:
        """Sends what is left, and ends. Raises TDServeError if that fails or takes too long."""


class SessionClient:
    """A client with sessions: numbered requests that are retried over new sessions until their deadline.

    Attributes:
        catalog: For calls that need no session.
        requests: Numbers of its requests.
        observed_calls: Counts them.
        senders: Senders of open writers on this client, which closes them before it ends.
        known_stores: Stores that were read by name.
        step_counts: Steps that its data-parallel readers have had.
        numpy: Whether what is read is handed over as NumPy arrays.
        find_moved: Finds the client for calls about a store that has moved.
        follow: Makes calls about a store whose server may have ended.
        deadline_watch: Ends its calls that return early when their time is up.
        connections: What it has open, which ends with it.
        on_dropped: Ends that if the client was not closed.
    """

    def __init__(
        self,
        address: str,
        *,
        transport: TransportName = "auto",
        token: str | None = None,
        timeout_s: float = 30.0,
        allow_pickle: bool = False,
        root: str | None = None,
        device: Any = None,
        numpy: bool = False,
        tls: TLS | None = None,
    ) -> None:
        chosen = check_transport(transport)
        self._gpu = find_gpu(device, transport=chosen)
        self.catalog = CatalogClient(address, token=token, timeout_s=timeout_s, tls=tls)
        self.catalog.ask_session = ask_weakly(self._ask_session)
        self.requests = self.catalog.requests
        self.observed_calls = ObservedCalls()
        self._traces = find_call_traces()
        self.transport = chosen
        self.allow_pickle = allow_pickle
        self.numpy = numpy
        self._access = FileAccess(root)
        self._one_port = OnePort(chosen)
        self.pool = BufferPool()
        self.senders: WeakSet[Sender] = WeakSet()
        self.known_stores = KnownStores()
        self.step_counts = StepCounts()
        self.find_moved: FindMoved[SessionClient] = find_no_server
        self.follow: Follow[SessionClient] = follow_nowhere
        self._lock = Lock()
        self._opening: Opening | None = None
        self._session: Session | None = None
        self._background = BackgroundCalls("tdserve-client")
        self.deadline_watch = self._background.watch
        self.connections = ClientConnections(self.catalog.connection, self.deadline_watch)
        self.on_dropped = end_with(self, [self.connections], address)

    @property
    def address(self) -> str:
        """Of the server, as it was last found."""
        return self.catalog.address

    @property
    def timeout_s(self) -> float:
        """Default of every call that can wait, seconds."""
        return self.catalog.timeout_s

    @timeout_s.setter
    def timeout_s(self, value: float) -> None:
        self.catalog.timeout_s = value

    @property
    def recipe(self) -> Recipe:
        """Address and settings, to make an equivalent client elsewhere."""
        return Recipe(
            type(self),
            self.address,
            transport=self.transport,
            token=self.catalog.token,
            timeout_s=self.timeout_s,
            allow_pickle=self.allow_pickle,
            root=self._access.root,
            device=self._gpu.device or None,
            numpy=self.numpy,
            tls=self.catalog.tls,
        )

    def __reduce__(self) -> tuple[object, ...]:
        return (self.recipe.make, ())

    @property
    def why_not_nccl(self) -> str:
        """Why content does not move by NCCL although a GPU was named; "" if it does, or none was named."""
        session = self._session
        return self._gpu.why_not or (session.why_not_channel if session is not None else "")

    @property
    def why_not_gloo(self) -> str:
        """Why content takes the server's own port although the client would take gloo; "" if it does not."""
        return explain_one_port(self._session) if self.transport == "auto" else ""

    def make_deadline(self, timeout_s: float | None) -> Deadline:
        """Returns the deadline of a call; None is the client's default timeout, or the deadline of the call of which
        this thread makes a step."""
        return self.catalog.make_deadline(timeout_s)

    @leave_modes_first  # what fails in one would end the session
    def call(
        self,
        attempt: Callable[[Session, int, Deadline], _Result],
        deadline: Deadline,
        *,
        request: int | None = None,
        store: str = "",
    ) -> _Result:
        """Performs one request. Retries it when the transport fails, over a new session if need be.

        The server recognises a retry by its number.

        Args:
            attempt: Sends the request under the given number and returns its result.
            request: Number of a request that changes something, which ends with this call; by default a new one for
                each attempt.
            store: The store that exists and is meant: the call is made where it is, if it has moved before its server
                ended. "": only this server is asked.

        Raises:
            TransportError, ServerBusyError: It still failed when the time was up. Of a request that changes something
                it is a ConnectError only if nothing was sent.
            TDServeError: The server's answer.
        """
        with nullcontext() if self._traces is None else self._traces.trace_call():
            # Who has set another patience follows by itself.
            if not store or self.follow is follow_nowhere or not is_patient():
                return self._call_anywhere(attempt, deadline, request)
            is_write = self.requests.is_write(request)

            def call(client: SessionClient) -> _Result:
                number = renumber(request, self.requests, client.requests, deadline, is_write=is_write)
                return client._call_anywhere(attempt, deadline, number)

            return self.follow(self, store, call, deadline)  # type: ignore[no-any-return]

    def _call_anywhere(
        self, attempt: Callable[[Session, int, Deadline], _Result], deadline: Deadline, request: int | None
    ) -> _Result:
        is_write = self.requests.is_write(request)  # asked first: the number ends with the call
        try:
            return self._call_here(attempt, deadline, request)
        except StoreMovedError as error:
            if error.server is None:
                raise explain_rest(error, deadline)  # noqa: B904 (it is this one, or has it as its cause)
            # It was refused for good: no earlier attempt has carried it out either.
            elsewhere = self.find_moved(error, deadline)
            moved = renumber(request, self.requests, elsewhere.requests, deadline, is_write=is_write)
            return elsewhere.call(attempt, deadline, request=moved)

    def _call_here(
        self, attempt: Callable[[Session, int, Deadline], _Result], deadline: Deadline, request: int | None
    ) -> _Result:
        take_number = self.requests.take_number if request is None else lambda: request
        backoff_s = RETRY_BACKOFF_S
        unreached: ConnectError | None = None
        reach, failed_s, was_sent = get_reach(), math.inf, self.requests.may_be_carried_out(request)
        try:
            while True:
                begun_s = time.monotonic()
                number = take_number()  # the server may still handle the last attempt
                session: Session | None = None
                try:
                    session = self.session(deadline)
                    was_sent = True
                    return attempt(session, number, deadline)
                except TransportError as error:
                    # The server has answered: the session, with its leases, continues, unless it ends it.
                    has_answered = bool(error.request_id) or isinstance(error, TransferAbortedError)
                    if session is not None and not has_answered:
                        session.close()
                    failed_s = min(failed_s, begun_s if session is None else time.monotonic())
                    is_unknown = was_sent and request is not None
                    is_given_up = reach.is_over(self.address, failed_s, is_unknown=is_unknown)
                    # Who was admitted before is refused while the server starts or ends.
                    is_final = not error.retryable and (session is not None or not was_sent)
                    if is_final or is_over(deadline, backoff_s) or is_given_up or is_cancelled():
                        # Report why the open session failed, not that a new one could not be opened.
                        last = (unreached or error) if session is None else explain_late(error, self.address, deadline)
                        raise explain_sent(last) if self.requests.may_be_carried_out(request) else last  # noqa: B904
                    unreached = error if isinstance(error, ConnectError) and session is not None else unreached
                    note_retry(error)
                    pause_s, backoff_s = backoff_s, lengthen(backoff_s)
                except REFUSED_FOR_NOW as error:
                    pause_s, backoff_s = choose_pauses_s(error, deadline, backoff_s)
                    self.requests.report_again()
                    note_retry(error)
                except TDServeError as error:
                    raise self._explain(error, session, deadline.timeout_s)  # noqa: B904 (it is this one, or says more)
                except BaseException:
                    # An interrupted transfer's remaining bytes would be taken for those of the next one.
                    if session is not None:
                        session.close()
                    raise
                finally:
                    if session is not None:
                        session.end_request(number)
                time.sleep(pause_s)
        finally:
            if request is not None:
                self.requests.end(request)

    def _explain(self, error: TDServeError, session: Session | None, timeout_s: float | None) -> TDServeError:
        """Returns what a call raises for an error. Damage that this process has found is counted: the server knows
        nothing of it."""
        if session is not None and error.code == "DATA_LOSS" and not error.request_id:
            session.count_call(READ, time.perf_counter(), error.code)
        return self.catalog.missing_names.explain(error, timeout_s)

    def count_call(self, call: str, begun_s: float, *, store: str, num_rows: int, code: str = "") -> None:
        """Records a call on a store's rows that was served without a request, and ends now; other arguments as in
        ``ObservedCalls.count``."""
        if (session := self._session) is not None:
            session.count_call(call, begun_s, code)
            if self._traces is not None:
                attributes = name_rows(store, num_rows, transport=session.transport)
                self._traces.note_local_call(call, begun_s, attributes, code)

    def _ask_session(self, method: str, request: Any, deadline: Deadline) -> Any:
        """Asks the open session about stores; see ``CatalogClient.ask_session``. What has to wait is left to others."""
        session, field = self._session, CATALOG_FIELDS.get(method)
        if session is None or session.is_lost or session.is_silent or field is None or has_to_wait(request):
            return None
        number, asked = self.requests.take_number(), control_pb2.CatalogRequest()
        getattr(asked, field).CopyFrom(request)
        try:
            pending = session.send(number, catalog=asked)
            answer = pending.wait(compute_answer_timeout_s(deadline), f"{method} at {self.address}")
        except (TransportError, ServerBusyError):
            return None
        finally:
            session.end_request(number)
        return getattr(answer.done.catalog, field)

    def run_later(self, work: Callable[[], _Result], deadline: Deadline = Deadline.never) -> AwaitableFuture[_Result]:
        """Runs work in one of the client's own threads, as in ``BackgroundCalls.run``."""
        return self._background.run(work, deadline=deadline)

    def perform(
        self, work: Callable[[], _Result], deadline: Deadline, return_early: bool
    ) -> _Result | AwaitableFuture[_Result]:
        """Runs work now and returns its result, or in the background and returns a future."""
        return self.run_later(work, deadline) if return_early else work()

    def perform_in_turn(
        self, name: str, work: Callable[[], _Result], deadline: Deadline, return_early: bool
    ) -> _Result | AwaitableFuture[_Result]:
        """Like ``perform``, for work that replaces what a store has: after all earlier such work of this client about
        it that returns early.

        Raises:
            DeadlineExceededError: That has not ended in time.
        """
        if return_early:
            return self._background.run(work, deadline=deadline, in_turn=name)
        self._background.wait(name, deadline)
        return work()

    def is_numpy_wanted(self, numpy: bool | None, device: Any = None) -> bool:
        """Returns whether a call hands over NumPy arrays.

        Args:
            numpy: As given for the call; None is the client's setting, for what stays on the CPU.
            device: Where the call moves what it reads.

        Raises:
            InvalidRequestError: Arrays on a device are asked for.
        """
        chosen = choose_arrays(numpy, device)
        return self.numpy if chosen is None else chosen

    def hand_over(self, found: Any, numpy: bool | None = None, device: Any = None) -> Any:
        """Returns what a call has read, in the form that its caller asked for; arguments as in ``is_numpy_wanted``."""
        return to_arrays(found) if self.is_numpy_wanted(numpy, device) else found

    @property
    def is_closed(self) -> bool:
        """Whether it was closed; every call then raises ClosedError."""
        return self.catalog.is_closed

    @property
    def has_session(self) -> bool:
        """Whether a session is open."""
        return (session := self._session) is not None and not session.is_lost

    @property
    def has_channel(self) -> bool:
        """Whether a session's channel is open, or none is needed: then content can be sent without waiting."""
        return (movers := self.movers) is not None and movers.writes.is_ready

    @property
    def is_turning(self) -> bool:
        """Whether extends will take another route as soon as those under way are answered."""
        return self._session is not None and self._session.is_turning

    @property
    def movers(self) -> ClientMovers | None:
        """The end of the open session that moves content; None without a session."""
        session = self._session
        return None if session is None or session.is_lost else session.movers

    def make_movers(self, session: Session) -> ClientMovers:
        """Makes the mover of a session that has just been opened."""
        raise NotImplementedError

    def session(self, deadline: Deadline) -> Session:
        """Returns the open session; opens one if there is none."""
        self.catalog.check_usable()
        session = self._session
        if session is not None and session.is_silent:
            session.close_without_waiting()
        if session is None or session.is_lost:
            session = self._open_session(deadline)
        remaining_s = deadline.remaining_s
        if remaining_s is not None and remaining_s < CONNECT_TIMEOUT_S:
            limit_s = max(remaining_s, compute_min_channel_s(deadline))
            session.contents.connect_timeout_s = min(limit_s, session.contents.max_connect_s)
        return session

    def _open_session(self, deadline: Deadline) -> Session:
        remaining_s = deadline.remaining_s
        wait_s = self.timeout_s if remaining_s is None else max(remaining_s, compute_grace_s(deadline.timeout_s))
        wait_s = min(wait_s, get_reach().seconds)
        with self._lock:
            session = self._session
            if session is not None and not session.is_lost:  # another thread was faster
                return session
            opening = self._opening
            if opening is None or opening.is_over:
                opening = self._opening = Opening(
                    self._make_session,
                    address=self.address,
                    timeout_s=wait_s,
                    explain_silence=self.catalog.connection.explain_silence,
                )
        return opening.wait(wait_s, begun_s=deadline.begun_s, deadline=deadline)

    def _make_session(self, deadline: Deadline) -> Session:
        """Opens the client's session, in a thread of its own; one such thread runs at a time."""
        self.catalog.check_usable()
        self.catalog.connection.wait_ready(deadline.remaining_s or 0.0)
        former = self._session
        if former is not None and former.device and former.channel_failure and self.transport == "auto":  # not retried
            self._gpu = self._gpu._replace(uuid="", why_not=former.channel_failure)
        self._one_port.learn(former)
        session = Session(
            self.catalog.connection,
            client_id=self.catalog.client_id,
            transport=self.transport,
            access=self._access,
            gpu=self._gpu,
            requests=self.requests,
            timeout_s=deadline.remaining_s or 0.0,
            observed_calls=self.observed_calls,
            why_one_port=self._one_port.why,
        )
        self._one_port.begin(session)
        session.movers = self.make_movers(session)
        self._session = session
        self.connections.note_session(session)
        if self.is_closed:  # by another thread, which may not know this session
            session.close()
            self.catalog.check_usable()
        return session

    def close(self) -> None:
        """Closes the session and the connection. Idempotent; every later call raises ClosedError.

        Rows that writers still hold are sent first, for up to ``CLOSE_FLUSH_S``. A writer that could not send them
        raises at its next call. Overwrites of other threads that are under way are finished first, within some seconds.
        """
        is_own = not self.catalog.is_inherited
        if is_own:
            deadline = Deadline.after(CLOSE_FLUSH_S)
            for sender in list(self.senders):
                with suppress(TDServeError):
                    sender.close(deadline)
        self.catalog.is_closed = True
        session, self._session = self._session, None  # has to exist until it is closed
        if is_own:
            self.connections.close()
            if (opening := self._opening) is not None:
                opening.join()
            self._background.close()  # pending work ends at once, with ClosedError
        del session
        self.on_dropped.detach()

    def __enter__(self: _Self) -> _Self:  # noqa: PYI019 (typing.Self is 3.11)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
