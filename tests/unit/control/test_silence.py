"""The reason of a silence, looked for once for all callers."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event, Thread

import pytest

from tdserve.base.tls import TLS
from tdserve.control.silence import SilenceLooks
from tests.processes import quiet_port, wait_for


@pytest.fixture
def mute() -> Iterator[tuple[str, list[socket.socket]]]:
    """A listener that accepts connections and answers nothing, and the connections that it has got."""
    accepted: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def accept() -> None:
            try:
                while True:
                    accepted.append(listening.accept()[0])
            except OSError:
                return

        thread = Thread(target=accept)
        thread.start()
        yield f"127.0.0.1:{listening.getsockname()[1]}", accepted
        listening.shutdown(socket.SHUT_RDWR)
        thread.join()
    for each in accepted:
        each.close()


def test_reason_when_no_server_listens_then_refused() -> None:
    address = f"127.0.0.1:{quiet_port()}"
    assert SilenceLooks(lambda: (address, None)).find().why == "connection refused"


def test_reason_when_a_dozen_callers_ask_at_once_then_one_look_serves_all(
    mute: tuple[str, list[socket.socket]],
) -> None:
    address, accepted = mute
    looks = SilenceLooks(lambda: (address, None))
    with ThreadPoolExecutor(12) as threads:
        found = [each.result() for each in [threads.submit(looks.find) for _ in range(12)]]
    assert {each.why for each in found} == {""}
    wait_for(lambda: len(accepted) == 2, "a connection and a handshake")


def test_reason_when_looking_hangs_then_callers_do_not_wait_for_it() -> None:
    goes_on, address = Event(), f"127.0.0.1:{quiet_port()}"

    def find_server() -> tuple[str, TLS | None]:
        goes_on.wait(60.0)  # as a resolver may
        return address, None

    looks = SilenceLooks(find_server)
    assert looks.find().why == ""  # at once, and another caller too
    assert looks.find().why == ""
    goes_on.set()
    wait_for(lambda: looks.find().why == "connection refused", "the look's end")
