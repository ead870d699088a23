"""A gRPC stream of bytes that are not looked at, between two processes: what the transport over gRPC cannot exceed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import grpc

from tdserve.control.content_stream import ContentStream

METHOD = "/tdserve.bench/Exchange"
OUT_KEY, BACK_KEY, OPERATIONS_KEY = "out", "back", "operations"

MESSAGE_BYTES = 1024 * 1024
"""Size of its messages: larger ones are no faster (measured)."""

ACKNOWLEDGEMENT = bytes(64)

OPTIONS = [("grpc.use_local_subchannel_pool", 1)]
"""No keepalive: nothing is to be measured but the bytes."""


def serve_bare_stream(on_port: Callable[[int], None]) -> None:
    """Serves exchanges on loopback until this process ends.

    Args:
        on_port: Called with the port.
    """
    asyncio.run(_serve(on_port))


class BareStream:
    """The asking end. Threads: one.

    Args:
        port: The other end's.
    """

    def __init__(self, port: int) -> None:
        self._address = f"127.0.0.1:{port}"
        self._channel = grpc.insecure_channel(self._address, options=OPTIONS)
        self._exchange: Any = self._channel.stream_stream(METHOD, None, None)

    def begin(self, *, nbytes_out: int, nbytes_back: int, num_operations: int) -> ContentStream:
        """Begins operations, each of which takes this many bytes out and then that many back; an acknowledgement
        follows the last one."""
        sizes = ((OUT_KEY, nbytes_out), (BACK_KEY, nbytes_back), (OPERATIONS_KEY, num_operations))
        metadata = tuple((key, str(size)) for key, size in sizes)

        def open_call(outgoing: Iterator[bytes]) -> Any:
            return self._exchange(outgoing, metadata=metadata)

        return ContentStream(open_call, address=self._address)

    def close(self) -> None:
        """Ends all operations."""
        self._channel.close()


async def _serve(on_port: Callable[[int], None]) -> None:
    server = grpc.aio.server(options=OPTIONS)
    service, method = METHOD.strip("/").split("/")
    handler = grpc.stream_stream_rpc_method_handler(_answer)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    on_port(port)
    await server.wait_for_termination()


async def _answer(_: Any, context: Any) -> None:
    given = dict(context.invocation_metadata())
    nbytes_out, nbytes_back = int(given[OUT_KEY]), int(given[BACK_KEY])
    messages = [bytes(min(MESSAGE_BYTES, nbytes_back - at)) for at in range(0, nbytes_back, MESSAGE_BYTES)]
    for _ in range(int(given[OPERATIONS_KEY])):
        received = 0
        while received < nbytes_out:
            received += len(await context.read())
        for message in messages:
            await context.write(message)
    await context.write(ACKNOWLEDGEMENT)
