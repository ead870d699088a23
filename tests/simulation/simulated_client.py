"""A client of a simulation: it numbers its requests, repeats those that are not answered over the next session, and
reports which answers have arrived, as the protocol has it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

from tdserve.base.config import PROTOCOL_VERSION
from tdserve.base.deadline import compute_grace_s
from tdserve.base.errors import (
    CapacityError,
    ConnectError,
    DeadlineExceededError,
    ServerBusyError,
    TDServeError,
    TransferAbortedError,
    TransportError,
)
from tdserve.control.status import decode_failure
from tdserve.v1 import control_pb2
from tests.simulation.network import Link
from tests.simulation.simulated_server import SimulatedServer
from tests.simulation.virtual_time import clock, pause

BACKOFF_S = 0.05
LATE_S = 1.0
"""A live server answers a request that has arrived at most this long after its deadline."""


class UnknownError(Exception):
    """The call ended without an answer: it may have been carried out or not."""


class SimulatedClient:
    """A client, through all its sessions.

    Args:
        server: The server.
        chance: Decides what it does.
        client_id: Names it.
    """

    def __init__(self, server: SimulatedServer, chance: random.Random, client_id: bytes) -> None:
        self.server = server
        self.chance = chance
        self.client_id = client_id
        self.session = 0
        self.link: Link | None = None
        self._worker = 0
        self._next = 1
        self._open: set[int] = set()
        self._connecting = asyncio.Lock()

    def cut(self) -> None:
        """Loses the connection, as by a fault of the network."""
        if self.link is not None:
            self.link.cut()

    @property
    def lease_scope(self) -> object:
        """What leases end with: the session."""
        return self.link if self.link is not None and not self.link.is_lost else None

    # ------------------------------------------------------------ calls

    async def call(
        self, timeout_s: float, *, by_mail: bool = False, on_attempt: Callable[[], None] | None = None, **body: Any
    ) -> control_pb2.Done:
        """Makes one call, with as many attempts as it takes.

        Args:
            timeout_s: The time it has.
            by_mail: Whether the request goes to the data worker by mail.
            on_attempt: Called before each attempt.
            body: The request.

        Raises:
            TDServeError: The server's answer: nothing was changed.
            ConnectError: The server was not there in time: nothing was sent.
            UnknownError: There was no answer in time.
        """
        request, self._next = self._next, self._next + 1
        self._open.add(request)
        self.server.num_calls += 1
        until_s = clock.now_s + timeout_s
        grace_s = compute_grace_s(timeout_s)
        is_sent = False
        try:
            while True:
                link = await self._connect(until_s + grace_s)
                is_sent = True
                if on_attempt is not None:
                    on_attempt()
                answer = await self._attempt(link, request, until_s, grace_s, by_mail=by_mail, **body)
                if "extend" in body:  # a data worker cannot know what became of the first attempt
                    body["extend"].ClearField("wished_claim")
                if answer is None:
                    if clock.now_s >= until_s + grace_s:
                        raise UnknownError
                    continue
                if answer.HasField("done"):
                    return answer.done
                error = decode_failure(answer.failure)
                may_repeat = isinstance(error, (TransportError, ServerBusyError, TransferAbortedError))
                if not may_repeat or isinstance(error, (DeadlineExceededError, CapacityError)):
                    raise error
                if clock.now_s >= until_s:
                    raise UnknownError
                await pause(BACKOFF_S * self.chance.random())
        except TimeoutError:
            raise (UnknownError if is_sent else ConnectError(reason="none in time")) from None
        finally:
            self._open.discard(request)

    async def _attempt(
        self, link: Link, request: int, until_s: float, grace_s: float, *, by_mail: bool, **body: Any
    ) -> control_pb2.ServerMessage | None:
        """Sends a request once; None if the link was lost, or there was no answer in time."""
        message = control_pb2.ClientMessage(request=request, **body)
        asked = getattr(message, message.WhichOneof("body") or "")
        if "timeout_s" in asked.DESCRIPTOR.fields_by_name:
            asked.timeout_s = max(until_s - clock.now_s, 0.0)
        if self.chance.random() < 0.5:
            message.answered.CopyFrom(self._report())
        arrived = link.expect(request, until_s + grace_s + LATE_S)
        life = self.server.life
        if by_mail:
            content, session, worker = message.SerializeToString(), self.session, self._worker
            link.later("mail up", lambda: self.server.take_mail(session, worker, content))
        else:
            link.send(message)
        answer = await arrived
        if answer is not None or link.is_lost or life is not self.server.life or by_mail:
            return answer
        kind = message.WhichOneof("body")
        raise AssertionError(f"a {kind} was not answered {clock.now_s - until_s:.2f} s after its deadline")

    def give_up(self, request: int) -> None:
        """Cancels a request."""
        if self.link is not None:
            self.link.send(
                control_pb2.ClientMessage(request=request, cancel=control_pb2.CancelRequest(cancelled=request))
            )

    @property
    def newest(self) -> int:
        """The number of the newest request."""
        return self._next - 1

    def _report(self) -> control_pb2.Answered:
        below = min(self._open, default=self._next)
        return control_pb2.Answered(below=below)

    # ------------------------------------------------------------ sessions

    async def _connect(self, until_s: float) -> Link:
        """Returns the link; opens another one if it is lost. Raises TimeoutError."""
        async with self._connecting:
            while self.link is None or self.link.is_lost:
                if clock.now_s >= until_s:
                    raise TimeoutError
                try:
                    await asyncio.wait_for(self.server.wait_up(), until_s - clock.now_s)
                    await self._open_link(until_s)
                except asyncio.TimeoutError:
                    raise TimeoutError from None
            return self.link

    async def _open_link(self, until_s: float) -> None:
        link = Link(self.server.choose_delay_s)
        if not self.server.open(link):
            await pause(BACKOFF_S)
            return
        hello = control_pb2.Hello(protocol_version=PROTOCOL_VERSION, client_id=self.client_id, transport="gloo")
        welcomed = link.expect(0, until_s)
        link.send(control_pb2.ClientMessage(hello=hello, answered=self._report()))
        answer = await welcomed
        if answer is None:
            link.cut()
            return
        if answer.HasField("failure"):
            error = decode_failure(answer.failure)
            assert isinstance(error, TDServeError)
            assert error.retryable, f"a session was refused: {error}"
            link.cut()
            await pause(BACKOFF_S)
            return
        self.link, self.session, self._worker = link, answer.welcome.session, answer.welcome.worker
        self.server.links[self.session] = link
        entry = control_pb2.Rendezvous(key="mail", value=b"", is_mail=True)
        link.send(control_pb2.ClientMessage(rendezvous=entry))
