"""A stranger at a gloo port, which speaks gloo's own frames and does not know the secret."""

from __future__ import annotations

import re
import select
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from threading import Thread

from tdserve.base.errors import ConnectError
from tdserve.transport.gloo import CLIENT_RANK, GlooChannel
from tdserve.transport.proving import MESSAGE_BYTES, PROOF_TAG
from tdserve.transport.rendezvous import KVStore
from tests.gloo_secret import CREDENTIAL

PREAMBLE = struct.Struct("<6Q")
"""Length of the frame, kind, slot, offset, length of the message, offset there."""

CONTENT, SEND_READY, RECV_READY = 1, 2, 3


class Line:
    """A connection that the other process has accepted as a pair."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._connection.setblocking(True)
        self._connection.settimeout(5.0)

    def receive(self) -> bytes:
        """Returns the next message."""
        while True:
            nbytes, kind, slot, _, length, _ = PREAMBLE.unpack(self._read(PREAMBLE.size))
            rest = self._read(nbytes - PREAMBLE.size)
            if kind == SEND_READY:
                self.send(PREAMBLE.pack(PREAMBLE.size, RECV_READY, slot, 0, length, 0))
            elif kind == CONTENT:
                return rest

    def send_message(self, message: bytes, *, tag: int = PROOF_TAG) -> None:
        """Sends a message, whether or not the peer is ready for it."""
        self.send(PREAMBLE.pack(PREAMBLE.size + len(message), CONTENT, tag, 0, len(message), 0) + message)

    def send(self, content: bytes) -> None:
        """Sends bytes."""
        self._connection.sendall(content)

    def close(self) -> None:
        """Closes the connection."""
        self._connection.close()

    def _read(self, nbytes: int) -> bytes:
        found = b""
        while len(found) < nbytes:
            more = self._connection.recv(nbytes - len(found))
            if not more:
                raise ConnectionError
            found += more
        return found


def be_silent(line: Line) -> None:
    """Sends nothing."""


def be_wrong(line: Line) -> None:
    """Sends wrong content at each step."""
    for _ in range(2):
        line.receive()
        line.send_message(b"x" * MESSAGE_BYTES)


def reflect(line: Line) -> None:
    """Sends back what it has received."""
    for _ in range(2):
        line.send_message(line.receive())


def be_cut_short(line: Line) -> None:
    """Sends half of a message."""
    line.receive()
    frame = PREAMBLE.pack(PREAMBLE.size + MESSAGE_BYTES, CONTENT, PROOF_TAG, 0, MESSAGE_BYTES, 0)
    line.send(frame + b"x" * (MESSAGE_BYTES // 2))


def hang_up(line: Line) -> None:
    """Closes the connection."""
    line.close()


def find_port(address: bytes) -> int:
    """Returns the port in gloo's address of a rank at 127.0.0.1."""
    found = re.search(rb"\x02\x00(..)\x7f\x00\x00\x01", address, re.DOTALL)  # a sockaddr_in
    assert found is not None
    return int.from_bytes(found[1], "big")


def device_of_this_process() -> tuple[int, int]:
    """Returns the port of this process's gloo device, and its next number."""
    addresses: list[bytes] = []
    store = KVStore(lambda key, value: addresses.append(value))
    store.close()
    with suppress(ConnectError):
        GlooChannel(store, CLIENT_RANK, host="127.0.0.1", credential=CREDENTIAL, peer="nobody")
    return find_port(addresses[0]), struct.unpack("<2q", addresses[0][-16:])[1] + 1


@contextmanager
def taken(port: int, numbers: Sequence[int], behave: Callable[[Line], None]) -> Iterator[list[int]]:
    """Opens connections that claim these numbers of pairs. Those that become pairs behave in this way; yields their
    numbers."""
    became: list[int] = []
    with ExitStack() as stack:
        lines = {stack.enter_context(socket.create_connection(("127.0.0.1", port))): number for number in numbers}
        for connection, number in lines.items():
            connection.sendall(struct.pack("<q", number))
            connection.setblocking(False)
        ending, end = socket.socketpair()

        def run() -> None:
            waiting = select.poll()  # select takes no descriptor above 1023
            by_fd = {each.fileno(): each for each in (*lines, ending)}
            for fd in by_fd:
                waiting.register(fd, select.POLLIN)
            while True:
                for fd, _ in waiting.poll():
                    ready = by_fd[fd]
                    if ready is ending:
                        return
                    waiting.unregister(fd)
                    became.append(lines[ready])
                    with suppress(OSError):
                        behave(Line(ready))

        thread = Thread(target=run, name="stranger")
        thread.start()
        try:
            yield became
        finally:
            end.close()
            thread.join()
            ending.close()
