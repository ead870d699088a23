"""Server and client on two machines, as far as the network is concerned: two namespaces joined by a veth pair."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.two_machines import SERVER_ADDRESS, filtering, ip, join_namespaces, serving
from tests.processes import REPOSITORY, Program, listening_addresses

pytestmark = pytest.mark.integration

HIGH_ADDRESSES = "198.18.77.1", "198.18.77.2"
"""The end with the higher address waits for the other (seen with torch 2.13). With a loopback address it would not
wait."""

SERVER_ADDRESS_IN_PROC = "014DD50A"


@pytest.fixture(scope="module")
def namespaces() -> Iterator[tuple[str, str]]:
    """The two machines of these tests."""
    with join_namespaces() as names:
        yield names


@pytest.fixture
def server(namespaces: tuple[str, str], tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A server in the first namespace, on its own address there."""
    with serving(namespaces, tmp_path / "root", SERVER_ADDRESS) as process:
        yield process


@pytest.mark.slow
def test_client_when_it_is_on_another_machine_then_all_kinds_of_content_travel_over_gloo(
    server: subprocess.Popen[str], namespaces: tuple[str, str]
) -> None:
    elsewhere = ("ip", "netns", "exec", namespaces[1])
    with Program("tour", f"{SERVER_ADDRESS}:7707", prefix=elsewhere) as client:
        assert client.line() == "connected"
        assert client.line() == "found [7] [8] [9]"
        assert "gloo" in client.line().split()
    assert listening_addresses(server.pid) == {SERVER_ADDRESS_IN_PROC}


MEMBER = """
import sys, tdserve, torch
from tensordict import TensorDict
with tdserve.connect(sys.argv[1], transport="gloo") as client, client.group("both", 2) as group:
    print(group.all_reduce(TensorDict({"x": torch.ones(3)}), "sum")["x"].tolist())
"""


@pytest.mark.full
def test_group_when_a_member_came_by_loopback_then_the_others_reach_it_all_the_same(
    namespaces: tuple[str, str], tmp_path: Path
) -> None:
    for name, link, address in zip(namespaces, ("tds0", "tds1"), HIGH_ADDRESSES, strict=True):
        ip("-n", name, "addr", "add", f"{address}/30", "dev", link)
        ip("-n", name, "route", "replace", "default", "dev", link, "src", address)
    with serving(namespaces, tmp_path / "root", "0.0.0.0"):
        members: list[subprocess.Popen[str]] = []
        try:
            for name, host in zip(namespaces, ("127.0.0.1", HIGH_ADDRESSES[0]), strict=True):
                set_name = ("unshare", "--uts", "sh", "-c", f'hostname {name}; exec "$@"', "sh")
                command = ["ip", "netns", "exec", name, *set_name, sys.executable, "-c", MEMBER, f"{host}:7707"]
                members.append(subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True))
            assert [member.communicate(timeout=100.0)[0] for member in members] == ["[2.0, 2.0, 2.0]\n"] * 2
        finally:
            for member in members:
                member.kill()
                member.communicate()


UNREACHED = """
import sys, tdserve, torch
client = tdserve.connect(sys.argv[1], transport="gloo", timeout_s=2.0)
try:
    client.publish("policy", {"w": torch.zeros(100_000)})
except tdserve.ConnectError as error:
    print("gloo" in str(error))
"""


@pytest.mark.full
@pytest.mark.parametrize("rule", ["OUTPUT -o tds1 -p tcp ! --dport 7707", "INPUT -i tds1 -p tcp ! --sport 7707"])
@pytest.mark.usefixtures("server")
def test_client_when_the_ports_of_gloo_are_blocked_then_an_error_and_it_ends_cleanly(
    namespaces: tuple[str, str], rule: str
) -> None:
    command = ["ip", "netns", "exec", namespaces[1], sys.executable, "-c", UNREACHED, f"{SERVER_ADDRESS}:7707"]
    with filtering(namespaces[1], rule):
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=100.0, check=False)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr
