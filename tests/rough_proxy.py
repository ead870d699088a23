"""A proxy in front of one port that does what a bad network does: it drops, delays, throttles, stops and resets."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from tests.proxy_loop import run_proxy

PIECE_BYTES = 1 << 16


@dataclass
class Direction:
    """What happens to bytes that go one way.

    Attributes:
        is_dropped: They vanish, and nobody learns of it.
        is_stopped: They are not read, so that the sender's buffers fill.
        delay_s: How much later each piece arrives, seconds.
        bytes_per_s: Most of them; 0: no limit.
    """

    is_dropped: bool = False
    is_stopped: bool = False
    delay_s: float = 0.0
    bytes_per_s: int = 0

    def compute_s_per_byte(self) -> float:
        """Returns how long each byte takes, seconds."""
        return 1 / self.bytes_per_s if self.bytes_per_s else 0.0


class RoughProxy:
    """Attributes may be changed at any moment, from any thread.

    Attributes:
        there: From clients to the server.
        back: From the server to clients.
        refuses: Whether new connections are closed at once.
        target: The server's address, for new connections.
        num_bytes_there, num_bytes_back: Bytes that have come from clients, and from the server.
    """

    def __init__(self, target: str) -> None:
        self.target = target
        self.there, self.back = Direction(), Direction()
        self.refuses = False
        self.num_bytes_there = self.num_bytes_back = 0
        self.port = 0
        self._writers: set[asyncio.StreamWriter] = set()
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def address(self) -> str:
        """Where clients connect."""
        return f"127.0.0.1:{self.port}"

    def cut(self) -> None:
        """Drops all bytes in both directions, like a pulled cable: neither end learns of it."""
        self.there.is_dropped = self.back.is_dropped = True

    def mend(self) -> None:
        """Lets all pass again. Connections that lost bytes are useless from then on: they are reset."""
        lost = self.there.is_dropped or self.back.is_dropped
        self.there, self.back = Direction(), Direction()
        self.refuses = False
        if lost:
            self.reset()

    def reset(self) -> None:
        """Resets all connections (RST)."""
        for writer in list(self._writers):
            found = writer.get_extra_info("socket")
            with suppress(OSError):
                found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            if self._loop is not None:
                self._loop.call_soon_threadsafe(writer.transport.abort)

    async def listen(self) -> asyncio.Server:
        """Begins to accept connections."""
        self._loop = asyncio.get_running_loop()
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=PIECE_BYTES)
        self.port = server.sockets[0].getsockname()[1]
        return server

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.refuses:
            writer.transport.abort()
            return
        host, _, port = self.target.rpartition(":")
        try:
            there, back = await asyncio.open_connection(host, int(port), limit=PIECE_BYTES)
        except OSError:
            writer.transport.abort()
            return
        ends = {writer, back}
        self._writers |= ends
        try:
            await asyncio.gather(self._pass_on(reader, back, "there"), self._pass_on(there, writer, "back"))
        except OSError:
            pass
        finally:
            self._writers -= ends
            for end in ends:
                end.transport.abort()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: str) -> None:
        while True:
            while getattr(self, way).is_stopped:
                await _delay(0.01)
            data = await reader.read(PIECE_BYTES)
            direction: Direction = getattr(self, way)
            if not data:
                writer.close()
                return
            if direction.is_dropped:
                continue
            if way == "back":
                self.num_bytes_back += len(data)
            else:
                self.num_bytes_there += len(data)
            if delay_s := direction.delay_s + len(data) * direction.compute_s_per_byte():
                await _delay(delay_s)
            writer.write(data)
            await writer.drain()


async def _delay(seconds: float) -> None:
    """Holds bytes back for so long. This is what the proxy is for."""
    with suppress(asyncio.TimeoutError):
        await asyncio.wait_for(asyncio.Event().wait(), seconds)


@contextmanager
def run_rough_proxy(target: str) -> Iterator[RoughProxy]:
    """Runs a proxy for a block."""
    with run_proxy(RoughProxy(target)) as proxy:
        yield proxy
