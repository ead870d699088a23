"""How long the event loop of a real server is busy at a time: the CPU of its own thread in each callback.

The server runs in this program, which looks at every callback of its loop and notes the longest in a mapped file. It
is CPU that is measured, not time on the clock: another process that takes the core lengthens no callback.
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
from tdserve.server import main as server_main
from tests.integration.processes import REPOSITORY, START_TIMEOUT_S

COSTS = struct.Struct("<d?")
"""What the mapped file holds: seconds, and whether a callback is running."""


NUM_TRIES = 3
"""The best of them counts: a callback may have to wait for memory, whatever it does."""


class WatchedServer:
    """A server whose loop is watched.

    Args:
        root: Of the server.
        scratch: A folder for what is noted.
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
        assert line.startswith(server_main.READY_PREFIX), line
        self.address = line.removeprefix(server_main.READY_PREFIX).strip()

    def client(self, **arguments: Any) -> tdserve.Client:
        """A new client of it."""
        return tdserve.connect(self.address, **arguments)

    def begin(self) -> None:
        """Forgets the longest callback so far."""
        self._costs[:] = COSTS.pack(0.0, False)

    @property
    def worst_s(self) -> float:
        """The longest callback since ``begin``, together with the one that is running: it may have sent the answer."""
        worst_s, is_running = COSTS.unpack(self._costs[:])
        while is_running:
            os.sched_yield()
            worst_s, is_running = COSTS.unpack(self._costs[:])
        return float(worst_s)

    def close(self) -> None:
        """Ends it."""
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
    """The calls that keep the loop busy for longer, each of three times, and for how many milliseconds at best."""
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
    """From here on each callback is measured."""
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
    sys.exit(server_main.main([lifeline_fd]))
