"""The control process assembled: stores, sessions, workers and rules behind the methods of the service.

``server/README.md`` has a reading order of recovery.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from functools import partial
from threading import Event

from tdserve.base.adoptions import split_adoption
from tdserve.base.config import ServerConfig
from tdserve.base.deadline import Deadline
from tdserve.base.errors import RemoteProtocolError, TDServeError
from tdserve.base.failpoints import reach
from tdserve.base.worker_arguments import WorkerArguments
from tdserve.control.content_relay import ContentConnection
from tdserve.control.servicer import SessionConnection
from tdserve.control.status import encode_failure
from tdserve.rules.access.grants import FULL_CALLER, Caller, Grant
from tdserve.server.access.gate import Gate
from tdserve.server.access.token_register import TokenRegister
from tdserve.server.access.unary_calls import UnaryCalls
from tdserve.server.dispatch.requests import Requests
from tdserve.server.dispatch.services import assemble
from tdserve.server.dispatch.session_messages import SessionMessages
from tdserve.server.durability.compaction import compact_all
from tdserve.server.movers.choosing import make_channel_movers, make_local_movers
from tdserve.server.observation import Observation, read_package_version
from tdserve.server.processes.client_process import ClientProcess
from tdserve.server.processes.observer_process import ObserverProcess
from tdserve.server.processes.worker_processes import WorkerProcesses
from tdserve.server.processes.workers import DataWorker
from tdserve.server.recovery.process_watch import ProcessWatch
from tdserve.server.sessions.client_session import ClientSession
from tdserve.server.sessions.clients import Clients
from tdserve.server.sessions.local_listener import LocalListener
from tdserve.server.sessions.mover import Movers
from tdserve.server.sessions.register import Sessions
from tdserve.store.database.catalog_db import CatalogDB
from tdserve.store.roots.root import Root
from tdserve.v1 import control_pb2, worker_pb2

KEEP_CLIENTS_S = 600.0
"""Time without a session after which a client is forgotten, and with it its answers and the stores that it was bringing
here."""

SETTLE_AFTER_S = 1.0
"""Interval between attempts to write changes that the catalog owes; every later change tries as well."""

HELLO_TIMEOUT_S = 10.0
"""Limit for the first message of a session; clients send it together with the call."""

_log = logging.getLogger("tdserve.server")


class ControlProcess:
    """The handlers of the service's methods (``tdserve.control.servicer.Handlers``).

    Args:
        config: Configuration of the server.
        root: The acquired root.
        observer: The process that shows its figures, which is stopped with it; None for none.
        checkpoints: The process that writes checkpoints of it, likewise.
        tokens: The tokens of callers, whose sessions end with them; None if none is asked for.
        make_worker: Makes each data worker; arguments as in ``DataWorker``.
        worker_processes: Starts their processes; None: one of its own.

    Attributes:
        gate: Checks what callers ask for.
    """

    _settling: asyncio.TimerHandle | None = None

    _watching: asyncio.Task[None] | None = None

    _removing: asyncio.Task[None] | None = None

    def __init__(
        self,
        config: ServerConfig,
        root: Root,
        observer: ObserverProcess | None = None,
        tokens: TokenRegister | None = None,
        checkpoints: ClientProcess | None = None,
        *,
        make_worker: Callable[..., DataWorker] = DataWorker,
        worker_processes: WorkerProcesses | None = None,
    ) -> None:
        self.gate = Gate()
        self._tokens = tokens
        self._calls = UnaryCalls(self.gate.audit)
        self._config = config
        self._root = root
        self._is_repaired = asyncio.Event()
        self._db = CatalogDB(root.find_catalog())
        self._db.on_owed = self._settle_later
        self._process_watch = ProcessWatch(root.sessions_folder)
        self._worker_processes = worker_processes or WorkerProcesses(root.lock_fd, timeout_s=config.worker_timeout_s)
        self._workers = [self._make_worker(number, make_worker) for number in range(config.num_workers)]
        sessions = self._sessions = Sessions(config, self._workers, root, self._make_movers, self.gate)
        watch, workers = self._process_watch, self._workers
        services = self._services = assemble(config, root, self._db, watch, workers, sessions)
        self._requests = Requests(services)
        self._messages = SessionMessages(
            services, self._requests, self.gate, host=config.host, folder=root.requests_folder
        )
        self._clients = Clients(KEEP_CLIENTS_S, (services.answers, services.moves.arriving))
        self._observation = Observation(
            root,
            services,
            self._workers,
            self._worker_processes,
            self._sessions,
            observer,
            checkpoints,
            config.checkpoint_every_s or 0.0,
        )
        self._observer = observer
        self._checkpoints = checkpoints
        make_local = partial(make_local_movers, services.mover_context)
        self._local_listener = LocalListener(
            root, self._sessions, self._process_watch, make_local, self._messages.handle_at_once
        )

    def _make_worker(self, number: int, make: Callable[..., DataWorker]) -> DataWorker:
        config = self._config
        arguments = WorkerArguments(
            number,
            config.transfer_timeout_s,
            config.memory_limit_bytes,
            device=config.devices[number] if config.devices else "",
            interface=config.interface or "",
        )
        return make(
            arguments,
            self._worker_processes,
            timeout_s=config.worker_timeout_s,
            on_session=self._on_session_report,
            on_lost=self._on_worker_lost,
            on_span=self._on_worker_span if config.trace_endpoint else None,
        )

    def _make_movers(self, session: ClientSession) -> Movers:
        return make_channel_movers(self._services.mover_context, session)

    def describe(self) -> str:
        """Returns what is served and by how many processes, for the log."""
        num_stores, num_workers = len(self._services.stores.catalog), len(self._workers)
        return f"version {read_package_version()}, stores: {num_stores}, data workers: {num_workers}"

    def restore(self) -> None:
        """Reads the catalog while another process imports what workers need. Call it before requests can arrive."""
        self._worker_processes.start()
        self._services.stores.restore()
        reach("recovery.catalog-read")

    def _on_worker_lost(self, worker: DataWorker) -> None:
        self._sessions.on_worker_lost(worker)
        if worker.claim_holder is not None:
            self._services.claiming.on_worker_lost(worker.claim_holder)

    def _on_worker_span(self, worker: DataWorker, report: worker_pb2.Report) -> None:
        if self._services.traces is not None:
            self._services.traces.add_worker_span(report.span, report.session, number=worker.number, pid=worker.pid)

    def _on_session_report(self, report: worker_pb2.Report) -> None:
        if report.HasField("mail"):
            if (session := self._sessions.find(report.session)) is not None:
                self._messages.handle_mail(session, report.mail)
        elif report.HasField("claimed"):
            self._services.claiming.on_claimed(report.claimed, None)
        else:
            self._sessions.on_report(report)

    async def start(self) -> None:
        """Starts the workers and completes what a crash has cut short; sessions can be opened from then on."""
        self._services.moves.restore()
        self._services.claiming.restore()
        self._process_watch.remove_unused()
        self._clients.restore()
        await self._compact()
        for worker in self._workers:
            worker.start()
        await self._services.alterations.repair()  # first: recorded writes refer to the newest structure
        reach("recovery.keys-finished")
        repaired = await self._services.writes.repair()
        reach("recovery.writes-finished")
        self._root.empty_requests()
        if repaired:
            _log.warning("%d writes that a crash had cut short were completed", repaired)
        for path, name, read_only in map(split_adoption, self._config.adopt):
            await self._services.adoption.adopt_at_start(name, path, read_only=read_only)
        await self._services.syncing.start()
        await self._local_listener.open()
        self._services.stores.unfinished_writes.on_open()
        if self._tokens is not None:
            watching = self._tokens.watch(partial(self._end_outdated, self._tokens.explain_end))
            self._watching = asyncio.create_task(watching, name="tdserve-tokens")
        self._is_repaired.set()

    def _end_outdated(self, explain_end: Callable[[Grant], str | None]) -> None:
        self._sessions.end_outdated(explain_end, self._config.host)
        self._calls.end_outdated(explain_end, self._config.host)

    async def _compact(self) -> None:
        """Compacts all stores; if it is cancelled, only the one whose turn it is, to its end: until then its thread
        uses the catalog, and writes in the root."""
        stores, is_over = self._services.stores, Event()
        work = asyncio.to_thread(compact_all, self._root, stores.specs, list(stores.catalog), is_over.is_set)
        compacting = asyncio.create_task(work, name="tdserve-compaction")
        try:
            await asyncio.shield(compacting)
        except asyncio.CancelledError:
            is_over.set()
            await asyncio.wait({compacting})
            raise

    async def drain(self) -> None:
        """Refuses new requests, waits for those under way until the grace period is over, then ends the sessions."""
        self._messages.is_draining = True
        if self._checkpoints is not None:
            await self._checkpoints.stop()
        deadline = Deadline.after(self._config.grace_s)
        await asyncio.gather(*(session.finish(deadline.remaining_s or 0.0) for session in self._sessions))
        for session in self._sessions:
            session.ended.set()

    async def stop(self) -> None:
        """Ends the workers and closes the catalog."""
        self._worker_processes.close()
        self._local_listener.close()
        if self._watching is not None:
            self._watching.cancel()
        for process in (self._observer, self._checkpoints):
            if process is not None:
                await process.stop()
        self._services.alterations.close()
        self._services.lease_timer.close()
        self._process_watch.close()
        self._process_watch.remove_unused()
        await asyncio.gather(*(worker.stop() for worker in self._workers))
        await self._worker_processes.stop()
        if self._settling is not None:
            self._settling.cancel()
        is_synced = await self._services.syncing.stop(self._config.grace_s)
        self._db.sync()
        self._db.close()
        if self._services.traces is not None:
            await asyncio.to_thread(self._services.traces.close)
        if is_synced:
            await asyncio.to_thread(self._root.run.note_orderly_end)

    async def serve_session(
        self, connection: SessionConnection, messages: AsyncIterator[control_pb2.ClientMessage]
    ) -> None:
        """Serves one session, from Hello to its end."""
        first = await _receive_first(messages)
        if first is None or not first.HasField("hello"):
            raise RemoteProtocolError(expected="Hello", received="nothing" if first is None else "another message")
        try:
            await self._is_repaired.wait()  # a retry of a write must not meet its own completion
            self._messages.refuse_when_draining()
            session = await self._sessions.open(first.hello, connection)
        except TDServeError as error:
            await connection.send(control_pb2.ServerMessage(failure=encode_failure(error)))
            return
        self._clients.on_opened(session.client_id)
        self._messages.forget_answers(session.client_id, first.answered)
        reading = asyncio.create_task(self._read(session, messages))
        ended = asyncio.create_task(session.ended.wait())
        try:
            await asyncio.wait({reading, ended}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            reading.cancel()
            ended.cancel()
            # Shielded: grpc cancels this coroutine when the client is gone, but its rows must still be given back.
            await asyncio.shield(self._end(session))
        if session.end_error is not None:
            raise session.end_error

    async def _end(self, session: ClientSession) -> None:
        try:
            self._services.groups.on_session_ended(session.number)
            self._services.relays.on_session_ended(session.number)
            await self._sessions.close(session)
            self._services.claiming.on_session_ended(session)
            self._services.relays.on_session_ended(session.number)  # one of its requests may have been placed meanwhile
            if session.invitation is not None:
                self._process_watch.watch(session.invitation.lock_name, _do_nothing)
            await self._services.samples.release(session.number)
            await self._services.moves.on_session_ended(session.number)
            await self._services.creation.abandon(session.number)
        finally:
            await self._messages.forget(session)
            self._clients.on_ended(session.client_id)

    def _settle_later(self) -> None:
        if self._settling is None:
            self._settling = asyncio.get_running_loop().call_later(SETTLE_AFTER_S, self._settle)

    def _settle(self) -> None:
        self._settling = None
        self._db.settle()
        self._removing = asyncio.create_task(self._requests.remove_kept_lists(), name="tdserve-kept-lists")

    async def _read(self, session: ClientSession, messages: AsyncIterator[control_pb2.ClientMessage]) -> None:
        async for message in messages:
            if message.HasField("rendezvous") and message.rendezvous.hop:
                self._services.relays.hand_on(session, message.rendezvous)
                continue
            if session.movers.uses_channels:  # the client may wait already for content that only a worker can send
                await session.worker.wait_ready(session.ended)
            if message.HasField("rendezvous"):
                session.send_rendezvous(message.rendezvous)
            else:
                self._messages.handle(session, message, session.run)
            await session.refusals.wait_for_room()

    async def describe_store(
        self, request: control_pb2.DescribeStoreRequest, caller: Caller = FULL_CALLER
    ) -> control_pb2.StoreDescription:
        """Describes a store; waits until it exists. Errors as in ``CatalogRequests`` and ``Gate.authorize``."""
        with self._calls.hold(caller), self.gate.authorize(caller, "describe_store", request):
            return await self._services.catalog.describe_store(request)

    async def list_stores(
        self, request: control_pb2.ListStoresRequest, caller: Caller = FULL_CALLER
    ) -> control_pb2.ListStoresResponse:
        """Returns one page of the store names that the caller's token includes."""
        with self._calls.hold(caller), self.gate.authorize(caller, "list_stores", request):
            return self._services.catalog.list_stores(request, caller.grant)

    async def list_keys(
        self, request: control_pb2.ListKeysRequest, caller: Caller = FULL_CALLER
    ) -> control_pb2.ListKeysResponse:
        """Returns the keys of a store."""
        with self._calls.hold(caller), self.gate.authorize(caller, "list_keys", request):
            return await self._services.catalog.list_keys(request)

    async def get_stats(
        self, request: control_pb2.GetStatsRequest, caller: Caller = FULL_CALLER
    ) -> control_pb2.GetStatsResponse:
        """Returns figures of the whole server, as far as the caller's token grants them."""
        with self._calls.hold(caller), self.gate.authorize(caller, "get_stats", request):
            return await self._observation.get_stats(caller.grant)

    async def exchange_content(self, connection: ContentConnection) -> None:
        """Relays the content of a session. Errors as in ``Sessions.exchange_content``."""
        await self._sessions.exchange_content(connection)

    def hold_answer(self, nbytes: int) -> Callable[[], None]:
        """Counts the memory of an answer to a call. Errors as in ``AdmissionBudget.hold_answer``."""
        return self._services.unsent.hold_answer(nbytes)

    async def observe(
        self, request: control_pb2.ObserveRequest, caller: Caller = FULL_CALLER
    ) -> control_pb2.ObserveResponse:
        """Returns what an observer shows, as far as the caller's token grants it."""
        with self._calls.hold(caller), self.gate.authorize(caller, "observe", request):
            return await self._observation.observe(request, caller.grant)


async def _receive_first(messages: AsyncIterator[control_pb2.ClientMessage]) -> control_pb2.ClientMessage | None:
    """Returns the first message of a stream; None if the stream ends or nothing comes in time."""
    try:
        return await asyncio.wait_for(anext(aiter(messages), None), HELLO_TIMEOUT_S)
    except asyncio.TimeoutError:
        return None


def _do_nothing() -> None:
    """Does nothing: no request waits for the end of a client that has finished its writes."""
