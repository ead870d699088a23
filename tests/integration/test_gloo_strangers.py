"""A peer without the token gets nothing at a gloo port. It is refused, and if it breaks a connection, that is soon
replaced, without loss."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tdserve.transport import proven
from tdserve.transport.proving import MESSAGE_BYTES
from tests.integration.crashing import Writer
from tests.processes import listening_ports, ready_worker, wait_for
from tests.stranger import CONTENT, PREAMBLE, Line, device_of_this_process, taken

pytestmark = pytest.mark.integration

TOKEN = "a token"
NUM_TAKEN = 120
NUM_TRIES = 5
"""Number of tries: another client's connection may take the place of the attacked one."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tdserve.Server]:
    """A server with a token."""
    token_file = tmp_path / "token"
    token_file.write_text(TOKEN)
    with tdserve.Server(tmp_path / "root", port=0, token_file=token_file, transfer_timeout_s=5.0) as started:
        yield started


@pytest.fixture
def client(server: tdserve.Server) -> Iterator[tdserve.Client]:
    """A client with the token and a long timeout."""
    with server.client(token=TOKEN, transport="gloo", timeout_s=60.0) as connected:
        yield connected


def order_of(port: int) -> int:
    """Returns the sort key of a port. Of two ends at one address, the end whose port is first in gloo's order
    listens."""
    return socket.htons(port)


def have_port_above(port: int) -> None:
    """Gives this process such a gloo port that the end at the other port is the one that listens."""
    while order_of(device_of_this_process()[0]) <= order_of(port):
        proven.leave_all_devices()


def ports_below_others(server: tdserve.Server, client: tdserve.Client) -> set[int]:
    """Returns the ports of the worker. At least one port in sixteen comes after its last one in gloo's order: a worker
    whose ports are too late is replaced."""
    while True:
        with server.client(token=TOKEN, transport="gloo", timeout_s=60.0) as first:
            first.from_remote_init("secret")  # by now the worker has a port, which the next pair will use
        worker = ready_worker(client)
        ports = listening_ports(worker["pid"])
        if max(map(order_of, ports)) < order_of(0x00F0):
            return ports
        os.kill(worker["pid"], signal.SIGKILL)
        wait_for(lambda: ready_worker(client)["num_restarts"] > worker["num_restarts"], "a restart")  # noqa: B023


def strike(server: tdserve.Server, client: tdserve.Client, behave: Callable[[Line], None]) -> int:
    """A client connects while a stranger uses the worker's next numbers, until one of these has become a pair. The
    client still reads the store "secret".

    Returns:
        The number of restarts of the worker before the last try.
    """
    for _ in range(NUM_TRIES):
        ports = ports_below_others(server, client)
        num_restarts = int(ready_worker(client)["num_restarts"])
        have_port_above(max(ports, key=order_of))
        with ExitStack() as stack:
            became = [stack.enter_context(taken(port, range(NUM_TAKEN), behave)) for port in ports]
            with server.client(token=TOKEN, transport="gloo", timeout_s=60.0) as victim:
                assert victim.from_remote_init("secret")["k"].sum() == torch.arange(50_000).sum()
            if any(became):
                return num_restarts
    raise AssertionError("the worker never listened")


@pytest.mark.slow
def test_connect_when_a_stranger_has_the_next_numbers_then_the_client_gets_in_and_he_reads_nothing(
    server: tdserve.Server, client: tdserve.Client
) -> None:
    received: list[bytes] = []

    def ask(line: Line) -> None:
        for _ in range(2):
            received.append(line.receive())
            line.send_message(b"\x00" * MESSAGE_BYTES)

    client.init_remote(TensorDict({"k": torch.arange(50_000)}, []), "secret")
    num_restarts = strike(server, client, ask)
    assert ready_worker(client)["num_restarts"] == num_restarts
    assert received
    assert {len(message) for message in received} == {MESSAGE_BYTES}


def spoil(line: Line) -> None:
    """Sends bytes that gloo takes for a fault of its own: that ends the process."""
    line.send(PREAMBLE.pack(PREAMBLE.size + 8, CONTENT, 999, 0, 8, 0) + b"\0" * 8)


@pytest.mark.slow
def test_read_when_a_stranger_ends_the_worker_of_all_then_the_next_one_answers_soon(
    server: tdserve.Server, client: tdserve.Client
) -> None:
    client.init_remote(TensorDict({"k": torch.arange(50_000)}, []), "secret")
    with server.client(token=TOKEN, transport="gloo", timeout_s=60.0) as other:
        store = other["secret"]
        assert store["k"].sum() == torch.arange(50_000).sum()
        num_restarts = strike(server, client, spoil)
        wait_for(lambda: ready_worker(client)["num_restarts"] > num_restarts, "a restart")
        assert store["k"].sum() == torch.arange(50_000).sum()


@pytest.mark.slow
def test_extend_when_a_stranger_sends_garbage_again_and_again_then_goes_on_and_no_row_is_lost(
    server: tdserve.Server, client: tdserve.Client
) -> None:
    client.init_remote(TensorDict({"k": torch.arange(50_000)}, []), "secret")
    row = TensorDict({"number": torch.tensor(0), "large": torch.zeros(20_000)}, [])
    replay = client.create_replay("replay", like=row, capacity=20_000)

    def write(number: int) -> None:
        numbers = TensorDict({"number": torch.tensor([number]), "large": torch.zeros(1, 20_000)}, [1])
        replay.extend(numbers, timeout_s=60.0)

    writer = Writer(write)
    with server.client(token=TOKEN, transport="gloo", timeout_s=60.0) as watching:
        for _ in range(2):
            writer.goes_on()
            num_restarts = strike(server, watching, spoil)
            wait_for(lambda: ready_worker(watching)["num_restarts"] > num_restarts, "a restart")  # noqa: B023
            writer.goes_on()
    acknowledged = writer.end()
    assert sorted(replay[: len(replay)]["number"].tolist()) == acknowledged
