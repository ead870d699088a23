"""The requests of a session: each is handed to what answers it, and ends in exactly one answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
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
from tdserve.server.admission_budget import AdmissionBudget
from tdserve.server.adoption import Adoption
from tdserve.server.groups import Groups
from tdserve.server.idempotency import CommittedAnswers
from tdserve.server.sessions.long_list_file import LongListFile, place_lists
from tdserve.server.sessions.session import ClientSession, as_error
from tdserve.server.stores import Stores
from tdserve.server.syncing import Syncing
from tdserve.server.tables.changes import Changes
from tdserve.server.tables.dead_values import DeadValues
from tdserve.server.tables.replays import Replays
from tdserve.server.tables.samples import Samples
from tdserve.server.tensordicts.alterations import Alterations
from tdserve.server.tensordicts.reads import Reads
from tdserve.server.tensordicts.writes import Writes
from tdserve.server.weights.publishing import Publishing
from tdserve.server.weights.relays import Relays
from tdserve.v1 import control_pb2

_Handler = Callable[[ClientSession, int, Any], Awaitable["control_pb2.Done | None"]]

_WITH_CONTENT = ("write", "extend", "publish", "alter")
"""Their content is on its way before they are granted."""

_EXPECTING = ("sample", "read")
"""Kinds of requests whose client may wait for content that was not announced."""

_ONCE = (*_WITH_CONTENT, "change", "adopt")
"""A retry of one must change nothing twice."""


class Requests:
    """Routes requests by their kind.

    Args:
        stores: The book.
        answers: Of committed requests.
        replays, samples, changes, reads, writes, alterations, publishing, relays, groups, adoption: What answers.
        dead_values: Makes room where there was none.
        held: Counts what requests hold.
        syncing: Brings to the disk what must be there before it is answered.
    """

    def __init__(
        self,
        stores: Stores,
        answers: CommittedAnswers,
        *,
        replays: Replays,
        samples: Samples,
        changes: Changes,
        reads: Reads,
        writes: Writes,
        alterations: Alterations,
        publishing: Publishing,
        relays: Relays,
        groups: Groups,
        adoption: Adoption,
        dead_values: DeadValues,
        held: AdmissionBudget,
        syncing: Syncing,
    ) -> None:
        self._dead_values = dead_values
        self._held = held
        self._syncing = syncing
        self._stores = stores
        self._answers = answers
        self._replays = replays
        self._samples = samples
        self._reads = reads
        self._writes = writes
        self._handlers: dict[str, _Handler] = {
            "extend": replays.extend,
            "sample": samples.sample,
            "change": changes.change,
            "alter": alterations.alter,
            "publish": publishing.publish,
            "latest": publishing.latest,
            "taken": relays.check_taken,
            "join_group": groups.join,
            "adopt": adoption.adopt,
            "read": self._read,
            "write": self._write,
        }

    async def serve(
        self, session: ClientSession, message: control_pb2.ClientMessage, ahead: LongListFile | None = None
    ) -> None:
        """Answers one request; never raises for what a client or worker did.

        Args:
            ahead: The long lists that came before it; removed at the end, unless a write on record needs them after a
                restart.
        """
        kind = message.WhichOneof("body") or ""
        try:
            if await self._begin(session, kind, message):
                await self._answer(session, kind, message, ahead)
        finally:
            if ahead is not None and not self._stores.db.owes:
                await ahead.remove()

    async def _answer(
        self, session: ClientSession, kind: str, message: control_pb2.ClientMessage, ahead: LongListFile | None
    ) -> None:
        request = message.request
        if _has_messages(kind, message):
            session.bind(request, message.channel)
        try:
            await self._serve(session, kind, message, ahead)
        except ServerBusyError as error:
            await self._refuse(session, request, error)
        except TDServeError as error:
            await session.fail(request, await self._reason(error, kind, message))
        except asyncio.CancelledError:  # by the client, or because its session ended: nothing was begun
            await session.fail(request, TransferAbortedError(transfer=request, reason="it was cancelled"))
        except Exception as fault:  # noqa: BLE001 (the boundary of the service)
            await session.fail(request, as_error(fault))
        finally:
            if kind == "sample" and request in session.cancelled_requests:
                await self._samples.give_back(session.number, request)
            session.end(request)

    def cancel(self, session: ClientSession, request: int) -> None:
        """A client does not want what it has asked for: what waits for it is given up, and what it holds on lease for
        it, it has never heard of."""
        if not session.cancel(request):
            session.run(self._samples.give_back(session.number, request), 0)

    async def _begin(self, session: ClientSession, kind: str, message: control_pb2.ClientMessage) -> bool:
        """Whether a request may begin. One that is tried again has the number that it had, and may come before the end
        of the last attempt is noticed here: the worker tells of it, or the answer is on its way out."""
        request = message.request
        refusal: TDServeError
        try:
            if request in session.requests:
                with self._held.holding(session, f"a request of kind {kind!r}", message.ByteSize()):
                    await session.end_of(request)
            session.begin(request)
            return True
        except ServerBusyError as error:
            refusal = error
        except asyncio.CancelledError:
            refusal = TransferAbortedError(transfer=request, reason="it was cancelled")
        if kind in _WITH_CONTENT:
            session.discard(request, getattr(message, kind).content, channel_number=message.channel)
        await self._refuse(session, request, refusal)
        if request not in session.requests:  # else of the one that is under way
            session.cancelled_requests.discard(request)
        return False

    async def _refuse(self, session: ClientSession, request: int, error: TDServeError) -> None:
        with session.refusing():
            await session.fail(request, error)

    async def _serve(
        self, session: ClientSession, kind: str, message: control_pb2.ClientMessage, ahead: LongListFile | None
    ) -> None:
        handler, request = self._handlers.get(kind), message.request
        if handler is None:
            raise RemoteProtocolError(expected="a request", received=kind or "an empty message")
        asked = getattr(message, kind)
        try:
            place_lists(message, ahead)
            if kind in _ONCE:
                if (answered := self._answers.earlier(session.client_id, request)) is not None:
                    if kind in _WITH_CONTENT:
                        session.discard(request, asked.content)
                    await self._sync(kind, asked)
                    await session.send_done(request, control_pb2.Done.FromString(answered))
                    return
                self._answers.check_room(session.client_id)
            if self._stores.is_long_to_open(name := getattr(asked, "store", "")):
                with self._held.holding(session, f"a request of kind {kind!r}", message.ByteSize()):
                    await inline_tasks.in_task()
                    await self._stores.open_apart(name)
            with self._held.holding(session, f"a request of kind {kind!r}", message.ByteSize()):
                done = await handler(session, request, asked)
                if kind in _ONCE:
                    await self._sync(kind, asked)
                if done is not None:  # a client that does not read keeps its answers here
                    with self._held.counting(session, len(done.inline)):
                        await session.send_done(request, done)
        except BaseException:
            if kind in _WITH_CONTENT and request not in session.accepted_requests:
                session.discard(request, asked.content)
            elif kind in _EXPECTING and asked.message_nbytes and request not in session.accepted_requests:
                session.send_void(request, asked.message_nbytes)
            raise

    async def _sync(self, kind: str, asked: Any) -> None:
        """Waits until a write has reached the disk, where its store asks for that before it is answered."""
        entry = self._stores.find_used(getattr(asked, "store", ""))
        if entry is not None and entry.record.durability == "disk":
            await inline_tasks.in_task()
            await self._syncing.wait_synced(entry.record.uid)
        elif entry is not None and kind == "alter":
            self._syncing.sync_soon(entry.record.uid)

    async def _reason(self, error: TDServeError, kind: str, message: control_pb2.ClientMessage) -> TDServeError:
        """What a request failed of: of missing or closed files, when the store was deleted meanwhile; of room that
        there is by now."""
        name = getattr(getattr(message, kind, None), "store", "")
        if isinstance(error, CapacityError) and await self._dead_values.make_room(name):
            reason = f"values of rows that have left {name!r} were in the way, and are gone now"
            return TransferAbortedError(transfer=message.request, reason=reason)
        if kind == "publish" or (kind == "write" and message.write.creates):
            return error  # nobody has seen the store yet: there is none because this failed
        if isinstance(error, (CorruptDataError, ClosedError)) and name and name not in self._stores.catalog:
            return StoreNotFoundError(name=name)
        return error

    async def _read(
        self, session: ClientSession, request: int, asked: control_pb2.ReadRequest
    ) -> control_pb2.Done | None:
        deadline = Deadline.after(asked.timeout_s)
        if asked.fingerprint:  # who knows the store's structure has seen the store: if it was deleted, nobody waits
            entry = self._stores.get(asked.store)
        else:
            await inline_tasks.in_task()
            with session.waiting():
                entry = await self._stores.wait(asked.store, deadline)
        if asked.message_nbytes and not self._reads.is_as_expected(entry, asked):
            session.send_void(request, asked.message_nbytes)
            return control_pb2.Done(must_wait=True)
        if entry.record.kind == "replay":
            if not asked.fingerprint:  # it takes the store for a tensordict, and would lay the content out as one
                raise entry.wrong_kind("tensordict")
            return await self._replays.read(session, request, asked)
        if entry.record.kind == "weights":
            raise entry.wrong_kind("tensordict or replay")
        return await self._reads.read(session, request, entry, asked, deadline)

    async def _write(self, session: ClientSession, request: int, asked: control_pb2.WriteRequest) -> control_pb2.Done:
        if asked.creates:
            return await self._writes.create(session, request, asked)
        return await self._writes.write(session, request, asked)


def _has_messages(kind: str, message: control_pb2.ClientMessage) -> bool:
    """Whether data messages of a request are on their way, or waited for, before it is answered."""
    if kind in _WITH_CONTENT:
        return bool(getattr(message, kind).content.message_nbytes)
    return kind in _EXPECTING and bool(getattr(message, kind).message_nbytes)
