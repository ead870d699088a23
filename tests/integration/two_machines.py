"""Two machines, as far as the network is concerned: two namespaces joined by a veth pair, and faults between them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tdserve.server.start_lines import READY_PREFIX
from tests.processes import REPOSITORY

SERVER_ADDRESS, CLIENT_ADDRESS = "10.213.77.1", "10.213.77.2"


def ip(*arguments: str) -> None:
    """Runs iproute2."""
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=30.0)


@contextmanager
def join_namespaces() -> Iterator[tuple[str, str]]:
    """Makes the namespaces of a server and of a client, whose only link is to each other; skips the test where that is
    not possible."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root and iproute2")
    names = (f"tdserve-s-{os.getpid()}", f"tdserve-c-{os.getpid()}")
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", "tds0", "netns", names[0], "type", "veth", "peer", "name", "tds1", "netns", names[1])
    except subprocess.CalledProcessError as error:
        _remove(names)
        pytest.skip(f"namespaces cannot be made here: {error.stderr.decode().strip()}")
    for name, link, address in zip(names, ("tds0", "tds1"), (SERVER_ADDRESS, CLIENT_ADDRESS), strict=True):
        ip("-n", name, "addr", "add", f"{address}/24", "dev", link)
        ip("-n", name, "link", "set", link, "up")
        ip("-n", name, "link", "set", "lo", "up")
    yield names
    _remove(names)


def _remove(names: tuple[str, str]) -> None:
    """Removes what exists of them; the veth pair goes with either end."""
    for name in names:
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True, timeout=30.0)


@contextmanager
def serving(namespaces: tuple[str, str], root: Path, host: str, *, port: int = 7707) -> Iterator[subprocess.Popen[str]]:
    """A server in the first namespace."""
    command = ["ip", "netns", "exec", namespaces[0], sys.executable, "-m", "tdserve", "serve", str(root)]
    command += ["--host", host, "--port", str(port), "--insecure"]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == f"{READY_PREFIX}{host}:{port}\n"
            yield process
            process.terminate()
            assert process.wait(30.0) == 0
        finally:
            process.kill()  # `ip netns exec` becomes the server


@contextmanager
def filtering(namespace: str, *rules: str) -> Iterator[None]:
    """Drops the packets that match a rule of iptables, such as ``"OUTPUT"``, during the block; skips the test where
    that is not possible."""
    if shutil.which("iptables") is None:
        pytest.skip("needs iptables")
    run = ("ip", "netns", "exec", namespace, "iptables")
    for rule in rules:
        made = subprocess.run([*run, "-A", *rule.split(), "-j", "DROP"], check=False, capture_output=True, timeout=30.0)
        if made.returncode:
            pytest.skip(f"iptables lacks something here: {made.stderr.decode().strip()}")
    try:
        yield
    finally:
        subprocess.run([*run, "-F"], check=True, capture_output=True, timeout=30.0)
