from __future__ import annotations

import asyncio
import os
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tdserve.base.errors import ConnectError, NotSupportedError
from tdserve.control.lending import MAX_ASKING, Lender, borrow
from tdserve.v1 import control_pb2
from tests.lending_kernel import needs_lending
from tests.processes import wait_for

pytestmark = needs_lending


class House:
    """A lender in a thread of its own. It lends the requested folder, but none of the name "no"."""

    def __init__(self, folder: Path) -> None:
        self.nonce = secrets.token_hex(8)
        self.asked: list[tuple[int, bytes, int]] = []
        self._folder = folder
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._lender = self._run(self._open())

    def _lend(self, asked: control_pb2.Borrow, uid: int) -> int:
        self.asked.append((asked.session, asked.key, uid))
        if asked.store == "no":
            raise NotSupportedError(feature="lending", reason="a test")
        return os.open(self._folder / asked.store, os.O_RDONLY | os.O_DIRECTORY)

    async def _open(self) -> Lender:
        return Lender(self.nonce, self._lend)

    async def _close(self) -> None:
        self._lender.close()

    def _run(self, coroutine: object) -> Lender:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(10.0)  # type: ignore[arg-type]

    def connect(self) -> socket.socket:
        """Connects, and asks for nothing."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.settimeout(10.0)
        connection.connect(f"\0tdserve-{self.nonce}")
        return connection

    def close(self) -> None:
        """Ends it."""
        self._run(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "file").write_text("content")
    made = House(tmp_path)
    yield made
    made.close()


def count_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_borrow_when_a_folder_is_lent_then_its_files_are_opened_through_it(house: House) -> None:
    before = count_fds()
    fd = borrow(house.nonce, control_pb2.Borrow(session=7, key=b"k", store="one"))
    assert Path(f"/proc/self/fd/{fd}/file").read_text() == "content"
    assert not os.get_inheritable(fd)
    os.close(fd)
    assert house.asked == [(7, b"k", os.getuid())]
    # Fewer, if what other tests have left is collected meanwhile.
    wait_for(lambda: count_fds() <= before, "the lender's own descriptors to be closed")


def test_borrow_when_refused_then_the_reason_is_raised_and_the_next_is_lent(house: House) -> None:
    with pytest.raises(NotSupportedError, match="a test"):
        borrow(house.nonce, control_pb2.Borrow(store="no"))
    os.close(borrow(house.nonce, control_pb2.Borrow(store="one")))


def test_borrow_when_there_is_no_lender_or_it_fails_then_connect_error(house: House) -> None:
    with pytest.raises(ConnectError):
        borrow("none", control_pb2.Borrow())
    with pytest.raises(ConnectError, match="closed the connection"):
        borrow(house.nonce, control_pb2.Borrow(store="missing"))


def test_borrow_when_from_another_mount_namespace_then_refused(house: House) -> None:
    script = f"""if True:
        import ctypes, socket
        assert not ctypes.CDLL(None).unshare(0x00020000)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.connect("\\0tdserve-{house.nonce}")
            connection.send({control_pb2.Borrow(store="one").SerializeToString()!r})
            content, lent, _, _ = socket.recv_fds(connection, 4096, 1)
            print(len(lent), content)
    """
    if os.getuid() != 0:
        pytest.skip("only root may make a mount namespace")
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert said.startswith("0 ")
    assert "other file systems" in said
    assert house.asked == []


def test_borrow_when_a_descriptor_comes_with_it_then_it_cannot_be_sent(house: House) -> None:
    with house.connect() as connection, pytest.raises(PermissionError):
        socket.send_fds(connection, [control_pb2.Borrow(store="one").SerializeToString()], [0])
    os.close(borrow(house.nonce, control_pb2.Borrow(store="one")))


def test_lender_when_strangers_ask_nonsense_or_nothing_then_others_are_served(house: House) -> None:
    before = count_fds()
    with house.connect() as garbage:
        garbage.send(b"\xff" * 100_000)
        assert garbage.recv(100) == b""
    silent = [house.connect() for _ in range(MAX_ASKING)]
    os.close(borrow(house.nonce, control_pb2.Borrow(store="one")))
    assert silent[0].recv(100) == b""  # the oldest had to go
    for connection in silent:
        connection.close()
    # Fewer, if what other tests have left is collected meanwhile.
    wait_for(lambda: count_fds() <= before, "the lender's own descriptors to be closed")


def test_close_when_clients_have_not_asked_then_they_are_let_go(tmp_path: Path) -> None:
    made = House(tmp_path)
    with made.connect() as waiting:
        with pytest.raises(NotSupportedError):  # which comes after the other
            borrow(made.nonce, control_pb2.Borrow(store="no"))
        made.close()
        assert waiting.recv(100) == b""
    with pytest.raises(ConnectError):
        borrow(made.nonce, control_pb2.Borrow(store="one"))
