"""The requests of a session: each is routed to its handler, and ends in exactly one answer.

``server/README.md`` has a reading order of syncs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

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
from tdserve.server.dispatch.request_sizes import count_extra_nbytes
from tdserve.server.dispatch.services import Services
from tdserve.server.execution import inline_tasks
from tdserve.server.execution.reported_faults import to_error
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


class _ServerCall(NamedTuple):
    """A request on its way to its handler and back.

    Attributes:
        session: The client's session.
        number: Its number in the session, also of its retries.
        kind: Its kind; "" for an empty message.
        message: The whole message, and
        asked: the part of it for the handler; None if the kind is unknown.
        traits: What the router does with its kind; None if that is unknown.
    """

    session: ClientSession
    number: int
    kind: str
    message: control_pb2.ClientMessage
    asked: Any
    traits: RequestTraits | None

    @property
    def what(self) -> str:
        """What it is, for errors of admission."""
        return f"a request of kind {self.kind!r}"

    @property
    def store_name(self) -> str:
        """Name of the store that it is about, there or not: no seal may begin meanwhile, and its durability holds for
        the answer. "" if there is none."""
        return str(getattr(self.asked, self.get_traits().store_field, ""))

    @property
    def used_name(self) -> str:
        """Name of the store that it reads or changes; "" for requests that create, adopt or delete one, which need none
        that can be opened."""
        return str(getattr(self.asked, "store", ""))

    @property
    def has_content(self) -> bool:
        """Whether content is sent before it is answered."""
        return self.traits is not None and self.traits.has_content

    @property
    def has_messages(self) -> bool:
        """Whether data messages of it are sent, or awaited, before it is answered."""
        if self.has_content:
            return bool(self.asked.content.message_nbytes)
        return self.traits is not None and self.traits.may_expect and bool(self.asked.message_nbytes)

    def get_traits(self) -> RequestTraits:
        """Returns what the router does with its kind. Raises RemoteProtocolError if that is unknown."""
        if self.traits is None:
            raise RemoteProtocolError(expected="a request", received=self.kind or "an empty message")
        return self.traits


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
        self._kept_lists: list[LongListFile] = []
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
        traits = self._traits.get(kind)
        asked = None if traits is None else getattr(message, kind)
        call = _ServerCall(session, message.request, kind, message, asked, traits)
        code = TransferAbortedError.code  # stays if even its answer is cancelled
        span = None if self._traces is None else self._traces.begin(session, message, kind)
        try:
            code = await self._wait_for_earlier_attempt(call) or await self._answer(call, ahead)
        finally:
            self._call_times.count("unknown" if traits is None else kind, time.perf_counter() - begun_s, code)
            session.num_requests += 1
            session.num_errors += bool(code)
            if self._traces is not None and span is not None:
                self._traces.end(session, message.request, span, code)
            if ahead is not None:
                await self._remove_lists(call, ahead)

    async def _remove_lists(self, call: _ServerCall, ahead: LongListFile) -> None:
        """Removes the long lists of a request that has ended. While the catalog owes changes, a restart may find the
        record of a write and apply it again: then they stay until nothing is owed."""
        if call.kind == "read":  # which is never recorded
            await ahead.remove()
            return
        self._kept_lists.append(ahead)
        await self.remove_kept_lists()

    async def remove_kept_lists(self) -> None:
        """Removes the long lists of requests that have ended, unless the catalog owes changes. Call it when it has
        written those that it owed."""
        if self._stores.db.owes:
            return
        kept, self._kept_lists = self._kept_lists, []
        for ahead in kept:
            await ahead.remove()

    async def _answer(self, call: _ServerCall, ahead: LongListFile | None) -> str:
        """Carries out a request that has begun, and ends it; whatever fails becomes its answer. Returns the code of the
        error, "" for success."""
        session, request = call.session, call.number
        if call.has_messages:
            session.bind(request, call.message.channel)
        known = self._stores.catalog.find(call.used_name)
        try:
            await self._carry_out(call, ahead)
            return ""
        # No error that stays in a variable here has this call in its traceback: only the collector would free both.
        except ServerBusyError as error:
            await _refuse(session, request, error)
            return error.code
        except TDServeError as error:
            reason = await self._find_reason(error, call, "" if known is None else known.uid)
            _forget_calls(error)
            return await _report(session, request, reason)
        except asyncio.CancelledError:  # by the client, or because its session ended: nothing was begun
            return await _report(session, request, TransferAbortedError(transfer=request, reason="it was cancelled"))
        except Exception as fault:  # noqa: BLE001 (the boundary of the service)
            reason = to_error(fault, session.make_request_id(request))
            _forget_calls(fault)
            return await _report(session, request, reason)
        finally:
            if call.kind == "sample" and request in session.cancelled_requests:
                await self._samples.give_back(session.number, request)
            session.end(request)

    def cancel(self, session: ClientSession, request: int) -> None:
        """Cancels a request that its client has abandoned; rows that were leased for it are given back."""
        if not session.cancel(request):
            session.run(self._samples.give_back(session.number, request), 0)

    async def _wait_for_earlier_attempt(self, call: _ServerCall) -> str:
        """Begins a request, after any earlier attempt at it; returns "", or the code of the error if it was refused or
        cancelled instead.

        A retry has the number of the earlier attempt and may arrive while that is still ending here: the worker has yet
        to report it, or its answer is being sent. The retry waits for that.
        """
        session, request = call.session, call.number
        refusal: TDServeError
        try:
            if request in session.requests:
                with self._held.admit(session, call.what, call.message.ByteSize()):
                    await session.wait_ended(request)
            session.begin(request)
            return ""
        except ServerBusyError as error:
            refusal = error
            _forget_calls(error)
        except asyncio.CancelledError:
            refusal = TransferAbortedError(transfer=request, reason="it was cancelled")
        if call.has_content:
            session.discard(request, call.asked.content, channel_number=call.message.channel)
        await _refuse(session, request, refusal)
        if request not in session.requests:  # else it belongs to the one under way
            session.cancelled_requests.discard(request)
            session.mailed_requests.discard(request)
        return refusal.code

    async def _carry_out(self, call: _ServerCall, ahead: LongListFile | None) -> None:
        """Has a request handled and its result sent; content that nothing has taken is discarded."""
        traits, session, asked, request = call.get_traits(), call.session, call.asked, call.number
        try:
            with session.authorize(call.kind, asked):
                if traits.has_content:
                    self._held.check_values(asked.content)
                place_lists(call.message, ahead)
                await self._carry_out_once(call)
        except BaseException:
            if traits.has_content and request not in session.accepted_requests:
                session.discard(request, asked.content)
            elif traits.may_expect and asked.message_nbytes and request not in session.accepted_requests:
                session.send_void(request, asked.message_nbytes)
            raise

    async def _carry_out_once(self, call: _ServerCall) -> None:
        """Runs the handler, with its store kept from being sealed, unless an earlier attempt was committed."""
        traits, client_id = call.get_traits(), call.session.client_id
        if not traits.uses_store:
            await self._run_handler(call)
            return
        if (store := self._stores.find_if_open(call.used_name)) is not None:
            # First: this may be a retry of an extend into claimed rows. A writer need not see what others write.
            store.catch_up(client_id if call.kind == "extend" else b"")
        if traits.is_once:
            if await self._answer_from_record(call):
                return
            self._answers.check_room(client_id)
        name = call.store_name
        self._stores.seals.begin_request(name)
        try:
            await self._run_handler(call)
        finally:
            self._stores.seals.end_request(name)

    async def _answer_from_record(self, call: _ServerCall) -> bool:
        """Answers a request whose earlier attempt was committed; returns whether it was."""
        session, request = call.session, call.number
        answered = self._answers.find_earlier(session.client_id, request)
        if answered is None:
            return False
        if call.has_content:
            session.discard(request, call.asked.content)
        await self._sync(call, is_deleted=call.kind == "delete_store")
        await session.send_done(request, answered)
        return True

    async def _run_handler(self, call: _ServerCall) -> None:
        """Runs the handler of a request as soon as its store is open and memory admits it; sends the answer."""
        traits, session, asked, nbytes = call.get_traits(), call.session, call.asked, call.message.ByteSize()
        if self._stores.is_long_to_open(call.used_name):
            with self._held.admit(session, call.what, nbytes):
                await inline_tasks.ensure_task()
                await self._stores.open_apart(call.used_name)
        nbytes += count_extra_nbytes(call.kind, asked, max_answer_nbytes=self._held.limit_bytes // ANSWER_PAGES)
        with self._held.admit(session, call.what, nbytes):
            done = await traits.handler(session, call.number, asked)
            if traits.is_once:
                await self._sync(call)
            if done is not None:  # a client that does not read leaves its answers in memory
                with self._held.count_during(session, done.ByteSize()):
                    await session.send_done(call.number, done)

    async def _sync(self, call: _ServerCall, *, is_deleted: bool = False) -> None:
        """Waits until a write has reached the disk, if its store requires that before the answer, or may have."""
        record = self._stores.catalog.find(call.store_name)
        if is_deleted or (record is not None and record.durability == "disk"):
            await inline_tasks.ensure_task()
            await self._syncing.wait_synced("" if record is None else record.uid)
        elif record is not None and call.kind == "alter":
            self._syncing.sync_soon(record.uid)

    async def _find_reason(self, error: TDServeError, call: _ServerCall, uid: str) -> TDServeError:
        """Returns the error to report for a request that failed.

        A missing or closed file means StoreNotFoundError if the store was deleted meanwhile, and TransferAbortedError
        if it was created again. Lack of room means TransferAbortedError if there is room now.

        Args:
            uid: Incarnation of the store when the request began; "" if there was none.
        """
        name, request = call.used_name, call.number
        if isinstance(error, CapacityError) and await self._dead_values.make_room(name, error):
            reason = f"values of rows that have left {name!r} were in the way, and are gone now"
            return TransferAbortedError(transfer=request, reason=reason)
        if call.kind == "publish" or (call.kind == "write" and call.asked.HasField("new_store")):
            return error  # the store was not visible yet: it is missing because this failed
        if isinstance(error, (CorruptDataError, ClosedError)) and name:
            now = self._stores.catalog.find(name)
            if now is None:
                return StoreNotFoundError(name=name)
            if now.uid != uid:
                return TransferAbortedError(transfer=request, reason=f"store {name!r} was created again since")
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


async def _refuse(session: ClientSession, request: int, error: TDServeError) -> None:
    """Answers a request that was not carried out, and may be sent again."""
    with session.refusals.count():
        await session.fail(request, error)
