"""A server with few descriptors serves as many clients as it can, and refuses the others."""

from __future__ import annotations

import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Event

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tests.processes import (
    REPOSITORY,
    START_TIMEOUT_S,
    alarm,
    listening_ports,
    num_threads,
    ready_worker,
    wait_for,
)

pytestmark = pytest.mark.integration


@contextmanager
def serving(root: Path, soft: int, hard: int) -> Iterator[str]:
    """The address of a server with these limits."""
    command = [sys.executable, "-m", "tdserve", "serve", str(root), "--port", "0", "--transfer-timeout", "5"]
    program = (
        f"import os, resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard})); "
        f"os.execv({sys.executable!r}, {command!r})"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            with alarm(START_TIMEOUT_S, "the start of the server"):
                line = process.stdout.readline()
            assert line.startswith("tdserve ready at "), line
            yield line.split()[-1]
        finally:
            process.terminate()
            process.wait(30.0)


@pytest.mark.slow
@pytest.mark.parametrize("limit", [128, pytest.param(256, marks=pytest.mark.full)])
def test_connect_when_clients_fill_the_descriptors_then_the_next_is_refused_and_all_others_go_on(
    tmp_path: Path, limit: int
) -> None:
    with serving(tmp_path, limit, limit) as address, ExitStack() as stack:
        first = stack.enter_context(tdserve.connect(address, transport="gloo", timeout_s=60.0))
        first.init_remote(TensorDict({"k": torch.arange(20_000)}, []), "s")
        before = ready_worker(first)
        clients = [first]
        threads_before = num_threads(before["pid"])

        def add_clients() -> None:
            for _ in range(limit):
                more = stack.enter_context(tdserve.connect(address, transport="gloo", timeout_s=10.0))
                more.from_remote_init("s", timeout_s=10.0 if len(clients) < limit // 6 else 2.0)
                clients.append(more)

        with pytest.raises(tdserve.ServerBusyError) as caught:
            add_clients()
        assert limit // 5 <= len(clients) <= limit // 2
        assert caught.value.fields["limit"] == limit
        assert "descriptors" in str(caught.value)
        assert num_threads(before["pid"]) - threads_before <= 2 * len(clients)
        assert clients[-1].from_remote_init("s")["k"][5] == 5
        clients.pop().close()
        with tdserve.connect(address, transport="gloo", timeout_s=30.0) as later:
            assert later.from_remote_init("s")["k"][5] == 5
        after = ready_worker(first)
        assert (after["pid"], after["num_restarts"]) == (before["pid"], 0)


@pytest.mark.slow
def test_start_when_the_soft_limit_is_low_then_it_is_raised(tmp_path: Path) -> None:
    with serving(tmp_path, 100, 300) as address, tdserve.connect(address, transport="gloo", timeout_s=60.0) as client:
        client.init_remote(TensorDict({"k": torch.arange(20_000)}, []), "s")
        assert resource.prlimit(ready_worker(client)["pid"], resource.RLIMIT_NOFILE) == (300, 300)


@pytest.mark.slow
def test_connections_when_a_stranger_opens_many_and_sends_nothing_then_it_gets_no_more_and_clients_go_on(
    tmp_path: Path,
) -> None:
    with serving(tmp_path, 256, 256) as address, ExitStack() as stack:
        client = stack.enter_context(tdserve.connect(address, transport="gloo", timeout_s=60.0))
        client.init_remote(TensorDict({"k": torch.arange(20_000)}, []), "s")
        before = ready_worker(client)
        (port,) = listening_ports(before["pid"])
        for _ in range(130):
            stack.enter_context(socket.create_connection(("127.0.0.1", port)))

        def is_shut() -> bool:
            try:
                stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=0.2))
            except TimeoutError:
                return True
            Event().wait(0.2)
            return False

        wait_for(is_shut, "the end of its connections")
        with tdserve.connect(address, transport="gloo", timeout_s=30.0) as later:
            assert later.from_remote_init("s")["k"][5] == 5
        assert client.from_remote_init("s")["k"][5] == 5
        after = ready_worker(client)
        assert (after["pid"], after["num_restarts"]) == (before["pid"], 0)
