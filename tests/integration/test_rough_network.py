"""A bad network between a client over one port and its server. A proxy imitates it, so the tests need no rights."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tests.processes import quiet_port, stopped, wait_for
from tests.roots import make_quick_root
from tests.rough_proxy import RoughProxy, run_rough_proxy

pytestmark = pytest.mark.integration

TIMEOUT_S = 1.0
LATE_S = 3.0
"""How long after its deadline a call may end, four at once and beside other tests; ``test_partitions`` is stricter."""

ROWS = TensorDict({"x": torch.ones(8, 100_000)}, [8])
"""3.2 MB: many messages, so that a fault comes in the middle of some."""


@pytest.fixture(scope="module")
def server() -> Iterator[tdserve.Server]:
    """A server with a table and weights."""
    with make_quick_root() as root, tdserve.Server(root, port=quiet_port()) as started:
        with started.client(transport="gloo") as client:
            client.create_replay("table", ROWS[0], capacity=64).extend(ROWS)
            client.publish("weights", ROWS)
        yield started


@pytest.fixture
def proxy(server: tdserve.Server) -> Iterator[RoughProxy]:
    """The network of a client."""
    with run_rough_proxy(server.address) as made:
        yield made


@pytest.fixture
def client(proxy: RoughProxy) -> Iterator[tdserve.Client]:
    """A client whose bytes all take that network."""
    with tdserve.connect(proxy.address, transport="grpc", timeout_s=60.0) as made:
        yield made
        proxy.mend()


Calls = dict[str, Callable[[float], Any]]


def make_calls(client: tdserve.Client) -> Calls:
    """Returns calls by name, which take a timeout, after each has succeeded once."""
    table = client.replay("table")
    calls: Calls = {
        "extend": lambda timeout_s: table.extend(ROWS, timeout_s=timeout_s),
        "sample": lambda timeout_s: table.sample(8, timeout_s=timeout_s),
        "publish": lambda timeout_s: client.publish("weights", ROWS, timeout_s=timeout_s),
        "latest": lambda timeout_s: client.latest("weights", timeout_s=timeout_s),
    }
    check_all_succeed(calls)
    return calls


def check_all_succeed(calls: Calls) -> None:
    """Makes each call, with a long timeout."""
    for call in calls.values():
        call(60.0)


def check_ends_in_time(call: Callable[[float], Any]) -> None:
    """Makes a call that cannot succeed, and checks its end."""
    begin_s = time.monotonic()
    with pytest.raises((tdserve.DeadlineExceededError, tdserve.TransportError)):
        call(TIMEOUT_S)
    assert time.monotonic() - begin_s <= TIMEOUT_S + LATE_S


def cut(proxy: RoughProxy) -> None:
    """Drops all."""
    proxy.cut()


def lose_answers(proxy: RoughProxy) -> None:
    """Drops what the server sends."""
    proxy.back.is_dropped = True


def lose_requests(proxy: RoughProxy) -> None:
    """Drops what the client sends."""
    proxy.there.is_dropped = True


def stop(proxy: RoughProxy) -> None:
    """Takes no more bytes."""
    proxy.there.is_stopped = proxy.back.is_stopped = True


def refuse(proxy: RoughProxy) -> None:
    """Resets all connections, and new ones too."""
    proxy.refuses = True
    proxy.reset()


@pytest.mark.slow
@pytest.mark.parametrize("fault", [cut, lose_answers, lose_requests, stop, refuse])
def test_calls_when_the_network_fails_then_they_end_in_time_and_go_on_afterwards(
    proxy: RoughProxy, client: tdserve.Client, fault: Callable[[RoughProxy], None]
) -> None:
    calls = make_calls(client)
    fault(proxy)
    with ThreadPoolExecutor(len(calls)) as threads:
        for each in [threads.submit(check_ends_in_time, call) for call in calls.values()]:
            each.result()
    proxy.mend()
    check_all_succeed(calls)


@pytest.mark.slow
def test_calls_when_connections_are_reset_in_the_middle_then_each_write_is_stored_once(
    proxy: RoughProxy, client: tdserve.Client
) -> None:
    table = client.create_replay("reset", ROWS[0], capacity=200)
    with ThreadPoolExecutor(1) as thread:
        writing = thread.submit(lambda: [table.extend(ROWS, timeout_s=60.0) for _ in range(12)])
        for _ in range(3):
            before = table.info()["inserts"]
            wait_for(lambda before=before: writing.done() or table.info()["inserts"] > before, "more rows")  # type: ignore[misc]
            proxy.reset()
        assert len(writing.result(60.0)) == 12
    assert table.info()["inserts"] == 12 * 8


@pytest.mark.slow
def test_calls_of_others_when_one_client_reads_slowly_then_they_do_not_wait_for_it(
    server: tdserve.Server, proxy: RoughProxy, client: tdserve.Client
) -> None:
    calls = make_calls(client)
    with server.client(transport="gloo") as other, ThreadPoolExecutor(1) as thread:
        table = other.replay("table")
        table.sample(8)
        proxy.back.bytes_per_s = 100_000  # 30 s for a sample
        slow = thread.submit(calls["sample"], 100.0)
        before = proxy.num_bytes_back
        wait_for(lambda: proxy.num_bytes_back > before + 100_000, "the slow client's first bytes")
        for _ in range(50):
            assert table.sample(8, timeout_s=20.0).batch_size == (8,)
        assert not slow.done()
        proxy.back.bytes_per_s = 0
        assert slow.result(60.0).batch_size == (8,)


@pytest.mark.parametrize("transport", ["gloo", "grpc", "shm"])
def test_calls_when_the_control_process_stands_still_then_they_end_in_time(
    server: tdserve.Server, transport: Any
) -> None:
    with server.client(transport=transport, timeout_s=60.0) as client:
        calls = make_calls(client)
        with stopped(server.pid):  # over every transport, control must answer this call
            check_ends_in_time(lambda timeout_s: client.latest("weights", newer_than=1 << 40, timeout_s=timeout_s))
        check_all_succeed(calls)


@pytest.mark.slow
def test_client_when_the_server_comes_back_at_another_port_behind_its_address_then_goes_on(
    server: tdserve.Server, proxy: RoughProxy, client: tdserve.Client
) -> None:
    sample = make_calls(client)["sample"]
    with make_quick_root() as root, tdserve.Server(root) as second:
        with second.client() as other:
            other.create_replay("table", ROWS[0], capacity=64).extend(2 * ROWS)
        proxy.target = second.address
        proxy.reset()
        assert (sample(60.0)["x"] == 2).all()
