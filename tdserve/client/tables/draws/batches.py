"""Samples that are requested ahead of their use. A thread keeps a bounded number of requests and batches."""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from threading import BoundedSemaphore
from typing import Any, NamedTuple

from tdserve.base.deadline import Deadline
from tdserve.base.errors import (
    ClosedError,
    ConnectError,
    DeadlineExceededError,
    EndOfStreamError,
    PeerLostError,
    StoreMovedError,
    StoreNotFoundError,
    StructureChangedError,
    TDServeError,
)
from tdserve.client.content.devices import begin, resolve_device
from tdserve.client.content.outer_modes import leave_modes_in_calls
from tdserve.client.session.calls.call_conditions import REPEATED, RETRY_BACKOFF_S, lengthen
from tdserve.client.session.calls.call_deadline import begin_step
from tdserve.client.session.calls.step_counts import StepCount
from tdserve.client.session.finalizing import run_from_finalizer
from tdserve.client.session.session import Session
from tdserve.client.session.session_client import SessionClient
from tdserve.client.tables.draws.batches_ahead import (
    JOIN_TIMEOUT_S,
    POLL_S,
    BatchesAhead,
    make_late_error,
    take_prefetched,
)
from tdserve.client.tables.draws.draw_arguments import Ahead
from tdserve.client.tables.draws.query import Query, RenewQuery
from tdserve.client.tables.draws.sampling import Asked, ask, receive_sample, replace_torn
from tdserve.client.tables.table_policy import ask_versions_in_time, find_oldest_version

REQUESTS_UNDER_WAY = 2
"""While the rows of one request are received, those of the next are gathered; each asks for half of what may be
prefetched, within the bounds below."""

MAX_BATCHES_ASKED = 64
"""Of one request: the first batch is there when all of them are. More share no cost that matters (a batch of 4 rows
takes 0.1 ms to 0.4 ms)."""

MAX_NBYTES_ASKED = 64 * 1024 * 1024
"""Content of one request, which has at least one batch; ragged and non-tensor values are not counted."""


@dataclass(eq=False)
class _Order:
    """What the thread does. It does not refer to the iterator, as BatchesAhead does not."""

    client: SessionClient
    query: Query
    num_rows: int
    num_batches: int
    num_under_way: int
    device: Any
    timeout_s: float
    ahead: BatchesAhead
    renew: RenewQuery
    room: BoundedSemaphore  # one permit per batch that may be under way or waiting
    under_way: dict[int, Session] = field(default_factory=dict)
    num_received: int = 0  # requests whose batches are ready

    def iter_queries(self) -> Iterator[Query]:
        """Yields the query of each request, from the first on whose batches are not ready. Of shares each has the next
        step."""
        share = self.query.share
        for number in count(self.num_received):
            yield self.query if share is None else replace(self.query, share=share.move_to(share.step + number))

    @property
    def drops_old(self) -> bool:
        """Whether batches that became too old for ``max_lag`` are dropped; the other ranks would keep their shares."""
        return self.query.max_lag is not None and self.query.share is None

    def reserve(self, *, wait: bool) -> bool:
        """Reserves room for one request's batches; False if there is none (with ``wait``: within POLL_S).

        Granted content is received at once. If it stayed in the channel it would block every other transfer of the
        session, such as a publish by the very thread that would make room.
        """
        for taken in range(self.num_batches):
            if not self.room.acquire(timeout=POLL_S if wait else None, blocking=wait):
                if taken:
                    self.room.release(taken)
                return False
        return True

    def release(self) -> None:
        """Returns the room of a request that brought nothing."""
        self.room.release(self.num_batches)

    def end(self) -> None:
        """Ends the thread, also if it waits for rows: its requests are cancelled."""
        self.ahead.closed.set()
        for request, session in list(self.under_way.items()):
            session.cancel(request)


class _UnderWay(NamedTuple):
    """A request under way, and its query."""

    request: int
    asked: Asked
    query: Query
    deadline: Deadline


def _choose_num_batches(query: Query, num_rows: int, wanted: int) -> int:
    """Returns how many batches each request asks for."""
    if not query.is_exact:
        return 1
    batch_nbytes = max(query.stored.nbytes * num_rows // max(query.stored.num_rows, 1), 1)
    return max(1, min(wanted, MAX_BATCHES_ASKED, MAX_NBYTES_ASKED // batch_nbytes))


@leave_modes_in_calls
class Batches:
    """An iterator over samples, which ends when the table is closed and has too few rows left for a batch; a context
    manager. Closing it from any thread ends a waiting ``next``.

    Raises (from ``next``):
        DeadlineExceededError: No batch came in time. The next call continues.
        StoreNotFoundError: The table was deleted. A call after it was made anew continues with its rows.
        ClosedError: The iterator or its client was closed.
    """

    def __init__(
        self,
        client: SessionClient,
        query: Query,
        num_rows: int,
        *,
        ahead: Ahead,
        device: Any,
        timeout_s: float,
        renew: RenewQuery,
        step_count: StepCount | None = None,
    ) -> None:
        self._step_count = step_count
        self._drop_after_s = ahead.drop_after_s
        self._timeout_s = timeout_s
        self._ahead = BatchesAhead(query.name, max_batches=ahead.num_batches)
        # Of two requests the second may be granted when the first was not, and its rows would come first.
        num_under_way = 1 if query.is_ordered else REQUESTS_UNDER_WAY
        self._order = order = _Order(
            client=client,
            query=query,
            num_rows=num_rows,
            num_batches=_choose_num_batches(query, num_rows, ahead.num_batches // num_under_way),
            num_under_way=num_under_way,
            device=resolve_device(device),  # here: the number of "cuda" depends on the thread
            timeout_s=timeout_s,
            ahead=self._ahead,
            renew=renew,
            room=BoundedSemaphore(ahead.num_batches),
        )
        self._name = query.name
        self._on_dropped = weakref.finalize(self, run_from_finalizer, order.end)
        self._on_dropped.atexit = False  # the thread ends itself then
        self._ahead.start(partial(_fetch_until_closed, order), order.end)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        began_s = time.monotonic()
        while True:
            try:
                came_s, oldest, share, upload = self._ahead.take(began_s)
            except EndOfStreamError:
                raise StopIteration from None
            self._order.room.release()
            if not take_prefetched(self._step_count, share):
                continue
            is_fresh = time.monotonic() - came_s <= self._drop_after_s and self._is_in_time(oldest)
            if is_fresh:
                return self._order.query.hand_over(upload.take())
            if time.monotonic() - began_s > self._timeout_s:
                raise make_late_error(self._name, self._timeout_s)

    def _is_in_time(self, oldest: int) -> bool:
        """Returns whether rows of this policy version are still within the largest lag."""
        order, max_lag = self._order, self._order.query.max_lag
        if max_lag is None or not order.drops_old:
            return True
        deadline = begin_step(self._timeout_s)
        # Also false if the policy was deleted and created again: then its newest is older.
        policy, kind = order.query.policy, order.query.kind
        return oldest in ask_versions_in_time(order.client, self._name, policy, max_lag, deadline, kind=kind)

    def __enter__(self) -> Batches:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the iterator and its thread. Idempotent; any thread may call it."""
        self._on_dropped.detach()
        self._order.end()
        self._ahead.join(self._order.client.make_deadline(None).limit(JOIN_TIMEOUT_S))


def _fetch_until_closed(order: _Order) -> None:
    progress = _Progress()
    while not order.ahead.closed.is_set():
        try:
            try:
                _fetch(order, progress)
            except StructureChangedError:
                renewed = order.renew(order.query, Deadline.after(order.timeout_s))
                if renewed is None:
                    raise
                order.query = renewed
            except StoreMovedError as error:
                if error.server is None:  # at rest, for a move or a checkpoint
                    raise
                order.client = order.client.find_moved(error, Deadline.after(order.timeout_s))
        except DeadlineExceededError as error:
            order.ahead.put_passing(error)
            progress.record_progress()
        except StoreNotFoundError as error:  # it may be made anew under its name
            order.ahead.put_passing(error)
            order.ahead.closed.wait(progress.backoff_s)
            progress.backoff_s = lengthen(progress.backoff_s)
        except REPEATED as error:
            if getattr(error, "server", None) is not None:  # this client knows no other server
                order.ahead.put(error)
                return
            if time.monotonic() - progress.last_s >= order.timeout_s:
                order.ahead.put_passing(error)
                progress.record_progress()
            order.ahead.closed.wait(progress.backoff_s)
            progress.backoff_s = lengthen(progress.backoff_s)
        except BaseException as error:  # noqa: BLE001 (outermost frame of the thread: the iterator raises it)
            order.ahead.put(error)
            return


class _Progress:
    """When the thread last received something, and how long it pauses before it retries."""

    def __init__(self) -> None:
        self.record_progress()

    def record_progress(self) -> None:
        self.last_s = time.monotonic()
        self.backoff_s = RETRY_BACKOFF_S


def _fetch(order: _Order, progress: _Progress) -> None:
    """Requests and receives until the iterator is closed or an error occurs; then cancels everything under way."""
    under_way: deque[_UnderWay] = deque()
    client = order.client = _find_client(order)
    session, queries = client.session(Deadline.after(order.timeout_s)), order.iter_queries()
    # Announced content is received at once, whatever this thread waits for, but only if the channel is open already.
    is_ready = session.movers.reads.is_ready or not session.movers.reads.receives_messages
    num_under_way = order.num_under_way if is_ready else 1
    try:
        while not order.ahead.closed.is_set():
            while len(under_way) < num_under_way and order.reserve(wait=not under_way):
                under_way.append(_ask(order, session, next(queries)))
            if order.ahead.closed.is_set():  # checked after asking: end() either saw those requests, or is seen here
                return
            if not under_way:
                continue
            request, asked, query, deadline = under_way.popleft()
            try:
                is_over = order.ahead.closed.is_set
                rows = receive_sample(client, session, request, asked, query=query, deadline=deadline, is_over=is_over)
                whole = replace_torn(client, query, rows, deadline, num_rows=order.num_rows)
                batches = whole.split(order.num_rows)
            except BaseException:
                order.release()
                raise
            finally:
                _end_request(order, session, request)
            for _ in range(order.num_batches - len(batches)):  # a limiter grants fewer than requested
                order.room.release()
            order.num_received += 1
            for batch in batches:
                oldest = 0 if not order.drops_old else find_oldest_version(batch)
                order.ahead.put((time.monotonic(), oldest, query.share, begin(batch, order.device)))
            progress.record_progress()
            num_under_way = order.num_under_way
    except DeadlineExceededError as error:  # reported first: cancelling the others takes as long again
        order.ahead.put_passing(error)
        progress.record_progress()
    finally:
        _give_up(order, session, under_way)


def _find_client(order: _Order) -> SessionClient:
    """Returns the client of the server that has the table, which may have moved before its server ended."""
    deadline = Deadline.after(order.timeout_s)

    def open_session(client: SessionClient) -> SessionClient:
        client.session(deadline)
        return client

    return order.client.follow(order.client, order.query.name, open_session, deadline)  # type: ignore[no-any-return]


def _ask(order: _Order, session: Session, query: Query) -> _UnderWay:
    """Sends a request with the room that was reserved for it; returns the room if that fails."""
    request = order.client.requests.take_number()
    deadline = Deadline.after(order.timeout_s)
    try:
        asked = ask(
            order.client,
            session,
            request,
            query,
            order.num_rows,
            num_batches=order.num_batches,
            deadline=deadline,
        )
    except BaseException:
        order.release()
        session.end_request(request)
        raise
    order.under_way[request] = session
    return _UnderWay(request, asked, query, deadline)


def _end_request(order: _Order, session: Session, request: int) -> None:
    order.under_way.pop(request, None)
    session.end_request(request)


def _give_up(order: _Order, session: Session, under_way: deque[_UnderWay]) -> None:
    """Receives what was granted, and cancels what still waits."""
    client = order.client
    for request, *_ in under_way:
        session.cancel(request)
    for request, asked, query, _ in under_way:
        try:
            deadline = Deadline.after(1.0)
            receive_sample(client, session, request, asked, query=query, deadline=deadline, is_over=lambda: True)
        except (PeerLostError, ConnectError, ClosedError):
            session.close()  # content may still come that would not be received
        except TDServeError:
            continue  # refused, probably as cancelled: no content comes, and others may continue using the session
        finally:
            order.release()
            _end_request(order, session, request)
