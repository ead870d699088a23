"""Partitions, loss and one-way links between machines in the middle of transfers: every call ends by its deadline, and
goes on once the network does."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.two_machines import SERVER_ADDRESS, filtering, ip, join_namespaces, serving
from tests.processes import Program

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

TIMEOUT_S = 1.0
LATE_S = 1.5
"""How long after its deadline a call may end. 0.4 s are for the answer of a server that is up, and to find out why
there is none; the rest is for an overloaded machine."""

BACK_S = 30.0
"""Time until calls succeed again after a partition: keepalive notices a dead connection within 20 s."""

FIRST_CALL_S = 200.0
"""The client imports torch first."""

NUM_CALLS = 10
"""Calls during a fault: two of each kind."""


class Caller(Program):
    """A client on the other machine; see ``network_caller``."""

    def __init__(self, namespace: str, transport: str, address: str = f"{SERVER_ADDRESS}:7707") -> None:
        super().__init__(
            address,
            transport,
            TIMEOUT_S,
            prefix=("ip", "netns", "exec", namespace),
            module="tests.integration.network_caller",
        )

    def __enter__(self) -> Caller:
        return self

    def await_start(self) -> None:
        """Waits until it works."""
        self.line(timeout_s=FIRST_CALL_S)
        self.await_success()

    def read_call(self) -> dict[str, Any]:
        """Returns the next call; fails if it was late."""
        found: dict[str, Any] = json.loads(self.line())
        assert found["took_s"] <= TIMEOUT_S + LATE_S, found
        return found

    def await_success(self, num_calls: int = 5) -> float:
        """Waits until that many calls in a row have succeeded; returns how many seconds that took."""
        begin_s, num_good = time.monotonic(), 0
        while num_good < num_calls:
            num_good = 0 if self.read_call()["error"] else num_good + 1
            assert time.monotonic() < begin_s + BACK_S, "calls did not succeed again"
        return time.monotonic() - begin_s


@pytest.fixture(scope="module")
def namespaces() -> Iterator[tuple[str, str]]:
    """The two machines of these tests."""
    with join_namespaces() as names:
        yield names


@pytest.fixture(scope="module", autouse=True)
def _server(namespaces: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One server for all of these tests."""
    with serving(namespaces, tmp_path_factory.mktemp("partitions") / "root", SERVER_ADDRESS):
        yield


TRANSPORTS = ["gloo", pytest.param("grpc", marks=pytest.mark.full)]

FAULTS = {
    "a partition": ("OUTPUT", "INPUT"),
    "answers that are lost": ("INPUT",),
    "requests that are lost": ("OUTPUT",),
}


@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(
    "fault", ["a partition", *(pytest.param(each, marks=pytest.mark.full) for each in list(FAULTS)[1:])]
)
def test_calls_when_packets_are_lost_then_they_end_in_time_and_go_on_afterwards(
    namespaces: tuple[str, str], transport: str, fault: str
) -> None:
    with Caller(namespaces[1], transport) as caller:
        caller.await_start()
        with filtering(namespaces[1], *FAULTS[fault]):
            while not caller.read_call()["error"]:  # those before the fault
                continue
            for _ in range(NUM_CALLS):
                assert caller.read_call()["error"]
        caller.await_success()


@pytest.mark.full
@pytest.mark.parametrize("transport", ["gloo", "grpc"])
def test_calls_when_a_third_of_all_packets_is_lost_then_each_ends_in_time(
    namespaces: tuple[str, str], transport: str
) -> None:
    with Caller(namespaces[1], transport) as caller:
        caller.await_start()
        with filtering(namespaces[1], "INPUT -m statistic --mode random --probability 0.3"):
            for _ in range(4 * NUM_CALLS):
                caller.read_call()
        caller.await_success()


@pytest.mark.full
def test_calls_of_others_when_one_client_is_cut_off_then_none_of_them_waits(
    namespaces: tuple[str, str],
) -> None:
    with Caller(namespaces[1], "gloo") as cut_off, Caller(namespaces[0], "gloo") as other:
        cut_off.await_start()
        other.await_start()
        before = sorted(other.read_call()["took_s"] for _ in range(200))
        with filtering(namespaces[1], "INPUT", "OUTPUT"):
            during = []
            for _ in range(200):
                call = other.read_call()
                assert not call["error"]
                during.append(call["took_s"])
        assert sorted(during)[100] < 2 * before[100] + 0.1
        cut_off.await_success()


@pytest.mark.full
def test_client_when_the_server_comes_back_at_another_address_of_its_name_then_found(
    namespaces: tuple[str, str], tmp_path: Path
) -> None:
    elsewhere, folder = "10.213.77.9", Path("/etc/netns") / namespaces[1]
    ip("-n", namespaces[0], "addr", "add", f"{elsewhere}/24", "dev", "tds0")
    folder.mkdir(parents=True)
    hosts = folder / "hosts"  # which `ip netns exec` shows as /etc/hosts
    try:
        hosts.write_text(f"127.0.0.1 localhost\n{SERVER_ADDRESS} tdserve-moving\n")
        with serving(namespaces, tmp_path / "root", SERVER_ADDRESS, port=7708):
            caller = Caller(namespaces[1], "gloo", "tdserve-moving:7708")
            caller.await_start()
        with caller:
            hosts.write_text(f"127.0.0.1 localhost\n{elsewhere} tdserve-moving\n")
            with serving(namespaces, tmp_path / "root", elsewhere, port=7708):
                caller.await_success()
    finally:
        shutil.rmtree(folder)
