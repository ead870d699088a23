from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tdserve.base.errors import ConnectError
from tdserve.control import outbox
from tdserve.control.outbox import Outbox

LARGE = bytes(range(256)) * 16_384
"""More than the buffers of a socket take."""

WAIT_S = 30.0


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.settimeout(WAIT_S)
        yield ours, theirs


def receive(end: socket.socket, nbytes: int) -> bytes:
    content = bytearray()
    while len(content) < nbytes:
        data = end.recv(1 << 16)
        assert data
        content += data
    return bytes(content)


def test_send_when_the_other_end_reads_nothing_then_returns_and_all_comes_in_order(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    box = Outbox(ends[0])
    for content in (b"first", LARGE, b"behind it", LARGE):
        box.send(content)
    expected = b"first" + LARGE + b"behind it" + LARGE
    assert receive(ends[1], len(expected)) == expected
    box.join(WAIT_S)
    box.send(b"at once again")
    assert receive(ends[1], 13) == b"at once again"


def test_send_when_the_other_end_reads_slowly_then_nothing_is_mixed(ends: tuple[socket.socket, socket.socket]) -> None:
    box, num_each = Outbox(ends[0]), 30
    contents = [bytes([number]) * 100_003 for number in range(4)]

    def send_many(content: bytes) -> None:
        for _ in range(num_each):
            box.send(content)

    with ThreadPoolExecutor(len(contents)) as threads:
        sending = [threads.submit(send_many, content) for content in contents]
        came = receive(ends[1], num_each * sum(map(len, contents)))
        for future in sending:
            future.result(WAIT_S)
    pieces = [came[at : at + 100_003] for at in range(0, len(came), 100_003)]
    assert sorted(pieces) == sorted(contents * num_each)


def test_send_when_too_much_waits_then_the_connection_ends(
    ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox, "MAX_HELD_BYTES", len(LARGE))
    box = Outbox(ends[0])
    box.send(LARGE)
    with pytest.raises(ConnectError, match="reads nothing while 4 MiB wait"):
        box.send(LARGE)
    box.join(WAIT_S)
    with pytest.raises(BrokenPipeError):
        box.send(b"later")


def test_send_when_the_other_end_is_gone_then_what_waits_is_dropped(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    box = Outbox(ends[0])
    box.send(LARGE)
    ends[1].close()
    box.join(WAIT_S)
    with pytest.raises(OSError, match=r"Broken pipe|reset by peer"):
        box.send(b"later")
