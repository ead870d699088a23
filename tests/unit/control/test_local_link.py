"""Messages of the control process on a local link, piece by piece; and a link that does not exist."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tdserve.base.errors import ConnectError
from tdserve.control.framing import FrameReader, frame
from tdserve.control.local import SOCKET_NAME, LocalLink, SocketEnd
from tdserve.v1 import control_pb2


def asking(request: int) -> bytes:
    return control_pb2.ClientMessage(request=request).SerializeToString()


def test_link_when_several_messages_come_at_once_then_what_they_are_answered_leaves_at_once_too() -> None:
    class Written(asyncio.Transport):
        def __init__(self) -> None:
            super().__init__()
            self.pieces: list[bytes] = []

        def write(self, data: bytes | bytearray | memoryview) -> None:
            self.pieces.append(bytes(data))

        def close(self) -> None:
            self.pieces.append(b"closed")

    def answer(request: int) -> control_pb2.ServerMessage:
        return control_pb2.ServerMessage(request=request)

    def on_message(link: LocalLink, message: control_pb2.ClientMessage) -> None:
        link.send(answer(message.request))
        if message.request == 3:
            link.close()

    async def scenario() -> list[bytes]:
        link, transport = LocalLink(on_message, lambda link: None), Written()
        link.connection_made(transport)
        link.data_received(b"".join(frame(asking(number)) for number in (1, 2)))
        link.send(answer(7))
        link.data_received(frame(asking(3)))
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
            link.pause_writing()

        def pause_reading(self) -> None:
            """Does nothing: no requests come here."""

        def resume_reading(self) -> None:
            """Does nothing."""

        def close(self) -> None:
            self.pieces.append(b"closed")

    link, transport = LocalLink(lambda link, message: None, lambda link: None), Slow()

    async def scenario() -> None:
        link.connection_made(transport)
        link.send(control_pb2.ServerMessage(request=1), rest.SerializeToString())
        link.send(control_pb2.ServerMessage(request=2))
        assert len(transport.pieces) == 1
        link.resume_writing()
        assert len(transport.pieces) == 2
        link.close()

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
        SocketEnd(tmp_path, on_message=print, on_end=print)
    with pytest.raises(ConnectError):
        SocketEnd(tmp_path / "none", on_message=print, on_end=print)
