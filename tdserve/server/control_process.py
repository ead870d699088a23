"""The control process assembled: stores, sessions, workers and rules behind the methods of the service."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from google.protobuf.message import DecodeError

from tdserve.adoptions import split_adoption
from tdserve.config import ServerConfig
from tdserve.control.servicer import SessionLink
from tdserve.control.status import encode_failure
from tdserve.deadline import Deadline
from tdserve.errors import ConnectError, RemoteProtocolError, TDServeError
from tdserve.ids import check_store_name
from tdserve.server import descriptions
from tdserve.server.adoption import Adoption
from tdserve.server.answers import Answers
from tdserve.server.compaction import compact_all
from tdserve.server.creation import Creation
from tdserve.server.groups import Groups
from tdserve.server.memory import HeldContent
from tdserve.server.recovery.departures import Departures
from tdserve.server.requests import Requests
from tdserve.server.sessions.local_door import LocalDoor
from tdserve.server.sessions.register import Sessions
from tdserve.server.sessions.session import ClientSession
from tdserve.server.sessions.traffic import Traffic
from tdserve.server.stores import Stores
from tdserve.server.tables.changes import Changes
from tdserve.server.tables.claims import Claiming
from tdserve.server.tables.dead_values import DeadValues
from tdserve.server.tables.replays import Replays
from tdserve.server.tables.rule_keys import RuleKeys
from tdserve.server.tables.samples import Samples
from tdserve.server.tensordicts.alterations import Alterations
from tdserve.server.tensordicts.reads import Reads
from tdserve.server.tensordicts.writes import Writes
from tdserve.server.weights.publishing import Publishing
from tdserve.server.workers import VALUES_WORKER, DataWorker
from tdserve.store.catalog_db import CatalogDB
from tdserve.store.root import Root
from tdserve.v1 import control_pb2, worker_pb2

KEEP_ANSWERS_S = 600.0
"""A client without a session asks again within its call's timeout, or never. Its answers take space in the catalog."""

_log = logging.getLogger("tdserve.server")


class ControlProcess:
    """Answers the service's methods (``tdserve.control.servicer.Handlers``).

    Args:
        config: Of the server.
        root: The acquired root.
    """

    def __init__(self, config: ServerConfig, root: Root) -> None:
        self._config = config
        self._root = root
        self._started_s = time.monotonic()
        self._is_draining = False
        self._is_repaired = asyncio.Event()
        self._db = CatalogDB(root.catalog_folder)
        self._departures = Departures(root.sessions_folder)
        self._workers = [
            DataWorker(
                number,
                arguments=(str(config.transfer_timeout_s), *config.devices[number : number + 1]),
                root_fd=root.lock_fd,
                on_session=self._on_session_report,
                on_lost=self._on_worker_lost,
            )
            for number in range(config.num_workers)
        ]
        self._stores = Stores(root, self._db, self._departures, self._workers)
        self._sessions = Sessions(config, self._workers, root)
        self._traffic = Traffic()
        answers = Answers(self._db)
        values_worker = self._workers[VALUES_WORKER]
        self._creation = Creation(self._stores, self._sessions)
        self._writes = Writes(self._stores, answers, values_worker=values_worker, traffic=self._traffic)
        self._alterations = Alterations(self._stores, answers, values_worker=values_worker, traffic=self._traffic)
        rule_keys = RuleKeys()
        self._samples = Samples(self._stores, traffic=self._traffic, rule_keys=rule_keys)
        self._claiming = Claiming(self._stores, answers, traffic=self._traffic)
        replays = Replays(
            self._stores,
            answers,
            samples=self._samples,
            rule_keys=rule_keys,
            values_worker=values_worker,
            claiming=self._claiming,
            traffic=self._traffic,
        )
        publishing = Publishing(self._stores, answers, traffic=self._traffic)
        self._publishing, self._relays = publishing, publishing.relays
        self._answers = answers
        self._groups = Groups()
        self._adoption = Adoption(self._stores, answers, values_worker=values_worker, folders=config.adoptable)
        self._requests = Requests(
            self._stores,
            answers,
            replays=replays,
            samples=self._samples,
            changes=Changes(self._stores, answers),
            reads=Reads(self._traffic),
            writes=self._writes,
            alterations=self._alterations,
            publishing=publishing,
            groups=self._groups,
            adoption=self._adoption,
            dead_values=DeadValues(self._stores, values_worker),
            held=HeldContent(config.memory_limit_bytes),
        )
        self._door = LocalDoor(root, self._sessions, self._departures, self._take_at_once)

    def restore(self) -> None:
        """Reads the catalog; to be called before anybody may ask."""
        self._stores.restore()

    def _on_session_report(self, report: worker_pb2.Report) -> None:
        if report.HasField("mail"):
            self._on_mail(report)
        else:
            self._sessions.on_report(report)

    def _on_mail(self, report: worker_pb2.Report) -> None:
        session = self._sessions.find(report.session)
        if session is None or session.ended.is_set():
            return
        try:
            message = control_pb2.ClientMessage.FromString(report.mail)
        except DecodeError:
            session.ended.set()
            return
        if not message.HasField("cancel"):
            session.mailed_requests.add(message.request)
        self._take(session, message, session.run_at_once)

    def _on_worker_lost(self, worker: DataWorker) -> None:
        self._sessions.on_worker_lost(worker)

    async def start(self) -> None:
        """Starts the workers, and finishes what a crash has cut short; sessions are opened from then on."""
        self._publishing.restore()
        self._claiming.restore()
        self._departures.tidy()
        for client_id in self._answers.clients():
            self._forget_later(client_id)
        await asyncio.to_thread(compact_all, self._root, list(self._stores.catalog))
        for worker in self._workers:
            worker.start()
        await self._alterations.repair()  # first: writes on record are of the newest structure
        repaired = await self._writes.repair()
        if repaired:
            _log.warning("%d writes that a crash had cut short were completed", repaired)
        for path, name, read_only in map(split_adoption, self._config.adopt):
            await self._adoption.adopt_at_start(name, path, read_only=read_only)
        await self._door.open()
        self._is_repaired.set()

    async def drain(self) -> None:
        """Refuses new requests and waits for those under way, at most the grace period; then ends the sessions."""
        self._is_draining = True
        deadline = Deadline.after(self._config.grace_s)
        await asyncio.gather(*(session.finish(deadline.remaining_s or 0.0) for session in self._sessions))
        for session in self._sessions:
            session.ended.set()

    async def stop(self) -> None:
        """Ends the workers and closes the catalog."""
        self._door.close()
        self._departures.close()
        self._departures.tidy()
        await asyncio.gather(*(worker.stop() for worker in self._workers))
        self._db.sync()
        self._db.close()

    async def session(self, link: SessionLink, messages: AsyncIterator[control_pb2.ClientMessage]) -> None:
        """One session, from Hello to its end."""
        first = await anext(aiter(messages), None)
        if first is None or not first.HasField("hello"):
            raise RemoteProtocolError(expected="Hello", received="nothing" if first is None else "another message")
        try:
            await self._is_repaired.wait()  # a retry of a write must not meet its own completion
            self._refuse_when_draining()
            session = await self._sessions.open(first.hello, link)
        except TDServeError as error:
            await link.send(control_pb2.ServerMessage(failure=encode_failure(error)))
            return
        self._answers.forget_before(session.client_id, first.hello.oldest_request)
        reading = asyncio.create_task(self._read(session, messages))
        ended = asyncio.create_task(session.ended.wait())
        try:
            await asyncio.wait({reading, ended}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            reading.cancel()
            ended.cancel()
            # Shielded: grpc cancels this coroutine when the client is gone, and its rows must still be given back.
            await asyncio.shield(self._end(session))

    async def _end(self, session: ClientSession) -> None:
        self._groups.on_session_ended(session.number)
        self._relays.on_session_ended(session.number)
        await self._sessions.close(session)
        self._claiming.on_session_ended(session)
        self._relays.on_session_ended(session.number)  # a request of it may have been placed meanwhile
        if session.invitation is not None:
            self._departures.watch(session.invitation.lock_name, _is_gone)
        self._samples.release(session.number)
        await self._creation.abandon(session.number)
        self._forget_later(session.client_id)

    def _forget_later(self, client_id: bytes) -> None:
        asyncio.get_running_loop().call_later(KEEP_ANSWERS_S, self._forget, client_id)

    def _forget(self, client_id: bytes) -> None:
        if all(session.client_id != client_id for session in self._sessions):
            self._answers.forget_client(client_id)

    async def _read(self, session: ClientSession, messages: AsyncIterator[control_pb2.ClientMessage]) -> None:
        async for message in messages:
            if message.HasField("rendezvous") and message.rendezvous.link:
                self._relays.hand_on(session, message.rendezvous)
            elif message.HasField("rendezvous"):
                session.rendezvous(message.rendezvous)
            else:
                self._take(session, message, session.run)

    def _take_at_once(self, session: ClientSession, message: control_pb2.ClientMessage) -> None:
        self._take(session, message, session.run_at_once)

    def _take(
        self,
        session: ClientSession,
        message: control_pb2.ClientMessage,
        run: Callable[[Coroutine[Any, Any, None], int], None],
    ) -> None:
        """A request or its cancellation, whichever way it came; ``run`` serves it."""
        if message.HasField("cancel"):
            session.cancel(message.cancel.cancelled)
        elif message.HasField("claimed"):
            self._claiming.on_claimed(session, message.claimed)
        elif message.HasField("group_notice"):
            self._groups.on_notice(session, message.group_notice)
        elif message.HasField("relay_report"):
            self._relays.on_report(session, message.relay_report)
        elif self._is_draining:
            session.run(self._refuse(session, message.request), 0)
        else:
            run(self._requests.serve(session, message), message.request)

    async def _refuse(self, session: ClientSession, request: int) -> None:
        await session.fail(request, self._draining_error())

    def _draining_error(self) -> ConnectError:
        return ConnectError(address=f"{self._config.host}", reason="the server is shutting down")

    def _refuse_when_draining(self) -> None:
        if self._is_draining:
            raise self._draining_error()

    async def create_store(self, request: control_pb2.CreateStoreRequest) -> control_pb2.CreateStoreResponse:
        """Creates a store, or finds the one that is accepted in its place."""
        self._refuse_when_draining()
        # Shielded: a caller that goes away in the middle would leave files that are still being made.
        return await asyncio.shield(self._creation.create(request))

    async def describe_store(self, request: control_pb2.DescribeStoreRequest) -> control_pb2.StoreDescription:
        """Describes a store, waited for if it does not exist yet."""
        entry = await self._stores.wait(request.name, Deadline.after(request.timeout_s))
        return descriptions.describe(self._stores, entry, with_spec=not request.without_spec)

    async def list_stores(self, request: control_pb2.ListStoresRequest) -> control_pb2.ListStoresResponse:
        """One page of names."""
        return descriptions.list_stores(self._stores, request)

    async def delete_store(self, request: control_pb2.DeleteStoreRequest) -> control_pb2.DeleteStoreResponse:
        """Deletes a store."""
        self._refuse_when_draining()
        await self._creation.delete(request.name)
        self._relays.forget_deleted()
        return control_pb2.DeleteStoreResponse()

    async def list_keys(self, request: control_pb2.ListKeysRequest) -> control_pb2.ListKeysResponse:
        """The keys of a store."""
        return descriptions.list_keys(self._stores.get(check_store_name(request.name)), request)

    async def get_stats(self, request: control_pb2.GetStatsRequest) -> control_pb2.GetStatsResponse:
        """Figures of the server as a whole."""
        await self._traffic.count_reads(self._workers)
        self._claiming.catch_up()
        response = control_pb2.GetStatsResponse(
            server_id=self._root.server_id,
            uptime_s=time.monotonic() - self._started_s,
            num_stores=len(self._stores.catalog),
            num_sessions=len(self._sessions),
            transports=self._traffic.stats(),
            root=str(self._root.path),
            root_free_bytes=self._root.free_bytes(),
            version=_package_version(),
        )
        for worker in self._workers:
            response.workers.add(
                worker=worker.number,
                pid=worker.pid,
                num_restarts=worker.num_restarts,
                is_ready=worker.ready.is_set(),
            )
        for session in self._sessions:
            response.sessions.add(
                session=session.number,
                host=session.hello.host,
                pid=session.hello.pid,
                transport=session.transport,
                worker=session.worker.number,
            )
        return response


def _is_gone() -> None:
    """Nobody waits for the client of a session that has written all that it was let write."""


def _package_version() -> str:
    try:
        return version("tdserve")
    except PackageNotFoundError:  # run from a source tree that was not installed
        return "unknown"
