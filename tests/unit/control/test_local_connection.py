"""Messages of the control process on a local connection, piece by piece; and a connection that does not exist."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from tdserve.base.errors import ConnectError
from tdserve.control.framing import FrameReader, frame
from tdserve.control.local import SOCKET_NAME, LocalConnection, connect, listen
from tdserve.v1 import control_pb2


def asking(request: int) -> bytes:
    return control_pb2.ClientMessage(request=request).SerializeToString()


def test_connection_when_several_messages_come_at_once_then_what_they_are_answered_leaves_at_once_too() -> None:
    class Written(asyncio.Transport):
        def __init__(self) -> None:
            super().__init__()
            self.pieces: list[bytes] = []

        def write(self, data: bytes | bytearray | memoryview) -> None:
            self.pieces.append(bytes(data))

        def close(self) -> None:
            self.pieces.append(b"closed")

        def is_closing(self) -> bool:
            return b"closed" in self.pieces

    def answer(request: int) -> control_pb2.ServerMessage:
        return control_pb2.ServerMessage(request=request)

    def on_message(connection: LocalConnection, message: control_pb2.ClientMessage) -> None:
        connection.send(answer(message.request))
        if message.request == 3:
            connection.close()

    async def scenario() -> list[bytes]:
        connection, transport = LocalConnection(on_message, lambda connection: None), Written()
        connection.connection_made(transport)
        connection.data_received(b"".join(frame(asking(number)) for number in (1, 2)))
        connection.send(answer(7))
        connection.data_received(frame(asking(3)))
        return transport.pieces

    framed = {number: frame(answer(number).SerializeToString()) for number in (1, 2, 3, 7)}
    assert asyncio.run(scenario()) == [framed[1] + framed[2], framed[7], framed[3], b"closed"]


def test_send_when_the_client_does_not_read_then_pieces_wait_their_turn_and_leave_before_the_end() -> None:
    class Slow(asyncio.Transport):
        def __init__(self) -> None:
            super().__init__()
            self.pieces: list[bytes] = []

        def write(self, data: bytes | bytearray | memoryview) -> None:
            self.pieces.append(bytes(data))
            connection.pause_writing()

        def pause_reading(self) -> None:
            """Does nothing: no requests come here."""

        def resume_reading(self) -> None:
            """Does nothing."""

        def close(self) -> None:
            self.pieces.append(b"closed")

        def is_closing(self) -> bool:
            return b"closed" in self.pieces

    connection, transport = LocalConnection(lambda connection, message: None, lambda connection: None), Slow()

    async def scenario() -> None:
        connection.connection_made(transport)
        connection.send(control_pb2.ServerMessage(request=1), rest.SerializeToString())
        connection.send(control_pb2.ServerMessage(request=2))
        assert len(transport.pieces) == 1
        connection.resume_writing()
        assert len(transport.pieces) == 2
        connection.close()

    rows = bytes(range(200)) * 5000
    rest = control_pb2.ServerMessage(done=control_pb2.Done(accepted=control_pb2.Accepted(rows=rows)))
    asyncio.run(scenario())
    assert transport.pieces.pop() == b"closed"
    first, second = (
        control_pb2.ServerMessage.FromString(content) for content in FrameReader().feed(b"".join(transport.pieces))
    )
    assert (first.request, first.done.accepted.rows, second.request) == (1, rows, 2)
    assert max(map(len, transport.pieces)) < len(rows) / 2


def test_connect_when_no_server_listens_then_connect_error_names_the_socket(tmp_path: Path) -> None:
    with pytest.raises(ConnectError, match=SOCKET_NAME):
        connect(tmp_path)
    with pytest.raises(ConnectError):
        connect(tmp_path / "none")


def test_listen_when_stopped_in_this_moment_then_nothing_stays_open(tmp_path: Path) -> None:
    async def scenario() -> None:
        num_open = len(os.listdir("/proc/self/fd"))
        listening = asyncio.create_task(listen(tmp_path, lambda: LocalConnection(print, print)))
        await asyncio.sleep(0)
        listening.cancel()
        await asyncio.wait({listening})
        assert listening.cancelled()
        assert len(os.listdir("/proc/self/fd")) <= num_open

    asyncio.run(scenario())
