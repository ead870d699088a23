"""The local socket: both ends, over a real socket."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any, TypeVar

import pytest
from google.protobuf.message import DecodeError

from tdserve.base.errors import ConnectError
from tdserve.control.framing import frame
from tdserve.control.local import (
    MAX_STRANGER_FRAME_BYTES,
    MAX_STRANGERS,
    SOCKET_NAME,
    LocalConnection,
    SocketEnd,
    connect,
    listen,
)
from tdserve.control.parts import PartJoiner
from tdserve.v1 import control_pb2

WAIT_S = 20.0

_Result = TypeVar("_Result")


class Echo:
    """A server that answers every message, and the last of its parts, with its number, and a message of number 9 by
    letting go."""

    def __init__(self) -> None:
        self.parts = PartJoiner()
        self.loop = asyncio.new_event_loop()
        self.connections: list[LocalConnection] = []
        self.transports: list[Any] = []
        self.lost: SimpleQueue[LocalConnection] = SimpleQueue()
        self._thread = Thread(target=self.loop.run_forever)
        self._thread.start()

    def __call__(self, coroutine: Coroutine[Any, Any, _Result]) -> _Result:
        """Serves a connection on the event loop."""
        future: Future[_Result] = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        return future.result(WAIT_S)

    def write(self, content: bytes) -> None:
        """Sends bytes to the first client."""
        self.loop.call_soon_threadsafe(self.transports[0].write, content)

    def listen(self, root: Path) -> asyncio.AbstractServer:
        strangers: dict[LocalConnection, None] = {}
        return self(listen(root, lambda: LocalConnection(self._on_message, self.lost.put, strangers)))

    def close(self, server: asyncio.AbstractServer | None) -> None:
        """Closes all connections and stops the loop."""

        async def end() -> None:
            if server is not None:
                server.close()
            for connection in self.connections:
                connection.close()
            await asyncio.sleep(0)

        self(end())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    def _on_message(self, connection: LocalConnection, message: control_pb2.ClientMessage) -> None:
        self.connections.append(connection)
        connection.let_in()
        if message.request == 9:
            connection.close()
        elif not message.HasField("part") or self.parts.add(message.part):
            connection.send(control_pb2.ServerMessage(request=message.request, done=control_pb2.Done(version=7)))


@pytest.fixture
def echo() -> Iterator[Echo]:
    """An event loop on which nothing listens yet."""
    made = Echo()
    yield made
    if made.loop.is_running():
        made.close(None)


@pytest.fixture
def server(echo: Echo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Echo]:
    """A server that listens."""

    def note_transport(
        connection: LocalConnection, transport: Any, take: Any = LocalConnection.connection_made
    ) -> None:
        echo.transports.append(transport)
        take(connection, transport)

    monkeypatch.setattr(LocalConnection, "connection_made", note_transport)
    listening = echo.listen(tmp_path)
    yield echo
    echo.close(listening)


class Client:
    """The client's end, with the messages that arrived."""

    def __init__(self, root: Path, on_message: Callable[[control_pb2.ServerMessage], None] | None = None) -> None:
        self.came: SimpleQueue[control_pb2.ServerMessage] = SimpleQueue()
        self.ended = Event()
        self.end = SocketEnd(connect(root), on_message=on_message or self.came.put, on_end=self.ended.set)


def asking(request: int, nbytes: int = 0) -> control_pb2.ClientMessage:
    """Returns a message of about this size."""
    return control_pb2.ClientMessage(request=request, read=control_pb2.ReadRequest(fingerprint=bytes(nbytes)))


def test_messages_when_sent_then_answered_in_order_whatever_their_size(server: Echo, tmp_path: Path) -> None:
    client = Client(tmp_path)
    client.end.start()
    client.end.send(asking(1))
    assert client.came.get(timeout=WAIT_S).request == 1  # it is let in: before, large messages are refused
    for request, nbytes in ((2, 3_000_000), (3, 10)):
        client.end.send(asking(request, nbytes))
    assert [client.came.get(timeout=WAIT_S).request for _ in range(2)] == [2, 3]
    client.end.close()
    assert client.ended.is_set()


class Looking(Client):
    """Looks for new messages while it may write, until a message with a given number has come."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, self._take)
        self.order: list[str] = []
        self.wanted = 0

    def _take(self, message: control_pb2.ServerMessage) -> None:
        kind = str(message.WhichOneof("body"))
        self.order.append(f"{kind} {message.request}")
        if kind == "accepted" and message.accepted.uid == "write":
            deadline = time.monotonic() + WAIT_S
            while not any(each.endswith(f" {self.wanted}") for each in self.order) and time.monotonic() < deadline:
                self.end.look()
            self.order.append(f"written {message.request}")
        self.came.put(message)


def answer(request: int, kind: str, uid: str = "") -> control_pb2.ServerMessage:
    """Returns one of the server's messages."""
    if kind == "accepted":
        return control_pb2.ServerMessage(request=request, accepted=control_pb2.Accepted(uid=uid))
    return control_pb2.ServerMessage(request=request, done=control_pb2.Done())


@pytest.mark.parametrize("at_once", [True, False])
def test_look_when_others_are_answered_meanwhile_then_these_come_and_permits_wait(
    server: Echo, tmp_path: Path, at_once: bool
) -> None:
    client = Looking(tmp_path)
    client.wanted = 4
    client.end.start()
    client.end.send(asking(1))
    client.came.get(timeout=WAIT_S)
    messages = [
        answer(2, "accepted", "write"),
        answer(3, "accepted"),
        answer(3, "done"),  # behind what it belongs to
        answer(4, "done"),
    ]

    frames = [frame(each.SerializeToString()) for each in messages]
    for content in [b"".join(frames)] if at_once else frames:
        server.write(content)
    for _ in messages:
        client.came.get(timeout=WAIT_S)
    assert client.order[1:] == ["accepted 2", "done 4", "written 2", "accepted 3", "done 3"]
    client.end.close()


def test_look_when_the_server_is_gone_then_goes_on_and_ends_afterwards(server: Echo, tmp_path: Path) -> None:
    done = Event()

    def take(message: control_pb2.ServerMessage) -> None:
        client.end.send(asking(9))  # lets go
        server.lost.get(timeout=WAIT_S)
        client.end.look()
        client.end.look()
        done.set()

    client = Client(tmp_path, take)
    client.end.start()
    client.end.send(asking(1))
    assert done.wait(WAIT_S)
    assert client.ended.wait(WAIT_S)


def test_look_when_what_comes_is_no_message_then_raised_and_ended(server: Echo, tmp_path: Path) -> None:
    raised: list[Exception] = []

    def take(message: control_pb2.ServerMessage) -> None:
        server.write(frame(b"\xff\xff\xff"))
        deadline = time.monotonic() + WAIT_S
        while not raised and time.monotonic() < deadline:
            try:
                client.end.look()
            except DecodeError as error:
                raised.append(error)

    client = Client(tmp_path, take)
    client.end.start()
    client.end.send(asking(1))
    assert client.ended.wait(WAIT_S)
    assert len(raised) == 1


def test_send_when_several_threads_do_then_frames_stay_whole(server: Echo, tmp_path: Path) -> None:
    client = Client(tmp_path)
    client.end.start()
    client.end.send(asking(1))
    assert client.came.get(timeout=WAIT_S).request == 1

    def send(first: int) -> None:
        for request in range(first, first + 40):
            client.end.send(asking(request, 100_000))

    threads = [Thread(target=send, args=(first,)) for first in (100, 200, 300)]
    for thread in threads:
        thread.start()
    found = sorted(client.came.get(timeout=WAIT_S).request for _ in range(120))
    for thread in threads:
        thread.join()
    assert found == [*range(100, 140), *range(200, 240), *range(300, 340)]
    client.end.close()


def test_connection_when_the_client_closes_then_one_loss_and_the_server_may_go_on_sending(
    server: Echo, tmp_path: Path
) -> None:
    client = Client(tmp_path)
    client.end.start()
    client.end.send(asking(1))
    assert client.came.get(timeout=WAIT_S).done.version == 7
    client.end.close()
    client.end.close()
    connection = server.lost.get(timeout=WAIT_S)
    assert connection is server.connections[0]

    async def send() -> None:
        connection.send(control_pb2.ServerMessage())
        connection.close()

    server(send())
    with pytest.raises(ConnectError):
        client.end.send(asking(2))


def test_end_when_the_server_closes_then_on_lost_and_sending_raises_connect_error(server: Echo, tmp_path: Path) -> None:
    client = Client(tmp_path)
    client.end.start()
    client.end.send(asking(9))
    assert client.ended.wait(WAIT_S)
    with pytest.raises(ConnectError):
        client.end.send(asking(1))
    client.end.close()


JUNK = [frame(b"\xff\xff\xff"), (MAX_STRANGER_FRAME_BYTES + 1).to_bytes(4, "little")]


@pytest.mark.parametrize("junk", JUNK)
def test_connection_when_what_comes_is_no_message_then_it_ends_and_others_go_on(
    server: Echo, tmp_path: Path, junk: bytes
) -> None:
    other = Client(tmp_path)
    other.end.start()
    with socket.socket(socket.AF_UNIX) as peer:
        peer.settimeout(WAIT_S)
        peer.connect(str(tmp_path / SOCKET_NAME))
        peer.sendall(junk)
        assert peer.recv(1) == b""
    other.end.send(asking(1))
    assert other.came.get(timeout=WAIT_S).request == 1
    other.end.close()


def test_connections_when_too_many_are_unidentified_then_the_oldest_is_closed(server: Echo, tmp_path: Path) -> None:
    known = Client(tmp_path)
    known.end.start()
    known.end.send(asking(1))
    assert known.came.get(timeout=WAIT_S).request == 1
    with ExitStack() as stack:
        strangers = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(MAX_STRANGERS + 2)]
        for stranger in strangers:
            stranger.settimeout(WAIT_S)
            stranger.connect(str(tmp_path / SOCKET_NAME))
        assert [stranger.recv(1) for stranger in strangers[:2]] == [b"", b""]
        known.end.send(asking(2))
        assert known.came.get(timeout=WAIT_S).request == 2
        strangers[2].setblocking(False)
        with pytest.raises(BlockingIOError):
            strangers[2].recv(1)
    known.end.close()


def test_end_when_what_comes_is_no_message_then_ended(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / SOCKET_NAME))
        listening.listen()
        client = Client(tmp_path)
        client.end.start()
        peer, _ = listening.accept()
        with peer:
            peer.sendall(frame(b"\xff\xff\xff"))
            assert client.ended.wait(WAIT_S)


def test_close_when_a_message_is_being_worked_on_then_waits_for_that(server: Echo, tmp_path: Path) -> None:
    begun, may_end, done = Event(), Event(), Event()

    def work(message: control_pb2.ServerMessage) -> None:
        begun.set()
        may_end.wait(WAIT_S)
        done.set()

    client = Client(tmp_path, work)
    client.end.start()
    client.end.send(asking(1))
    assert begun.wait(WAIT_S)
    closing = Thread(target=client.end.close)
    closing.start()
    assert not client.ended.is_set()
    may_end.set()
    closing.join(WAIT_S)
    assert done.is_set()
    assert client.ended.is_set()


def test_close_when_called_by_the_reading_thread_itself_then_no_deadlock(server: Echo, tmp_path: Path) -> None:
    made: list[Client] = []
    client = Client(tmp_path, lambda message: made[0].end.close())
    made.append(client)
    client.end.start()
    client.end.send(asking(1))
    assert client.ended.wait(WAIT_S)


def test_close_when_never_started_then_no_descriptor_stays(server: Echo, tmp_path: Path) -> None:
    num_open = len(os.listdir("/proc/self/fd"))
    Client(tmp_path).end.close()
    server.lost.get(timeout=WAIT_S)
    server(asyncio.sleep(0))
    assert len(os.listdir("/proc/self/fd")) <= num_open


def test_listen_when_the_root_has_a_long_name_then_reached_all_the_same(echo: Echo, tmp_path: Path) -> None:
    root = tmp_path / ("a" * 120) / ("b" * 120)
    root.mkdir(parents=True)
    listening = echo.listen(root)
    client = Client(root)
    client.end.start()
    client.end.send(asking(5))
    assert client.came.get(timeout=WAIT_S).request == 5
    client.end.close()
    echo.close(listening)


def test_listen_when_a_server_was_killed_then_its_socket_is_replaced_and_anybody_may_connect(
    echo: Echo, tmp_path: Path
) -> None:
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(tmp_path / SOCKET_NAME))
    listening = echo.listen(tmp_path)
    mode = (tmp_path / SOCKET_NAME).stat().st_mode
    assert stat.S_ISSOCK(mode)
    assert stat.S_IMODE(mode) == 0o666
    Client(tmp_path).end.close()
    echo.lost.get(timeout=WAIT_S)
    echo.close(listening)


def test_listen_when_the_folder_takes_no_socket_then_os_error(echo: Echo, tmp_path: Path) -> None:
    (tmp_path / SOCKET_NAME).mkdir()
    with pytest.raises(OSError, match=SOCKET_NAME):
        echo.listen(tmp_path)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_drop_when_called_in_a_forked_child_then_the_parents_connection_goes_on(server: Echo, tmp_path: Path) -> None:
    client = Client(tmp_path)
    client.end.start()
    child = os.fork()
    if child == 0:
        client.end.drop()
        os._exit(0)
    os.waitpid(child, 0)
    client.end.send(asking(1))
    assert client.came.get(timeout=WAIT_S).request == 1
    client.end.close()
