"""The transport over gRPC takes the exam of transports: between two sockets, and from a client through a relay."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from tdserve.control.connection import ControlConnection
from tdserve.transport.byte_streams import ByteStream, SocketStream
from tdserve.transport.stream_channel import StreamChannel
from tests.channel_pairs import Ends
from tests.conformance.transport_suite import Connect, TransportSuite
from tests.unit.control.serving import Answering, serving

TIMEOUT_S = 20.0


def open_both(first: ByteStream, second: ByteStream) -> Ends:
    make = partial(StreamChannel, transport="grpc", peer="the other end", timeout_s=TIMEOUT_S)
    with ThreadPoolExecutor(2) as threads:
        ends = [threads.submit(make, stream) for stream in (first, second)]
        return ends[0].result(), ends[1].result()


class TestSocketStream(TransportSuite):
    @pytest.fixture
    def connect(self) -> Connect:
        def connect() -> Ends:
            first, second = socket.socketpair()
            return open_both(SocketStream(first, peer="it"), SocketStream(second, peer="it"))

        return connect


class TestGrpc(TransportSuite):
    """A client's end, and one behind the relay."""

    is_client_first = True

    @pytest.fixture
    def connect(self) -> Iterator[Connect]:
        handlers = Answering()
        with serving(handlers) as address:
            connection = ControlConnection(address)

            def connect() -> Ends:
                stream = connection.open_content(7, 0, b"secret")
                _, theirs = handlers.exchanging.get(timeout=TIMEOUT_S)
                ends = (stream, SocketStream(theirs, peer="it"))
                return open_both(*(ends if self.is_client_first else ends[::-1]))

            yield connect
            connection.close()


class TestGrpcBehindTheRelay(TestGrpc):
    is_client_first = False
