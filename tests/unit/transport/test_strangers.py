from __future__ import annotations

import socket
import struct
from contextlib import ExitStack

import pytest

from tdserve.transport.strangers import Sockets, describe_connections, refuse_connections


def make_address(port: int, family: int = socket.AF_INET) -> bytes:
    """Returns the address of a rank as gloo publishes it."""
    address = struct.pack("<H", family) + struct.pack(">H", port) + bytes(132)
    return struct.pack("<Q", 4) + b"host" + struct.pack("<Q", len(address)) + address


@pytest.mark.parametrize(("host", "family"), [("127.0.0.1", socket.AF_INET), ("::1", socket.AF_INET6)])
def test_describe_when_hosts_are_connected_then_counts_them(host: str, family: socket.AddressFamily) -> None:
    with ExitStack() as stack:
        listening = stack.enter_context(socket.create_server((host, 0), family=family))
        port = listening.getsockname()[1]
        for _ in range(3):
            stack.enter_context(socket.create_connection((host, port)))
        assert describe_connections(make_address(port, family)) == f"connected to port {port} are {host} (3)"


def test_describe_when_no_peer_is_connected_or_no_address_is_known_then_states_that() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        assert describe_connections(make_address(port)) == f"connected to port {port} are none any more"
    for address in (None, b"", b"\xff" * 8, b"\xff" * 200, make_address(1, family=99)):
        assert describe_connections(address) == "its address is not known"


def test_sockets_when_strangers_and_others_are_connected_then_only_strangers_count_and_their_port_can_be_shut() -> None:
    with ExitStack() as stack:
        listening = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        quiet = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        others, accepted = [], []
        for said in (b"", b"12345678", b"123456789"):  # nothing, a number, more than that
            others.append(stack.enter_context(socket.create_connection(listening.getsockname())))
            accepted.append(stack.enter_context(listening.accept()[0]))
            others[-1].sendall(said)
        assert accepted[2].recv(9, socket.MSG_WAITALL)
        sockets = Sockets.from_this_process()
        assert sockets.strangers["127.0.0.1"] >= 2
        assert listening.fileno() in sockets.listening
        assert quiet.fileno() not in sockets.listening
        before = sockets.num_strangers
        others[1].sendall(b"9")
        assert accepted[1].recv(9, socket.MSG_WAITALL)
        assert Sockets.from_this_process().num_strangers == before - 1
        assert "127.0.0.1 (" in sockets.describe_strangers()
        refuse_connections(listening.fileno())
        with pytest.raises(TimeoutError):
            socket.create_connection(listening.getsockname(), timeout=0.1)
        others[2].sendall(b"those that are there go on")
        assert accepted[2].recv(100)
