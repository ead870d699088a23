"""Writes: capture, check, ask and send at once, wait for the commit. A retry stores nothing twice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from tdserve.client.calls import SessionClient
from tdserve.client.outgoing import Outgoing, Target
from tdserve.client.pending import Answer, checked
from tdserve.client.session import Session
from tdserve.client.timeouts import answer_timeout_s, sending_timeout_s
from tdserve.deadline import Deadline, grace_s
from tdserve.errors import (
    ClosedError,
    DeadlineExceededError,
    InvalidRequestError,
    ServerBusyError,
    TDServeError,
    TransportError,
)
from tdserve.selection import Selection
from tdserve.session import tag_of
from tdserve.spec.capture import Captured
from tdserve.spec.tree import Path, Spec
from tdserve.transport.channel import Work
from tdserve.v1 import content_pb2, control_pb2

MakeOutgoing = Callable[[Session], Outgoing]
MakeBody = Callable[[Session, Outgoing, Deadline], "dict[str, Any]"]


SHORT_S = 3.0
"""A call with less time waits for a channel before it asks: to end a session whose channel does not form takes most of
that. Others ask meanwhile."""


def write(
    client: SessionClient,
    make_outgoing: MakeOutgoing,
    make_body: MakeBody,
    *,
    deadline: Deadline,
    what: str,
    request: int | None = None,
) -> control_pb2.Done:
    """Sends a write's request and its content together, and waits until it is committed.

    Args:
        make_outgoing: Lays the content out for a session (whose limit for inline content counts).
        make_body: The request, as the field of ClientMessage.
        what: For the error of one that takes too long.
        request: Number of a request that was tried before.
    """

    def attempt(session: Session, request: int, deadline: Deadline) -> control_pb2.Done:
        outgoing = make_outgoing(session)
        remaining_s = deadline.remaining_s
        if remaining_s is not None and remaining_s < SHORT_S and not outgoing.is_inline:
            session.await_channel(remaining_s + grace_s(deadline.timeout_s))
        pending = session.send(
            request, place=outgoing.place, spooled=outgoing.spooled, **make_body(session, outgoing, deadline)
        )
        try:
            outgoing.settle()
        except BaseException:  # the server waits for what was announced
            session.close()
            raise
        try:
            _send(outgoing, session, request, client, deadline)
            return pending.wait(answer_timeout_s(deadline, outgoing.content_nbytes), what).done
        except (TransportError, DeadlineExceededError) as error:
            pending.withdraw()
            if outgoing.is_inline:
                raise
            # What was posted may still be read by the peer: it must not see the caller's next content.
            raise session.failure_of(pending, error) from error

    return client.call(attempt, deadline, request=request)


def _send(outgoing: Outgoing, session: Session, request: int, client: SessionClient, deadline: Deadline) -> None:
    try:
        outgoing.send(session, tag_of(request), client.pool, sending_timeout_s(deadline, outgoing.content_nbytes))
    except InvalidRequestError:  # the rest of it, which the server waits for, cannot be read
        session.close()
        raise


def write_early(
    client: SessionClient, make_outgoing: MakeOutgoing, make_body: MakeBody, *, deadline: Deadline, what: str
) -> Future[control_pb2.Done]:
    """As ``write``, but returns at once; the content must not change before the future is done.

    A transport failure is retried in the background, under the same number.
    """
    future: Future[control_pb2.Done] = Future()
    request = client.next_request()
    works: list[Work] = []

    def again() -> None:
        try:
            future.set_result(write(client, make_outgoing, make_body, deadline=deadline, what=what, request=request))
        except BaseException as error:  # noqa: BLE001 (outermost frame: the future takes it)
            future.set_exception(error)

    def retry() -> None:
        try:
            client.later(again)
        except ClosedError as error:
            client.answered(request)
            future.set_exception(error)

    def settle(answer: Answer) -> None:
        try:
            done = checked(answer).done
        except TDServeError as error:
            session.keep(request, works)
            if isinstance(error, (TransportError, ServerBusyError)):
                retry()
                return
            future.set_exception(error)
        else:
            future.set_result(done)
            session.let_go_before(request)
        session.forget(request)
        client.answered(request)
        works.clear()

    if not client.has_session:  # to open one may take as long as the server is away
        retry()
        return future
    try:
        session = client.session(deadline)
        outgoing = make_outgoing(session)
        body = make_body(session, outgoing, deadline)
        session.send(request, on_answer=settle, place=outgoing.place, spooled=outgoing.spooled, **body)
    except TransportError:
        retry()
        return future
    except BaseException:
        client.answered(request)
        raise
    _post(session, request, outgoing, client, works, future)
    return future


def _post(
    session: Session,
    request: int,
    outgoing: Outgoing,
    client: SessionClient,
    works: list[Work],
    future: Future[control_pb2.Done],
) -> None:
    """Begins to send content behind its request."""
    try:
        works.extend(outgoing.post(session, tag_of(request), client.pool))
    except (TransportError, InvalidRequestError):
        session.close()  # which settles the request; a second try says what cannot be read
    if future.done():  # refused before all of it was sent, and taken all the same
        session.keep(request, works)


def write_selection(
    client: SessionClient,
    name: str,
    selection: Selection,
    captured: Captured,
    *,
    keys: Sequence[Path] = (),
    stored: Spec,
    create: Callable[[Session], None] | None = None,
    generations: bytes = b"",
    deadline: Deadline,
) -> int:
    """Replaces a selection of a tensordict store, whole or not at all; returns the content version it made.

    Args:
        stored: The store's whole structure, as this client knows it.
        generations: Of a replay's rows: nothing is written when one was overwritten since.
        create: Makes the store in a session, as one that nobody sees before this write is done, and that is gone with
            the
            session: called for every session that is tried.
    """

    target = Target(name, stored.fingerprint, stored, selection, allow_pickle=client.allow_pickle)

    def make_outgoing(session: Session) -> Outgoing:
        outgoing = Outgoing([captured], target, session)
        if create is not None:
            create(session)
        return outgoing

    def make_body(session: Session, outgoing: Outgoing, deadline: Deadline) -> dict[str, Any]:
        return {
            "write": control_pb2.WriteRequest(
                store=name,
                selection=selection.to_message(),
                keys=[content_pb2.Path(parts=path) for path in keys],
                content=outgoing.message,
                timeout_s=deadline.remaining_s,
                creates=create is not None,
                generations=generations,
            )
        }

    return write(client, make_outgoing, make_body, deadline=deadline, what=f"a write to {name!r}").version
