"""Writes: check, send the request and the content together, wait for the commit. A retry stores nothing twice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from functools import partial
from threading import Lock
from typing import Any, NamedTuple

from tdserve.base.deadline import Deadline, compute_grace_s
from tdserve.base.errors import (
    ConnectError,
    CorruptDataError,
    DeadlineExceededError,
    InvalidRequestError,
    TDServeError,
    TransferAbortedError,
    TransportError,
)
from tdserve.client.session.calls.call_conditions import REPEATED
from tdserve.client.session.calls.call_traces import TracedCall, find_call_traces, get_traced_call
from tdserve.client.session.calls.timeouts import compute_answer_timeout_s, compute_sending_timeout_s
from tdserve.client.session.requests.outgoing import Outgoing, WriteTarget
from tdserve.client.session.requests.pending import (
    Answer,
    OnAnswer,
    Pending,
    RequestStage,
    check_answer,
)
from tdserve.client.session.session import Session
from tdserve.client.session.session_client import SessionClient
from tdserve.messages.selection.selection import Selection
from tdserve.rules.tags import make_tag
from tdserve.structure.captures.capture import Captured
from tdserve.structure.trees.tree import Path, Spec
from tdserve.transport.channel import Work
from tdserve.transport.pool import BufferPool
from tdserve.transport.rendezvous import CONNECT_TIMEOUT_S
from tdserve.v1 import content_pb2, control_pb2


class ExpectedRows(NamedTuple):
    """What rows of a table are compared with before they are written.

    Attributes:
        generations: The generation of each, as in the message; empty: any rows are written.
        has_stamps: Whether these are whole: a row of which a part was written since is another, too.
    """

    generations: bytes = b""
    has_stamps: bool = False


NO_EXPECTATION = ExpectedRows()

MakeOutgoing = Callable[[Session], Outgoing]
MakeBody = Callable[[Session, Outgoing, Deadline], "dict[str, Any]"]


MIN_TIME_TO_SKIP_CHANNEL_S = 3.0
"""With less time left, a call waits for the channel first, then sends its request: to end a session whose channel never
opens would take most of that time. Other calls send their requests while the channel opens."""


def write(
    client: SessionClient,
    make_outgoing: MakeOutgoing,
    make_body: MakeBody,
    *,
    deadline: Deadline,
    what: str,
    request: int | None = None,
    store: str = "",
) -> control_pb2.Done:
    """Sends the request of a write together with its content, and waits until it is committed.

    Args:
        make_outgoing: Prepares the content for a session (whose limit for inline content applies).
        make_body: Makes the request, as the field of ClientMessage.
        what: Names the write in the error of a timeout.
        request: Number of a request that was tried before.
        store: As in ``SessionClient.call``; one that was tried before keeps to its server.

    Raises:
        DeadlineExceededError: It was not committed in time. Or too many writes of this client were under way all the
            time, and nothing was sent.
    """
    is_first = request is None
    request = client.requests.begin_write(deadline) if request is None else request

    def attempt(session: Session, request: int, deadline: Deadline) -> control_pb2.Done:
        nonlocal is_first
        is_retry, is_first = not is_first, False
        outgoing = make_outgoing(session)
        await_channel(session, outgoing, deadline)
        body = make_body(session, outgoing, deadline)
        sent = _Sent(session, outgoing)
        pending = sent.ask(request, body)
        try:
            outgoing.settle()
        except BaseException:  # the server waits for what was announced
            session.close()
            raise
        sent.send(pending, request, client.pool, compute_sending_timeout_s(deadline, outgoing.content_nbytes))
        try:
            done = pending.wait(compute_answer_timeout_s(deadline, outgoing.content_nbytes), what).done
        except TDServeError as error:
            pending.withdraw()
            if pending.has_failed:
                sent.mark_refused(session.requests.newest)
            else:  # the peer may still read posted content: it must not see the caller's next one
                sent.give_up(error)
            raise
        if is_retry:  # the server may answer before all was sent, as to the first attempt
            sent.mark_refused(session.requests.newest)
        else:
            sent.mark_taken(request)
        return done

    return client.call(attempt, deadline, request=request, store=store if is_first else "")


def await_channel(session: Session, outgoing: Outgoing, deadline: Deadline) -> None:
    """Waits for the channel before the request is sent, if less than ``MIN_TIME_TO_SKIP_CHANNEL_S`` is left or a lost
    channel is being replaced.

    Raises:
        ConnectError, DeadlineExceededError: As raised by ``ContentChannels.await_current``.
    """
    remaining_s = deadline.remaining_s
    if outgoing.is_inline:
        return
    if remaining_s is not None and remaining_s < MIN_TIME_TO_SKIP_CHANNEL_S:
        session.contents.await_current(remaining_s + compute_grace_s(deadline.timeout_s))
    elif session.contents.current.is_renewing:
        session.contents.await_current(CONNECT_TIMEOUT_S if remaining_s is None else remaining_s)


class _Sent:
    """What was sent after a request, and the server may not have received yet.

    Args:
        session: The session that sends it.
        outgoing: The content.

    Attributes:
        content_channel: The channel; None if nothing is sent over one.
    """

    def __init__(self, session: Session, outgoing: Outgoing) -> None:
        self.content_channel = None if outgoing.is_inline else session.contents.current
        self._session = session
        self._outgoing = outgoing
        self._was_sent = False  # by an earlier attempt
        self._works: list[Work] = []
        self._refused_at: int | None = None
        self._lock = Lock()  # the answer may come while the content is posted

    def check_formed(self) -> None:
        """Raises TransferAbortedError if the content needs a channel that is still being replaced."""
        if self.content_channel is not None and self.content_channel.is_renewing:
            raise TransferAbortedError(transfer=0, reason="its channel is not formed yet")

    def ask(self, request: int, body: dict[str, Any], *, on_answer: OnAnswer | None = None) -> Pending:
        """Sends the request. Errors as in ``Session.send``."""
        outgoing = self._outgoing
        if find_call_traces() is not None and (call := get_traced_call()) is not None:
            call.note_content(outgoing.content_nbytes)
        self._session.observed_calls.count_content(bytes_in=outgoing.content_nbytes)
        self._was_sent = self._session.requests.may_be_carried_out(request)
        return self._session.send(
            request,
            on_answer=on_answer,
            on_permit=outgoing.on_permit,
            free=outgoing.free,
            content_channel=self.content_channel,
            **body,
        )

    def ask_early(self, request: int, body: dict[str, Any], pool: BufferPool, *, on_answer: OnAnswer) -> Pending:
        """Sends the request, and starts to send the content. Errors as in ``ask``.

        A caller that is interrupted meanwhile, for example by Ctrl-C, gets no answer.
        """
        try:
            pending = self.ask(request, body, on_answer=on_answer)
            self.post(request, pool)
        except BaseException as error:
            self._session.disown(request, is_sent=not isinstance(error, TDServeError))
            raise
        return pending

    def send(self, pending: Pending, request: int, pool: BufferPool, timeout_s: float) -> None:
        """Sends the content. If the channel is lost in the meantime, the answer reports that too.

        The request must not be retried before that answer.

        Raises:
            InvalidRequestError, CorruptDataError, DeadlineExceededError: The channel was closed and will be replaced.
        """
        try:
            self._works = self._outgoing.send(self.content_channel, make_tag(request), pool, timeout_s)
        except TransportError as error:
            self._note_failure(request, error)
            self.give_up(error)
        except (InvalidRequestError, CorruptDataError, DeadlineExceededError) as error:
            pending.withdraw()
            self.give_up(error)  # the server waits for the rest, which will not come
            raise

    def post(self, request: int, pool: BufferPool) -> None:
        """Starts to send the content. An answer reports a failure, as for ``send``, and then leads to a retry."""
        try:
            works = self._outgoing.post(self.content_channel, make_tag(request), pool)
        except (TransportError, InvalidRequestError, CorruptDataError, DeadlineExceededError) as error:
            self._note_failure(request, error)
            self.give_up(error)
            return
        with self._lock:
            self._works, refused_at = works, self._refused_at
        if refused_at is not None:  # before all of it was sent, and received nevertheless
            self.mark_refused(refused_at)

    def _note_failure(self, request: int, error: TDServeError) -> None:
        """Notes that nothing of the content was sent, if its channel could not be opened."""
        if isinstance(error, ConnectError) and not self._was_sent:
            self._session.requests.note_unsent(request)

    def give_up(self, error: TDServeError) -> None:
        """Replaces the channel, since it may have half of the content in it."""
        if self.content_channel is not None:
            self._session.replace_channel(self.content_channel, error)

    def mark_refused(self, newest: int) -> None:
        """Notes that the request was refused, or carried out before: the server receives posted content and drops it.

        Args:
            newest: The newest request of the client.
        """
        with self._lock:
            works, self._works, self._refused_at = self._works, [], newest
        if self.content_channel is not None and works:
            self.content_channel.keep(newest, works, self._outgoing.nbytes)

    def mark_taken(self, request: int) -> None:
        """Notes that the server has received all of it."""
        if self.content_channel is not None:
            self.content_channel.let_go_before(request)
        with self._lock:
            self._works = []


def write_early(
    client: SessionClient,
    make_outgoing: MakeOutgoing,
    make_body: MakeBody,
    *,
    request: int,
    deadline: Deadline,
    what: str,
    on_later: Callable[[], None] = lambda: None,
) -> Future[control_pb2.Done]:
    """Writes as ``write`` does, but returns at once; the content must not change before the future is done.

    A transport failure is retried in the background, under the same number.

    Args:
        request: Its number, from ``RequestNumbers.try_begin_write``; it ends here.
        on_later: Called when a retry in the background is needed: later requests might overtake it.
    """
    early = _EarlyWrite(
        client, make_outgoing, make_body, request=request, deadline=deadline, what=what, on_later=on_later
    )
    early.begin()
    return early.future


class _EarlyWrite:
    """A write whose caller does not wait for its answer; arguments as in ``write_early``.

    Attributes:
        future: Gets the answer.
    """

    def __init__(
        self,
        client: SessionClient,
        make_outgoing: MakeOutgoing,
        make_body: MakeBody,
        *,
        request: int,
        deadline: Deadline,
        what: str,
        on_later: Callable[[], None],
    ) -> None:
        self.future: Future[control_pb2.Done] = Future()
        self._client = client
        self._make_outgoing = make_outgoing
        self._make_body = make_body
        self._request = request
        self._deadline = deadline
        self._what = what
        self._on_later = on_later
        self._watched = 0  # no number of the deadline watch
        traces = find_call_traces()
        self._traced_call = None if traces is None else TracedCall(traces)
        if self._traced_call is not None:
            self.future.add_done_callback(self._traced_call.end_with)

    def begin(self) -> None:
        """Sends the request and its content, or leaves both to the background."""
        if self._traced_call is None:
            self._begin()
            return
        with self._traced_call.make_current():
            self._begin()

    def _begin(self) -> None:
        client = self._client
        if not client.has_session:  # opening one may take as long as the server is away
            self._retry()
            return
        try:
            session = client.session(self._deadline)
            outgoing = self._make_outgoing(session)
            sent = _Sent(session, outgoing)
            sent.check_formed()
            body = self._make_body(session, outgoing, self._deadline)
            on_answer = partial(self._settle, session, sent)
            pending = sent.ask_early(self._request, body, client.pool, on_answer=on_answer)
        except TransportError:
            self._retry()
            return
        except BaseException:
            client.requests.end(self._request)
            raise
        timeout_s = compute_answer_timeout_s(self._deadline, outgoing.content_nbytes)
        if timeout_s is not None:  # the grace may have begun while it waited behind others
            timeout_s = max(timeout_s - self._deadline.overdue_s, 0.0)
        self._watched = client.deadline_watch.add(timeout_s, partial(self._expire, session, sent, pending))
        if pending.stage is RequestStage.ENDED:  # before there was anything to remove
            client.deadline_watch.remove(self._watched)

    def _settle(self, session: Session, sent: _Sent, answer: Answer) -> None:
        requests, request = self._client.requests, self._request
        self._client.deadline_watch.remove(self._watched)
        try:
            done = check_answer(answer).done
        except TDServeError as error:
            sent.mark_refused(requests.newest)
            session.end_request(request)
            if isinstance(error, REPEATED):
                if self._traced_call is not None:
                    self._traced_call.note_retry(error)
                self._retry()
                return
            self.future.set_exception(error)
        else:
            self.future.set_result(done)
            sent.mark_taken(request)
            session.end_request(request)
        requests.end(request)

    def _expire(self, session: Session, sent: _Sent, pending: Pending) -> None:
        """Ends the write, whose answer has not come in time: it may be carried out, or not."""
        if not pending.give_up():
            return
        error = DeadlineExceededError(what=f"an answer to {self._what}", timeout_s=self._deadline.timeout_s)
        sent.give_up(error)  # the peer may still read posted content: it must not see the caller's next one
        session.end_request(self._request)
        self._client.requests.end(self._request)
        self.future.set_exception(error)

    def _retry(self) -> None:
        self._on_later()
        written = self._client.run_later(self._write, self._deadline)
        written.add_done_callback(lambda _: self._client.requests.end(self._request))
        written.pass_on(self.future)

    def _write(self) -> control_pb2.Done:
        with nullcontext() if self._traced_call is None else self._traced_call.make_current():
            return write(
                self._client,
                self._make_outgoing,
                self._make_body,
                deadline=self._deadline,
                what=self._what,
                request=self._request,
            )


def write_selection(
    client: SessionClient,
    name: str,
    selection: Selection,
    captured: Captured,
    *,
    keys: Sequence[Path] = (),
    stored: Spec,
    identity: str = "",
    new_store: control_pb2.CreateStoreRequest | None = None,
    expected: ExpectedRows = NO_EXPECTATION,
    kind: control_pb2.StoreKind = control_pb2.STORE_KIND_TENSORDICT,
    deadline: Deadline,
) -> int:
    """Replaces a selection of a store, as a whole or not at all; returns the content version of the write.

    Args:
        stored: The store's whole structure, as this client last read it.
        identity: The store and structure that are meant; by default any store of this name and fingerprint.
        expected: The rows of a table that are meant: nothing is written if one is another by now.
        new_store: Creates the store, which is invisible before this write is committed.
        kind: Kind of the store that is meant.

    Raises:
        WrongStateError: The name means a store of another kind. Nothing was written.
    """

    is_new = new_store is not None
    target = WriteTarget(name, stored.fingerprint, stored, selection, allow_pickle=client.allow_pickle, is_new=is_new)

    def make_outgoing(session: Session) -> Outgoing:
        return session.movers.writes.prepare([captured], target)

    def make_body(session: Session, outgoing: Outgoing, deadline: Deadline) -> dict[str, Any]:
        return {
            "write": control_pb2.WriteRequest(
                store=name,
                selection=selection.to_message(),
                keys=[content_pb2.Path(parts=path) for path in keys],
                content=outgoing.message,
                timeout_s=deadline.remaining_s,
                identity=identity,
                new_store=new_store,
                generations=expected.generations,
                has_stamps=expected.has_stamps,
                kind=kind,
            )
        }

    follows = "" if new_store is not None else name
    what = f"a write to {name!r}"
    return write(client, make_outgoing, make_body, deadline=deadline, what=what, store=follows).version
