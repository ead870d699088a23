"""Server and client on two machines, as far as the network is concerned: two namespaces joined by a veth pair."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tdserve.server.main import READY_PREFIX
from tests.integration.processes import REPOSITORY, Program, listening_addresses

pytestmark = pytest.mark.integration

SERVER_ADDRESS, CLIENT_ADDRESS = "10.213.77.1", "10.213.77.2"
SERVER_ADDRESS_IN_PROC = "014DD50A"


def ip(*arguments: str) -> None:
    """Runs iproute2."""
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=30.0)


@pytest.fixture(scope="module")
def namespaces() -> Iterator[tuple[str, str]]:
    """Two network namespaces whose only link is to each other."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root and iproute2")
    names = (f"tdserve-s-{os.getpid()}", f"tdserve-c-{os.getpid()}")
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", "tds0", "netns", names[0], "type", "veth", "peer", "name", "tds1", "netns", names[1])
    except subprocess.CalledProcessError as error:
        remove(names)
        pytest.skip(f"namespaces cannot be made here: {error.stderr.decode().strip()}")
    for name, link, address in zip(names, ("tds0", "tds1"), (SERVER_ADDRESS, CLIENT_ADDRESS), strict=True):
        ip("-n", name, "addr", "add", f"{address}/30", "dev", link)
        ip("-n", name, "link", "set", link, "up")
        ip("-n", name, "link", "set", "lo", "up")
    yield names
    remove(names)


def remove(names: tuple[str, str]) -> None:
    """Whatever there is of them; the veth pair goes with either end."""
    for name in names:
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True, timeout=30.0)


@pytest.fixture
def server(namespaces: tuple[str, str], tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A server in the first namespace, on its own address there."""
    command = ["ip", "netns", "exec", namespaces[0], sys.executable, "-m", "tdserve", "serve", str(tmp_path / "root")]
    command += ["--host", SERVER_ADDRESS, "--port", "7707", "--insecure"]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == f"{READY_PREFIX}{SERVER_ADDRESS}:7707\n"
        yield process
        process.terminate()
        assert process.wait(30.0) == 0


def test_client_when_it_is_on_another_machine_then_all_kinds_of_content_travel_over_gloo(
    server: subprocess.Popen[str], namespaces: tuple[str, str]
) -> None:
    elsewhere = ("ip", "netns", "exec", namespaces[1])
    with Program("tour", f"{SERVER_ADDRESS}:7707", prefix=elsewhere) as client:
        assert client.line() == "connected"
        assert client.line() == "found [7] [8] [9]"
        assert "gloo" in client.line().split()
    assert listening_addresses(server.pid) == {SERVER_ADDRESS_IN_PROC}
