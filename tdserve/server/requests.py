"""The requests of a session: each is routed to its handler, and ends in exactly one answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from tdserve.base.deadline import Deadline
from tdserve.base.errors import (
    CapacityError,
    ClosedError,
    CorruptDataError,
    RemoteProtocolError,
    ServerBusyError,
    StoreNotFoundError,
    TDServeError,
    TransferAbortedError,
)
from tdserve.server import inline_tasks
from tdserve.server.reported_faults import to_error
from tdserve.server.request_sizes import count_extra_nbytes
from tdserve.server.services import Services
from tdserve.server.sessions.client_session import ClientSession
from tdserve.server.sessions.long_list_file import LongListFile, place_lists
from tdserve.v1 import control_pb2

_Handler = Callable[[ClientSession, int, Any], Awaitable["control_pb2.Done | None"]]

ANSWER_PAGES = 8
"""A page of keys counts as the memory limit divided by this, at most."""


@dataclass(frozen=True)
class RequestTraits:
    """What the router does with a kind of requests.

    Attributes:
        handler: Carries out a request; returns its answer, None if that was sent.
        has_content: Whether content is sent before the request is answered.
        may_expect: Whether the client may already wait for content that the server has not announced.
        is_once: Whether a retry must change nothing twice: then it is answered from the record of the first attempt.
        store_field: The field that has the name of a store.
        uses_store: Whether a store is used. Requests that move one are served while it is sealed.
    """

    handler: _Handler
    has_content: bool = False
    may_expect: bool = False
    is_once: bool = False
    store_field: str = "store"
    uses_store: bool = True


_make_once = partial(RequestTraits, is_once=True)
_make_write = partial(RequestTraits, is_once=True, has_content=True)
_make_read = partial(RequestTraits, may_expect=True)


class Requests:
    """The router of requests, by their kind.

    Args:
        services: The parts that answer them.
    """

    def __init__(self, services: Services) -> None:
        self._stores, self._answers, self._held = services.stores, services.answers, services.held
        self._dead_values, self._syncing = services.dead_values, services.syncing
        self._samples, self._row_reads = services.samples, services.row_reads
        self._reads, self._writes = services.reads, services.writes
        self._call_times, self._traces = services.call_times, services.traces
        self._traits = {
            "extend": _make_write(services.extends.extend),
            "publish": _make_write(services.publishing.publish),
            "alter": _make_write(services.alterations.alter),
            "put": _make_write(services.entries.put),
            "write": _make_write(self._write),
            "sample": _make_read(services.samples.sample),
            "read": _make_read(self._read),
            "change": _make_once(services.changes.change),
            "remove": _make_once(services.entries.remove),
            "end_filling": _make_once(services.store_requests.end_filling),
            "adopt": _make_once(services.adoption.adopt, store_field="name"),
            "create_store": _make_once(services.store_requests.create, store_field="name"),
            "delete_store": _make_once(services.store_requests.delete, store_field="name"),
            "latest": RequestTraits(services.publishing.send_latest),
            "taken": RequestTraits(services.relays.check_taken),
            "join_group": RequestTraits(services.groups.join),
            "get": RequestTraits(services.entries.get),
            "list": RequestTraits(services.entries.list),
            "catalog": RequestTraits(services.catalog.serve),
            **{kind: RequestTraits(handler, uses_store=False) for kind, handler in services.moves.handlers.items()},
        }

    async def serve(
        self, session: ClientSession, message: control_pb2.ClientMessage, ahead: LongListFile | None = None
    ) -> None:
        """Answers one request; never raises for what a client or worker did.

        Args:
            ahead: The long lists that were sent before it. They are removed at the end, unless a recorded write needs
                them after a restart.
        """
        kind, begun_s = message.WhichOneof("body") or "", time.perf_counter()
        code = TransferAbortedError.code  # stays if even its answer is cancelled
        span = None if self._traces is None else self._traces.begin(session, message, kind)
        try:
            refusal = await self._wait_for_earlier_attempt(session, kind, message)
            code = refusal or await self._answer(session, kind, message, ahead)
        finally:
            self._call_times.count(kind if kind in self._traits else "unknown", time.perf_counter() - begun_s, code)
            session.num_requests += 1
            session.num_errors += bool(code)
            if self._traces is not None and span is not None:
                self._traces.end(session, message.request, span, code)
            if ahead is not None and not self._stores.db.owes:
                await ahead.remove()

    async def _answer(
        self, session: ClientSession, kind: str, message: control_pb2.ClientMessage, ahead: LongListFile | None
    ) -> str:
        """Carries out a request that has begun, and ends it; whatever fails becomes its answer. Returns the code of the
        error, "" for success."""
        request = message.request
        if _has_messages(self._traits.get(kind), kind, message):
            session.bind(request, message.channel)
        known = self._stores.catalog.find(_get_used_name(kind, message))
        try:
            await self._carry_out(session, kind, message, ahead)
            return ""
        # No error that stays in a variable of this call has it in its traceback: only the collector would free both.
        except ServerBusyError as error:
            await self._refuse(session, request, error)
            return error.code
        except TDServeError as error:
            reason = await self._find_reason(error, kind, message, "" if known is None else known.uid)
            _forget_calls(error)
            return await _report(session, request, reason)
        except asyncio.CancelledError:  # by the client, or because its session ended: nothing was begun
            return await _report(session, request, TransferAbortedError(transfer=request, reason="it was cancelled"))
        except Exception as fault:  # noqa: BLE001 (the boundary of the service)
            reason = to_error(fault, session.make_request_id(request))
            _forget_calls(fault)
            return await _report(session, request, reason)
        finally:
            if kind == "sample" and request in session.cancelled_requests:
                await self._samples.give_back(session.number, request)
            session.end(request)

    def cancel(self, session: ClientSession, request: int) -> None:
        """Cancels a request that its client has abandoned; rows that were leased for it are given back."""
        if not session.cancel(request):
            session.run(self._samples.give_back(session.number, request), 0)

    async def _wait_for_earlier_attempt(
        self, session: ClientSession, kind: str, message: control_pb2.ClientMessage
    ) -> str:
        """Begins a request, after any earlier attempt at it; returns "", or the code of the error if it was refused or
        cancelled instead.

        A retry has the number of the earlier attempt and may arrive while that is still ending here: the worker has yet
        to report it, or its answer is being sent. The retry waits for that.
        """
        request = message.request
        refusal: TDServeError
        try:
            if request in session.requests:
                with self._held.admit(session, f"a request of kind {kind!r}", message.ByteSize()):
                    await session.wait_ended(request)
            session.begin(request)
            return ""
        except ServerBusyError as error:
            refusal = error
            _forget_calls(error)
        except asyncio.CancelledError:
            refusal = TransferAbortedError(transfer=request, reason="it was cancelled")
        if (traits := self._traits.get(kind)) is not None and traits.has_content:
            session.discard(request, getattr(message, kind).content, channel_number=message.channel)
        await self._refuse(session, request, refusal)
        if request not in session.requests:  # else it belongs to the one under way
            session.cancelled_requests.discard(request)
        return refusal.code

    async def _refuse(self, session: ClientSession, request: int, error: TDServeError) -> None:
        with session.count_refusal():
            await session.fail(request, error)

    async def _carry_out(
        self, session: ClientSession, kind: str, message: control_pb2.ClientMessage, ahead: LongListFile | None
    ) -> None:
        """Has a request handled and its result sent; content that nothing has taken is discarded."""
        traits, request = self._traits.get(kind), message.request
        if traits is None:
            raise RemoteProtocolError(expected="a request", received=kind or "an empty message")
        asked = getattr(message, kind)
        try:
            with session.authorize(kind, asked):
                if traits.has_content:
                    self._held.check_values(asked.content)
                place_lists(message, ahead)
                await self._carry_out_once(session, kind, message)
        except BaseException:
            if traits.has_content and request not in session.accepted_requests:
                session.discard(request, asked.content)
            elif traits.may_expect and asked.message_nbytes and request not in session.accepted_requests:
                session.send_void(request, asked.message_nbytes)
            raise

    async def _carry_out_once(self, session: ClientSession, kind: str, message: control_pb2.ClientMessage) -> None:
        """Runs the handler, with its store kept from being sealed, unless an earlier attempt was committed."""
        traits, asked = self._traits[kind], getattr(message, kind)
        if not traits.uses_store:
            await self._run_handler(session, kind, message)
            return
        if (store := self._stores.find_used(getattr(asked, "store", ""))) is not None:
            # First: this may be a retry of an extend into claimed rows. A writer need not see what others write.
            store.catch_up(session.client_id if kind == "extend" else b"")
        if traits.is_once:
            if await self._answer_from_record(session, kind, message):
                return
            self._answers.check_room(session.client_id)
        name = self._get_store_name(kind, asked)
        self._stores.seals.begin(name)
        try:
            await self._run_handler(session, kind, message)
        finally:
            self._stores.seals.end(name)

    async def _answer_from_record(self, session: ClientSession, kind: str, message: control_pb2.ClientMessage) -> bool:
        """Answers a request whose earlier attempt was committed; returns whether it was."""
        request, asked = message.request, getattr(message, kind)
        answered = self._answers.find_earlier(session.client_id, request)
        if answered is None:
            return False
        if self._traits[kind].has_content:
            session.discard(request, asked.content)
        await self._sync(kind, asked, is_deleted=kind == "delete_store")
        await session.send_done(request, control_pb2.Done.FromString(answered))
        return True

    async def _run_handler(self, session: ClientSession, kind: str, message: control_pb2.ClientMessage) -> None:
        """Runs the handler of a request as soon as its store is open and memory admits it; sends the answer."""
        traits, asked = self._traits[kind], getattr(message, kind)
        name = getattr(asked, "store", "")
        if self._stores.is_long_to_open(name):
            with self._held.admit(session, f"a request of kind {kind!r}", message.ByteSize()):
                await inline_tasks.ensure_task()
                await self._stores.open_apart(name)
        nbytes = message.ByteSize() + count_extra_nbytes(
            kind, asked, max_answer_nbytes=self._held.limit_bytes // ANSWER_PAGES
        )
        with self._held.admit(session, f"a request of kind {kind!r}", nbytes):
            done = await traits.handler(session, message.request, asked)
            if traits.is_once:
                await self._sync(kind, asked)
            if done is not None:  # a client that does not read leaves its answers in memory
                with self._held.count_during(session, done.ByteSize()):
                    await session.send_done(message.request, done)

    def _get_store_name(self, kind: str, asked: Any) -> str:
        """Returns the name of the store that a request is about; "" if it is about none."""
        return str(getattr(asked, self._traits[kind].store_field, ""))

    async def _sync(self, kind: str, asked: Any, *, is_deleted: bool = False) -> None:
        """Waits until a write has reached the disk, if its store requires that before the answer, or may have."""
        record = self._stores.catalog.find(self._get_store_name(kind, asked))
        if is_deleted or (record is not None and record.durability == "disk"):
            await inline_tasks.ensure_task()
            await self._syncing.wait_synced("" if record is None else record.uid)
        elif record is not None and kind == "alter":
            self._syncing.sync_soon(record.uid)

    async def _find_reason(
        self, error: TDServeError, kind: str, message: control_pb2.ClientMessage, uid: str
    ) -> TDServeError:
        """Returns the error to report for a request that failed.

        A missing or closed file means StoreNotFoundError if the store was deleted meanwhile, and TransferAbortedError
        if it was made anew. Lack of room means TransferAbortedError if there is room now.

        Args:
            uid: Incarnation of the store when the request began; "" if there was none.
        """
        name = _get_used_name(kind, message)
        if isinstance(error, CapacityError) and await self._dead_values.make_room(name, error):
            reason = f"values of rows that have left {name!r} were in the way, and are gone now"
            return TransferAbortedError(transfer=message.request, reason=reason)
        if kind == "publish" or (kind == "write" and message.write.HasField("new_store")):
            return error  # the store was not visible yet: it is missing because this failed
        if isinstance(error, (CorruptDataError, ClosedError)) and name:
            now = self._stores.catalog.find(name)
            if now is None:
                return StoreNotFoundError(name=name)
            if now.uid != uid:
                return TransferAbortedError(transfer=message.request, reason=f"store {name!r} was made anew meanwhile")
        return error

    async def _read(
        self, session: ClientSession, request: int, asked: control_pb2.ReadRequest
    ) -> control_pb2.Done | None:
        deadline = Deadline.after(asked.timeout_s)
        if asked.fingerprint:  # the client has seen the store: if it was deleted, do not wait for it
            store = self._stores.get(asked.store)
        else:
            await inline_tasks.ensure_task()
            with session.mark_waiting():
                store = await self._stores.wait(asked.store, deadline)
        is_meant = store.is_of_kind(asked.kind)
        if asked.message_nbytes and not (is_meant and self._reads.is_as_expected(store, asked)):
            session.send_void(request, asked.message_nbytes)
            return control_pb2.Done(must_wait=True)
        store.check_kind(asked.kind)
        if store.table is not None:
            return await self._row_reads.read(session, request, asked)
        return await self._reads.read(session, request, store, asked, deadline)

    async def _write(self, session: ClientSession, request: int, asked: control_pb2.WriteRequest) -> control_pb2.Done:
        if asked.HasField("new_store"):
            return await self._writes.create(session, request, asked)
        return await self._writes.write(session, request, asked)


def _get_used_name(kind: str, message: control_pb2.ClientMessage) -> str:
    """Returns the name of the store that a request uses; "" if it uses none."""
    name: str = getattr(getattr(message, kind, None), "store", "")
    return name


def _forget_calls(error: BaseException | None) -> None:
    """Lets go of the calls that an error has passed, and of their stores: the future that has brought the error is in
    one of them, so that each keeps the other."""
    while error is not None and error.__traceback__ is not None:  # a circle of causes ends too
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


async def _report(session: ClientSession, request: int, failure: TDServeError) -> str:
    """Answers a request with an error, and returns its code."""
    await session.fail(request, failure)
    return failure.code


def _has_messages(traits: RequestTraits | None, kind: str, message: control_pb2.ClientMessage) -> bool:
    """Returns whether data messages of a request are sent, or awaited, before it is answered."""
    if traits is None:
        return False
    if traits.has_content:
        return bool(getattr(message, kind).content.message_nbytes)
    return traits.may_expect and bool(getattr(message, kind).message_nbytes)
