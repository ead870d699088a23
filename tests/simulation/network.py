"""Links between clients and the server of a simulation: a stream in each direction, and mail beside it, which overtakes
and is overtaken. A link that is cut loses all that is on its way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from tdserve.v1 import control_pb2


class Link:
    """One connection of a client; also what the server writes its answers to.

    Args:
        choose_delay_s: Returns the time that a message takes.

    Attributes:
        is_lost: Whether it was cut.
        awaited: Answers that the client waits for, by request; 0: the welcome.
    """

    def __init__(self, choose_delay_s: Callable[[], float]) -> None:
        self.is_lost = False
        self.awaited: dict[int, asyncio.Future[control_pb2.ServerMessage | None]] = {}
        self._choose_delay_s = choose_delay_s
        self._arrived: asyncio.Queue[control_pb2.ClientMessage | None] = asyncio.Queue()
        self._next_s = {"up": 0.0, "down": 0.0, "mail up": 0.0, "mail down": 0.0}

    def peer(self) -> str:
        """Returns the client's address."""
        return "ipv4:127.0.0.1:1"

    def cut(self) -> None:
        """Cuts it: the client sees that at once, the server when it next reads."""
        if not self.is_lost:
            self.is_lost = True
            self._arrived.put_nowait(None)
            for request in list(self.awaited):
                self.resolve(request, None)

    def expect(self, request: int, until_s: float) -> asyncio.Future[control_pb2.ServerMessage | None]:
        """Returns what becomes the answer to a request; None once the link is cut or the time is over."""
        loop = asyncio.get_running_loop()
        future = self.awaited[request] = loop.create_future()
        timer = loop.call_at(until_s, self.resolve, request, None)
        future.add_done_callback(lambda _: timer.cancel())
        if self.is_lost:
            self.resolve(request, None)
        return future

    def resolve(self, request: int, message: control_pb2.ServerMessage | None) -> None:
        """Ends the wait for an answer."""
        future = self.awaited.pop(request, None)
        if future is not None and not future.done():
            future.set_result(message)

    def send(self, message: control_pb2.ClientMessage) -> None:
        """Sends a message of the client."""
        content = message.SerializeToString()
        self.later("up", lambda: self._arrived.put_nowait(control_pb2.ClientMessage.FromString(content)))

    async def write(self, message: control_pb2.ServerMessage) -> None:
        """Sends a message of the server."""
        content = message.SerializeToString()
        self.later("down", lambda: self._take(content))

    def _take(self, content: bytes) -> None:
        message = control_pb2.ServerMessage.FromString(content)
        self.resolve(message.request, message)

    def mail_to_client(self, message: control_pb2.ServerMessage) -> None:
        """Sends a message by the way of mail."""
        self.later("mail down", lambda: self.resolve(message.request, message))

    def later(self, way: str, arrive: Callable[[], None]) -> None:
        """Has something arrive later, after all that was sent the same way; unless the link is cut before."""
        loop = asyncio.get_running_loop()
        at_s = self._next_s[way] = max(loop.time(), self._next_s[way]) + self._choose_delay_s()
        loop.call_at(at_s, lambda: None if self.is_lost else arrive())

    async def iter_messages(self) -> AsyncIterator[control_pb2.ClientMessage]:
        """Yields what arrives at the server."""
        while (message := await self._arrived.get()) is not None:
            yield message
