"""The relay of a client's stream of content to a data worker's socket."""

from __future__ import annotations

import asyncio
import socket

from tdserve.control.content_relay import ContentConnection
from tdserve.control.content_stream import CHANNEL_KEY, SECRET_KEY, SESSION_KEY


class FloodingCall:
    """The call of a client that sends all the time, as grpc shows it to its handler."""

    def __init__(self) -> None:
        self.num_read = 0
        self.has_read = asyncio.Event()

    def invocation_metadata(self) -> list[tuple[str, str | bytes]]:
        return [(SESSION_KEY, "1"), (CHANNEL_KEY, "0"), (SECRET_KEY, bytes(32))]

    async def read(self) -> bytes:
        await asyncio.sleep(0)
        self.num_read += 1
        if self.num_read == 10:
            self.has_read.set()
        return bytes(1000)


def test_relay_when_the_worker_takes_no_more_then_reads_on_until_it_has_closed_its_end() -> None:
    async def scenario() -> str:
        call = FloodingCall()
        ours, theirs = socket.socketpair()
        theirs.shutdown(socket.SHUT_RD)
        relaying = asyncio.ensure_future(ContentConnection(call).relay(ours))
        await asyncio.wait_for(call.has_read.wait(), 20.0)
        assert not relaying.done()
        theirs.close()
        return await asyncio.wait_for(relaying, 20.0)

    assert asyncio.run(scenario()) == "its data worker has closed it"
