"""All sessions of the control process: opened after Hello, superseded when their client reconnects, ended."""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
from collections import Counter
from collections.abc import Callable, Iterator

from tdserve.base.addresses import find_interface_address, find_local_address, find_peer_host
from tdserve.base.config import PROTOCOL_VERSION, ServerConfig
from tdserve.base.deadline import Deadline
from tdserve.base.errors import (
    DeadlineExceededError,
    PeerLostError,
    ProtocolVersionError,
    TransferAbortedError,
    UnauthenticatedError,
)
from tdserve.base.ids import check_client_id, check_text
from tdserve.base.machine import read_boot_id
from tdserve.control.content_relay import ContentConnection
from tdserve.control.servicer import SessionConnection
from tdserve.rules.access.grants import Grant
from tdserve.rules.channel_transports import (
    CHANNEL_TRANSPORTS,
    SessionEnds,
    check_available,
    choose_channel,
    is_local_allowed,
)
from tdserve.rules.trusted_network import TrustedNetwork, is_range
from tdserve.server.access.gate import Gate
from tdserve.server.execution.waiting import wait_any
from tdserve.server.processes.workers import DataWorker
from tdserve.server.sessions.admission import check_room
from tdserve.server.sessions.client_session import ClientSession
from tdserve.server.sessions.local_client import Invitation
from tdserve.server.sessions.mover import Movers
from tdserve.server.sessions.session_limits import MAX_REASON
from tdserve.store.roots.root import Root
from tdserve.v1 import control_pb2, worker_pb2

OPEN_TIMEOUT_S = 60.0
"""Time for a data worker to start: about three seconds (torch), but over twenty were seen on a busy machine."""

SPREAD_S = 1.0
"""Time in which the other workers become ready once the first has, when a server starts: they are forked one after the
other."""

END_GRACE_S = 5.0
"""Time for a worker to report the end of a transfer, after the transfer timeout that ends it at the latest."""

FIRST_NUMBER_BITS = 40
"""Random bits of a run's first session number. With a thousand sessions per run, a number recurs once in a thousand
million restarts."""

_log = logging.getLogger("tdserve.server")


class Sessions:
    """The sessions by number and by client.

    Args:
        config: Configuration of the server.
        workers: The data workers; each session gets one.
        root: The acquired root.
        make_movers: Makes the movers of a session.
        gate: Checks whether a token may have another session; by default one of its own.

    Attributes:
        is_lending: Whether local clients that do not see the root may borrow descriptors.
    """

    def __init__(
        self,
        config: ServerConfig,
        workers: list[DataWorker],
        root: Root,
        make_movers: Callable[[ClientSession], Movers],
        gate: Gate | None = None,
    ) -> None:
        self._gate = gate or Gate()
        self._config = config
        self._workers = workers
        self._root = root
        self._make_movers = make_movers
        self._network = _read_trusted_network(config)
        self._server_id = root.server_id
        self._boot_id = read_boot_id()
        self._by_number: dict[int, ClientSession] = {}
        self._num_expected: Counter[int] = Counter()  # clients that wait for a worker, by its number
        self.is_lending = False
        # Not from 1: a call that names a session may be retried in the next run of the server, where a small number
        # would belong to another client.
        self._last_number = secrets.randbits(FIRST_NUMBER_BITS)

    def __len__(self) -> int:
        return len(self._by_number)

    def __contains__(self, number: object) -> bool:
        """Returns whether a session is open and has not begun to end."""
        session = self._by_number.get(number) if isinstance(number, int) else None
        return session is not None and not session.ended.is_set()

    def __iter__(self) -> Iterator[ClientSession]:
        return iter(list(self._by_number.values()))

    async def open(self, hello: control_pb2.Hello, connection: SessionConnection) -> ClientSession:
        """Opens a session: answers Hello with Welcome.

        An older session of the same client is ended first, together with its transfers. Only then is it certain which
        of its requests were committed, so that a retried request is stored once.

        Raises:
            ProtocolVersionError, NotSupportedError, InvalidRequestError: The client cannot be served.
            DeadlineExceededError: No data worker started in time.
            ServerBusyError: There are too few descriptors for another client, or its token has no more sessions.
            TransferAbortedError: The older session does not end; a retry could be stored twice.
        """
        self._check(hello)
        for older in self:
            if older.client_id == hello.client_id:
                older.ended.set()
                if not await older.finish(self._config.transfer_timeout_s + END_GRACE_S):
                    raise TransferAbortedError(transfer=0, reason=f"session {older.number} of this client does not end")
        invitation = self._make_invitation(hello)
        # A client that maps the files needs no worker for most calls; a GPU is known once its worker has started.
        worker = await self._choose_worker(hello.gpu, waits=invitation is None or bool(hello.gpu))
        chosen = self._config.interface
        interface = find_local_address(connection.peer) if chosen is None else find_interface_address(chosen)
        why_unlinked = self._network.explain_one_port(find_peer_host(connection.peer), interface)
        ends = SessionEnds(
            hello.gpu,
            worker.gpu,
            worker.why_no_gpu,
            is_one_machine=self._is_here(hello),
            why_one_port=why_unlinked or hello.why_one_port[:MAX_REASON],
        )
        channel = choose_channel(hello.transport, ends)
        check_room(worker, self, channel.transport)
        caller = connection.caller
        self._gate.check_session(caller, (each.caller for each in self if not each.ended.is_set()))
        self._last_number += 1
        session = ClientSession(
            self._last_number,
            hello,
            connection,
            make_movers=self._make_movers,
            worker=worker,
            interface=interface,
            inline_bytes=self._config.inline_bytes,
            invitation=invitation,
            channel_transport=channel.transport,
            is_traced=bool(self._config.trace_endpoint),
            why_unlinked=why_unlinked,
            caller=caller,
            gate=self._gate,
        )
        self._by_number[session.number] = session
        welcome = control_pb2.Welcome(why_not=channel.why_not, interface=interface)
        try:
            await connection.send(control_pb2.ServerMessage(welcome=self._complete(welcome, session)))
        except BaseException:  # the client went away just now, and no other part has the session
            await self.close(session)
            raise
        return session

    def _complete(self, welcome: control_pb2.Welcome, session: ClientSession) -> control_pb2.Welcome:
        """Adds to a welcome what follows from the session."""
        worker, channel_transport = session.worker, CHANNEL_TRANSPORTS[session.channel_transport]
        welcome.protocol_version, welcome.server_id = PROTOCOL_VERSION, self._server_id
        welcome.session, welcome.secret, welcome.transport = session.number, session.secret, session.transport
        welcome.worker, welcome.gpu = worker.number, worker.gpu if channel_transport.needs_device else ""
        welcome.inline_bytes = self._config.inline_bytes
        if session.invitation is not None:
            welcome.local.CopyFrom(session.invitation.make_message(self._root, is_lending=self.is_lending))
        return welcome

    def _check(self, hello: control_pb2.Hello) -> None:
        """Raises an error if this client can never be served, whatever the state of the server."""
        if hello.protocol_version != PROTOCOL_VERSION:
            raise ProtocolVersionError(
                address=self._server_id, expected=hello.protocol_version, actual=PROTOCOL_VERSION
            )
        check_available(hello.transport)
        check_client_id(hello.client_id)
        for argument in ("host", "boot_id", "gpu"):
            check_text(argument, getattr(hello, argument))

    async def close(self, session: ClientSession) -> None:
        """Ends and removes a session; its worker closes the channel, which ends the transfers on it."""
        session.ended.set()
        order = worker_pb2.Order(session=session.number)
        order.close_session.SetInParent()
        session.worker.send(order)
        await session.finish(self._config.transfer_timeout_s + END_GRACE_S)
        self._by_number.pop(session.number, None)

    def find(self, number: int) -> ClientSession | None:
        """Returns the session of this number; None if there is none."""
        return self._by_number.get(number)

    async def exchange_content(self, connection: ContentConnection) -> None:
        """Relays the bytes of a session's channel until it ends; afterwards another channel takes its place.

        Raises:
            PeerLostError: There is no such session or channel, or the secret is not its.
        """
        number = connection.channel_number
        session = self.find(connection.session)
        if session is None or not hmac.compare_digest(connection.secret, session.secret):
            raise PeerLostError(peer=f"session {connection.session}", reason="it has ended, or its secret is another")
        await session.worker.wait_ready(session.ended)
        stream = session.open_stream(number)
        relaying = asyncio.ensure_future(connection.relay(stream))
        ended = asyncio.ensure_future(session.ended.wait())
        try:
            await asyncio.wait({relaying, ended}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ended.cancel()
            relaying.cancel()
            with stream:  # also if the relay was cancelled before it began
                reason = (await asyncio.gather(relaying, return_exceptions=True))[0]
            self._lose_channel(session, number, f"its stream has ended: {reason}")

    def _lose_channel(self, session: ClientSession, number: int, reason: str) -> None:
        if number == session.channel_number and session.lose_channel(number, reason):
            lost = control_pb2.ChannelLost(channel=number, reason=reason)
            session.send(control_pb2.ServerMessage(channel_lost=lost))

    def on_report(self, report: worker_pb2.Report) -> None:
        """Handles a worker's report about a session: a rendezvous entry for the client, a lost channel, or a lost
        session."""
        session = self._by_number.get(report.session)
        if session is None or session.ended.is_set():
            return
        if report.HasField("rendezvous"):
            message = control_pb2.ServerMessage(rendezvous=report.rendezvous)
            session.send(message)
        elif report.HasField("channel_lost"):
            lost = report.channel_lost
            self._lose_channel(session, lost.channel, f"its data worker reports: {lost.reason}")
        elif report.HasField("session_lost"):
            _log.info("session %d ends: its data worker reports: %s", session.number, report.session_lost.reason)
            session.ended.set()

    def on_worker_lost(self, worker: DataWorker) -> None:
        """Ends the sessions of a worker that died, so that their clients reconnect."""
        for session in self:
            if session.worker is worker and session.movers.uses_channels:
                session.ended.set()

    def end_outdated(self, explain_end: Callable[[Grant], str | None], server_address: str) -> None:
        """Ends the sessions whose token is over. Clients of those whose entry was only changed open others.

        Args:
            explain_end: As ``TokenTable.explain_end``.
            server_address: Address of this server, for their error.
        """
        for session in self:
            reason = explain_end(session.caller.grant)
            if reason is None or session.ended.is_set():
                continue
            if reason:
                session.end_error = UnauthenticatedError(address=server_address, reason=reason)
            self._gate.audit.note_end(session.caller, reason or "the entry of its token was changed")
            session.ended.set()

    def _make_invitation(self, hello: control_pb2.Hello) -> Invitation | None:
        """Returns an invitation for a client on this machine that may map the files; None for others."""
        return Invitation.make() if self._is_here(hello) and is_local_allowed(hello.transport) else None

    def _is_here(self, hello: control_pb2.Hello) -> bool:
        return bool(hello.boot_id) and hello.boot_id == self._boot_id

    async def _choose_worker(self, client_gpu: str, *, waits: bool) -> DataWorker:
        """Returns the worker with the fewest sessions, on another GPU than the client's if possible.

        Args:
            waits: Whether to wait until one has started, if none has.
        """
        ready = self._list_ready()
        if waits and not ready:
            await self._await_start()
            ready = self._list_ready()
        return min(
            ready or self._workers,
            key=lambda worker: (bool(client_gpu) and worker.gpu in ("", client_gpu), self._count_sessions(worker)),
        )

    def _list_ready(self) -> list[DataWorker]:
        return [worker for worker in self._workers if worker.ready.is_set()]

    def _count_sessions(self, worker: DataWorker) -> int:
        """Returns how many sessions a worker has, or will have when it has started."""
        return sum(session.worker is worker for session in self) + self._num_expected[worker.number]

    async def _await_start(self) -> None:
        """Waits until a worker has started.

        The clients of a server that was started again all wait here. They must not all get the worker that is ready
        first, some milliseconds before the next one. So each expects another worker, and waits a little for that one.

        Raises:
            DeadlineExceededError: None has started in time.
        """
        expected = min(self._workers, key=self._count_sessions)
        self._num_expected[expected.number] += 1
        try:
            deadline = Deadline.after(OPEN_TIMEOUT_S)
            while not self._list_ready():
                if not await wait_any([each.ready for each in self._workers], timeout_s=deadline.remaining_s):
                    raise DeadlineExceededError(what="the start of a data worker", timeout_s=OPEN_TIMEOUT_S)
            await wait_any([expected.ready], timeout_s=SPREAD_S)
        finally:
            self._num_expected[expected.number] -= 1


def _read_trusted_network(config: ServerConfig) -> TrustedNetwork:
    text = config.trusted_network or ""
    return TrustedNetwork.make(
        is_encrypted=config.tls_cert is not None,
        has_one_port=config.one_port,
        text=text,
        interface=find_interface_address(text) if text and not is_range(text) else "",
    )
