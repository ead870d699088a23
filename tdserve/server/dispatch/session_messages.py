"""The messages of sessions after Hello: notices, requests, and parts of them, whichever way they come."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError

from tdserve.base.errors import ConnectError, TDServeError
from tdserve.server.access.gate import Gate
from tdserve.server.dispatch.requests import Requests
from tdserve.server.dispatch.services import Services
from tdserve.server.sessions.client_session import ClientSession
from tdserve.server.sessions.incoming_parts import IncomingParts
from tdserve.v1 import control_pb2

_NOTICES = ("claimed", "group_notice", "relay_report", "client_report")
"""Kinds of notices that the gate is asked about, and that are taken even while the server drains."""

_Run = Callable[[Coroutine[Any, Any, None], int], None]
"""Runs the coroutine that serves the request of this number."""


class SessionMessages:
    """The router of messages to the parts of the control process.

    Args:
        services: The parts that handle notices.
        requests: Serves requests.
        gate: Checks notices.
        host: Name of the server, for the error of requests that are refused at its end.
        folder: Folder for files of long lists.

    Attributes:
        is_draining: Whether new requests are refused.
    """

    def __init__(self, services: Services, requests: Requests, gate: Gate, *, host: str, folder: Path) -> None:
        self.is_draining = False
        self._services = services
        self._requests = requests
        self._gate = gate
        self._host = host
        self._incoming = IncomingParts(folder, services.held)

    async def forget(self, session: ClientSession) -> None:
        """Drops what has arrived of messages when their session ends."""
        await self._incoming.forget(session)

    def forget_answers(self, client_id: bytes, answered: control_pb2.Answered) -> None:
        """Drops answers that have arrived. Extends that workers have answered are committed first: afterwards, one that
        the report names is known to be an attempt that a retry has overtaken."""
        if self._services.claiming.catch_up():
            self._services.answers.forget(client_id, answered)

    def handle_mail(self, session: ClientSession, content: bytes) -> None:
        """Handles a message that a client has sent to its data worker."""
        if session.ended.is_set():
            return
        try:
            message = control_pb2.ClientMessage.FromString(content)
        except DecodeError:
            session.ended.set()
            return
        self.handle(session, message, partial(self._run_mailed, session))

    def _run_mailed(self, session: ClientSession, serving: Coroutine[Any, Any, None], request: int) -> None:
        """Serves a request that came by mail; of other messages nothing is kept, since nothing would end them."""
        session.mailed_requests.add(request)
        session.run_at_once(serving, request)

    def handle_at_once(self, session: ClientSession, message: control_pb2.ClientMessage) -> None:
        """Handles a message like ``handle``, outside a task: requests begin at once."""
        self.handle(session, message, session.run_at_once)

    def handle(self, session: ClientSession, message: control_pb2.ClientMessage, run: _Run) -> None:
        """Handles a message of a client, whichever way it came; ``run`` serves requests."""
        if session.ended.is_set():  # its client may have a new session by now, and repeat its requests there
            return
        if message.HasField("answered"):
            self.forget_answers(session.client_id, message.answered)
        kind = message.WhichOneof("body")
        if kind is None and not message.request:  # it brought only the report
            return
        if kind == "cancel":
            self._requests.cancel(session, message.cancel.cancelled)
        elif kind == "channel_lost":
            lost = message.channel_lost
            session.lose_channel(lost.channel, f"its client reports: {lost.reason[:500]!r}")
        elif kind in _NOTICES:
            self._handle_notice(session, kind, message)
        elif kind == "part":
            self._join_part(session, message, run)
        else:
            self._handle_request(session, message, run)

    def _join_part(self, session: ClientSession, message: control_pb2.ClientMessage, run: _Run) -> None:
        try:
            whole = self._incoming.add(session, message.request, message.part)
        except TDServeError as error:
            session.run(session.fail(message.request, error), 0)
            return
        if whole is not None:
            self.handle(session, whole, run)

    def _handle_request(self, session: ClientSession, message: control_pb2.ClientMessage, run: _Run) -> None:
        ahead = self._incoming.take_lists(session, message.request)
        if not self.is_draining:
            run(self._requests.serve(session, message, ahead), message.request)
            return
        session.run(self._refuse(session, message.request), 0)
        if ahead is not None:
            session.run(ahead.remove(), 0)

    def _handle_notice(self, session: ClientSession, kind: str, message: control_pb2.ClientMessage) -> None:
        """Handles a message that has no answer, and that is handled even while the server is shutting down."""
        services = self._services
        if not self._gate.is_notice_allowed(session.caller, kind, getattr(message, kind)):
            return
        if kind == "claimed":
            services.claiming.on_claimed(message.claimed, session.movers.writes.claim_holder)
        elif kind == "group_notice":
            services.groups.on_notice(session, message.group_notice)
        elif kind == "relay_report":
            services.relays.on_report(session, message.relay_report)
        else:
            services.client_reports.add(session, message.client_report)

    async def _refuse(self, session: ClientSession, request: int) -> None:
        await session.fail(request, self._make_draining_error())

    def _make_draining_error(self) -> ConnectError:
        return ConnectError(address=self._host, reason="the server is shutting down")

    def refuse_when_draining(self) -> None:
        """Raises ConnectError if the server is shutting down."""
        if self.is_draining:
            raise self._make_draining_error()
