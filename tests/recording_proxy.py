"""A proxy in front of one port, which records all bytes that pass, and can be told to cut its connections."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from tests.proxy_loop import run_proxy

PIECE_BYTES = 1 << 16


class RecordingProxy:
    """Attributes:
    recorded: The bytes of both directions.
    port: At which it listens on 127.0.0.1.
    """

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self.recorded = bytearray()
        self.port = 0
        self.num_connections = 0

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def listen(self) -> asyncio.Server:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        return server

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        there, back = await asyncio.open_connection(*self._target)
        with suppress(OSError):
            await asyncio.gather(self._pass_on(reader, back), self._pass_on(there, writer))

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(PIECE_BYTES):
                self.recorded += data
                writer.write(data)
                await writer.drain()
        finally:
            writer.close()


@contextmanager
def recording(target: str) -> Iterator[RecordingProxy]:
    """Runs a proxy for a block."""
    with run_proxy(RecordingProxy(target)) as proxy:
        yield proxy
