"""Measures how long a real server's event loop is busy at a time, by the CPU time of its thread in each callback.

The server runs in this program, which looks at every callback of its loop and notes the longest in a mapped file. It
measures CPU time, not time on the clock, so another process on the core lengthens no callback.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import select
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tdserve
from tdserve.base.config import ServerConfig
from tdserve.server import server_process
from tdserve.server.start_lines import READY_PREFIX
from tests.processes import REPOSITORY, START_TIMEOUT_S

COSTS = struct.Struct("<d?")
"""Content of the mapped file: seconds, and whether a callback is running."""


NUM_TRIES = 6
"""The best of these tries counts: any callback may have to wait for memory."""


class WatchedServer:
    """A server whose event loop is measured.

    Args:
        root: Root folder of the server.
        scratch: Folder for the mapped file.
    """

    def __init__(self, root: Path, scratch: Path, **settings: Any) -> None:
        costs = scratch / "worst"
        costs.write_bytes(COSTS.pack(0.0, False))
        with open(costs, "r+b") as file:
            self._costs = mmap.mmap(file.fileno(), COSTS.size)
        read_fd, self._lifeline_fd = os.pipe()
        config = ServerConfig(root=str(root), port=0, **settings)
        command = [sys.executable, "-m", "tests.integration.loop_costs", str(read_fd), str(costs)]
        self._process = subprocess.Popen(
            command,
            pass_fds=[read_fd],
            stdout=subprocess.PIPE,
            text=True,
            cwd=REPOSITORY,
            env=config.build_child_environment(),
        )
        os.close(read_fd)
        assert self._process.stdout is not None
        readable, _, _ = select.select([self._process.stdout], [], [], 4 * START_TIMEOUT_S)
        assert readable, "the server did not start"
        line = self._process.stdout.readline()
        assert line.startswith(READY_PREFIX), line
        self.address = line.removeprefix(READY_PREFIX).strip()

    def client(self, **arguments: Any) -> tdserve.Client:
        """Opens a new client."""
        return tdserve.connect(self.address, **arguments)

    def begin(self) -> None:
        """Resets the measurement."""
        self._costs[:] = COSTS.pack(0.0, False)

    @property
    def worst_s(self) -> float:
        """Returns the time of the longest callback since ``begin``, including one that is running: it may have sent the
        answer."""
        worst_s, is_running = COSTS.unpack(self._costs[:])
        while is_running:
            os.sched_yield()
            worst_s, is_running = COSTS.unpack(self._costs[:])
        return float(worst_s)

    def close(self) -> None:
        """Shuts the server down."""
        os.close(self._lifeline_fd)
        self._process.wait(START_TIMEOUT_S)
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._costs.close()

    def __enter__(self) -> WatchedServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def long_ones(server: WatchedServer, calls: dict[str, Callable[[], object]], limit_s: float) -> dict[str, float]:
    """Lists the calls that keep the loop busy for longer in each of ``NUM_TRIES`` tries, with the milliseconds of the
    best try."""
    found = {}
    for name, call in calls.items():
        costs = []
        for _ in range(NUM_TRIES):
            server.begin()
            call()
            costs.append(server.worst_s)
            if costs[-1] <= limit_s:
                break
        if min(costs) > limit_s:
            found[name] = round(min(costs) * 1e3, 1)
    return found


def measure_callbacks(costs: str) -> None:
    """Starts to measure every callback."""
    with open(costs, "r+b") as file:
        noted = mmap.mmap(file.fileno(), COSTS.size)
    run = asyncio.Handle._run

    def measured(handle: asyncio.Handle) -> None:
        noted[-1] = True
        began_s = time.thread_time()
        run(handle)
        spent_s = time.thread_time() - began_s
        noted[:] = COSTS.pack(max(spent_s, COSTS.unpack(noted[:])[0]), False)

    asyncio.Handle._run = measured  # type: ignore[method-assign, assignment]


if __name__ == "__main__":
    lifeline_fd, costs_path = sys.argv[1:]
    measure_callbacks(costs_path)
    sys.exit(server_process.main([lifeline_fd]))
