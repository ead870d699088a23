"""Samples: rows that the server draws, received here; rows that were overwritten since are replaced."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from tdserve.base.deadline import Deadline
from tdserve.base.errors import CorruptDataError, TDServeError, TransferAbortedError
from tdserve.client.content.read_content import Content, on_cpu
from tdserve.client.session.calls.timeouts import compute_answer_timeout_s, may_expect
from tdserve.client.session.requests.client_mover import ClientMover
from tdserve.client.session.requests.pending import Pending, Reply
from tdserve.client.session.session import Session
from tdserve.client.session.session_client import SessionClient
from tdserve.client.tables.draws.query import Query
from tdserve.client.tables.draws.sampled import Sampled
from tdserve.client.tables.table_policy import add_policy_news
from tdserve.client.transfers.download import Posted, post_known_size
from tdserve.client.transfers.read import finish_known_size
from tdserve.messages.content import SLICE_END_KEY
from tdserve.rules.tags import make_tag
from tdserve.v1 import control_pb2


class Asked(NamedTuple):
    """A sample that was requested.

    Attributes:
        message: The request.
        pending: Receives the answer, if there will be one. None: the client will draw the rows itself.
        posted: The receives under way, if the client knows the content's size beforehand.
    """

    message: control_pb2.SampleRequest
    pending: Pending | None
    posted: Posted | None


def ask(
    client: SessionClient,
    session: Session,
    request: int,
    query: Query,
    num_rows: int,
    *,
    num_batches: int,
    deadline: Deadline,
) -> Asked:
    """Sends the request for a sample, if one is needed; starts to receive if the size of the content is known."""
    if query.is_plain and session.movers.reads.draws_rows:
        return Asked(query.make_message(num_rows, num_batches, deadline.remaining_s), None, None)
    expected = _expect_messages(session, query, num_rows * num_batches) if may_expect(deadline) else ()
    message = query.make_message(num_rows, num_batches, deadline.remaining_s)
    add_policy_news(message, client, query.policy)
    message.message_nbytes.extend(expected)
    if not expected:
        on_announced = session.movers.reads.make_early_receiver(request, query.make_wanted)
        return Asked(message, session.send(request, on_announced=on_announced, sample=message), None)
    pending = session.send(request, content_channel=session.contents.current, sample=message)
    # After the request: a receive wakes the server's process too, which takes longer than the request itself.
    layout = query.make_layout(num_rows * num_batches)
    return Asked(
        message, pending, post_known_size(layout, session, pending, make_tag(request), client.pool, device=query.device)
    )


def _expect_messages(session: Session, query: Query, total: int) -> tuple[int, ...]:
    """Returns the sizes of the messages that can be received without an answer before them.

    Returns () if the content may be inline or has values.
    """
    mover = session.movers.reads
    if not mover.receives_messages or session.contents.current.is_renewing or query.stored.values or not query.is_exact:
        return ()
    message_nbytes = query.make_layout(total).message_nbytes
    return message_nbytes if sum(message_nbytes) > mover.inline_bytes else ()


def receive_sample(
    client: SessionClient,
    session: Session,
    request: int,
    asked: Asked,
    *,
    query: Query,
    deadline: Deadline,
    is_over: Callable[[], bool] = lambda: False,
) -> Sampled:
    """Receives the rows of a request; waits if none are granted yet.

    Args:
        is_over: Whether to stop waiting.
    """
    message, pending, posted = asked
    stored = query.stored
    total = message.num_rows * message.num_batches
    content = None
    if pending is None:
        content = _draw_here(session.movers.reads, query, total)
    elif posted is not None:
        spec, layout = on_cpu(stored.with_rows(total)), query.make_layout(total)
        content = finish_known_size(session, pending, posted, spec=spec, layout=layout, deadline=deadline)
    if content is not None:
        if query.awaits_done and pending is not None:
            _wait_done(pending, query, deadline)
        return Sampled(content, query)
    if pending is None or posted is not None:
        if is_over():
            raise TransferAbortedError(transfer=request, reason="the wait was cancelled before rows were granted")
        pending = _ask_again(session, request, message, query, deadline)
        if is_over():  # checked after asking: end() either saw this request, or is seen here
            session.cancel(request)
    answer = pending.wait(compute_answer_timeout_s(deadline), f"a sample of {message.store!r}")
    reply = Reply(request, pending, answer, deadline)
    rows = Sampled(session.movers.reads.take_rows(reply, query.make_wanted()), query)
    if query.awaits_done and answer.HasField("accepted") and not answer.accepted.wants_written:
        _wait_done(pending, query, deadline)
    if rows.num_torn and query.share is not None:  # nothing replaces them: others have the same rows
        raise TransferAbortedError(transfer=request, reason="rows were written while they were copied")
    return rows


def _wait_done(pending: Pending, query: Query, deadline: Deadline) -> None:
    pending.wait(compute_answer_timeout_s(deadline), f"the end of a sample of {query.name!r}")


def _ask_again(
    session: Session, request: int, message: control_pb2.SampleRequest, query: Query, deadline: Deadline
) -> Pending:
    """Asks for an answer before the content: that wait can be interrupted, and has no fixed length."""
    waiting = control_pb2.SampleRequest()
    waiting.CopyFrom(message)
    waiting.ClearField("message_nbytes")
    waiting.timeout_s = deadline.remaining_s or 0.0
    on_announced = session.movers.reads.make_early_receiver(request, query.make_wanted)
    return session.send(request, on_announced=on_announced, sample=waiting)


def draw_whole_rows(
    client: SessionClient, query: Query, num_rows: int, *, num_batches: int, deadline: Deadline
) -> Sampled:
    """Draws rows, and replaces those that were overwritten since."""
    rows = _draw(client, query, num_rows, num_batches, deadline)
    return replace_torn(client, query, rows, deadline, num_rows=num_rows)


def _draw(client: SessionClient, query: Query, num_rows: int, num_batches: int, deadline: Deadline) -> Sampled:
    if query.is_plain and (found := _draw_without_request(client, query, num_rows * num_batches)) is not None:
        return found

    def attempt(session: Session, request: int, deadline: Deadline) -> Sampled:
        asked = ask(client, session, request, query, num_rows, num_batches=num_batches, deadline=deadline)
        return receive_sample(client, session, request, asked, query=query, deadline=deadline)

    return client.call(attempt, deadline, store=query.name)


def _draw_here(mover: ClientMover, query: Query, num_rows: int) -> Content | None:
    return mover.draw_rows(query.make_wanted(), num_rows, is_counted=not query.replaces_torn)


def _draw_without_request(client: SessionClient, query: Query, num_rows: int) -> Sampled | None:
    """Draws rows in this process; None if that is not possible, or fails: a request gets the reason.

    Raises:
        CorruptDataError: A row is damaged. A request would draw others, and hide that.
    """
    client.catalog.check_usable()
    movers = client.movers
    if movers is None or not movers.reads.draws_rows:
        return None
    begun_s = time.perf_counter()
    try:
        content = _draw_here(movers.reads, query, num_rows)
    except CorruptDataError as error:
        client.count_call("sample", begun_s, store=query.name, num_rows=num_rows, code=error.code)
        raise
    except TDServeError:
        return None
    if content is None:
        return None
    client.count_call("sample", begun_s, store=query.name, num_rows=num_rows)
    return Sampled(content, query)


def replace_torn(client: SessionClient, query: Query, rows: Sampled, deadline: Deadline, *, num_rows: int) -> Sampled:
    """Draws replacements for rows that a writer overwrote while they were copied, which are few and rare.

    Rows that belong together (slices, groups) are all drawn again, in batches of ``num_rows``.
    """
    if not rows.num_torn:
        return rows
    query = replace(query, replaces_torn=True)
    is_together = query.group_by is not None or SLICE_END_KEY in query.added
    while len(missing := rows.missing):
        if is_together:
            rows = _draw(client, query, num_rows, max(1, rows.spec.batch_size[0] // num_rows), deadline)
        else:
            rows.replace(missing, _draw(client, query, len(missing), 1, deadline))
    return rows
