"""The server of a run, whose processes are killed one after another."""

from __future__ import annotations

import os
import random
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tdserve.base.errors import DeadlineExceededError, TDServeError
from tdserve.client.session.catalog.catalog_client import CatalogClient
from tdserve.launcher import Server
from tdserve.soak.process_figures import find_parent, is_gone, list_descendants

VICTIMS = ("worker", "fork server", "control", "server")
"""What of a server is killed; ``server`` is all of its processes at once."""

END_TIMEOUT_S = 60.0
"""Time within which killed processes are gone."""


class ServerUnderTest:
    """A server on a port that no other process gets while it is down.

    Args:
        root: Its root.
        num_workers: Its data workers.
    """

    def __init__(self, root: Path, *, num_workers: int = 2) -> None:
        self.root = root
        self._server = Server(root, port=_choose_port(), num_workers=num_workers, log_level="error")

    def start(self) -> None:
        """Starts it. Errors as in ``tdserve.Server.start``."""
        self._server.start()

    def shutdown(self) -> None:
        """Ends it, as a user does. Idempotent."""
        self._server.shutdown()

    @property
    def address(self) -> str:
        """``host:port``, the same after each restart."""
        return self._server.address

    def find_processes(self) -> dict[str, list[int]]:
        """Returns the ids of its processes by role. A role without a living process is missing.

        Raises:
            TDServeError: The server does not answer.
        """
        with CatalogClient(self.address, timeout_s=5.0) as client:
            workers = [int(each["pid"]) for each in client.stats()["workers"] if each["is_ready"]]
        control = self._server.pid
        found = {"control": [control], "worker": workers}
        with suppress(OSError):  # a worker that has just died
            found["fork server"] = sorted({find_parent(worker) for worker in workers})
        known = {pid for pids in found.values() for pid in pids}
        found["other"] = [pid for pid in list_descendants(control) if pid not in known and not is_gone(pid)]
        return {role: pids for role, pids in found.items() if pids}

    def kill(self, victim: str, chance: random.Random) -> bool:
        """Kills a process; returns whether the server has ended by that."""
        try:
            found = self.find_processes()
        except TDServeError:  # it is about to replace a worker
            found = {}
        if victim in found and victim != "control":
            _kill([chance.choice(found[victim])])
            return False
        control, below = self._server.pid, list_descendants(self._server.pid)
        workers = [pid for role in ("worker", "fork server") for pid in found.get(role, ())]
        _kill([control, *([*below, *workers] if victim == "server" else ())])
        # control can be reaped later than its first thread has ended
        await_state(
            lambda: not self._server.is_alive and all(map(is_gone, [*below, *workers])), "the end of the server"
        )
        return True


def await_state(look: Callable[[], bool], what: str, *, timeout_s: float = END_TIMEOUT_S) -> float:
    """Waits until ``look`` returns true; returns how many seconds that took.

    Raises:
        DeadlineExceededError: It did not in time.
    """
    begin_s = time.monotonic()
    while not look():
        if time.monotonic() > begin_s + timeout_s:
            raise DeadlineExceededError(what=what, timeout_s=timeout_s)
        time.sleep(0.02)
    return time.monotonic() - begin_s


def _kill(pids: list[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):  # dies with its parent
            os.kill(pid, signal.SIGKILL)


def _choose_port() -> int:
    """Returns a free port of loopback that the system does not assign, so that a killed server gets it again."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    lowest = max(1024, first - 20_000)
    for port in random.SystemRandom().sample(range(lowest, max(first, lowest + 1_000)), 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    return 0
