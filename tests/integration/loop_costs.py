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
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import tdserve
from tdserve.config import ServerConfig
from tdserve.server import main as server_main
from tests.integration.processes import REPOSITORY, START_TIMEOUT_S

WORST = struct.Struct("<d")
"""What the mapped file holds: seconds."""


class WatchedServer:
    """A server whose loop is watched.

    Args:
        root: Of the server.
        scratch: A folder for what is noted.
    """

    def __init__(self, root: Path, scratch: Path, **settings: Any) -> None:
        costs, self._stacks = scratch / "worst", scratch / "stacks"
        costs.write_bytes(WORST.pack(0.0))
        self._stacks.touch()
        with open(costs, "r+b") as file:
            self._worst = mmap.mmap(file.fileno(), WORST.size)
        read_fd, self._lifeline_fd = os.pipe()
        config = ServerConfig(root=str(root), port=0, **settings)
        command = [sys.executable, "-m", "tests.integration.loop_costs", str(read_fd), str(costs), str(self._stacks)]
        self._process = subprocess.Popen(
            command,
            pass_fds=[read_fd],
            stdout=subprocess.PIPE,
            text=True,
            cwd=REPOSITORY,
            env=config.child_environment(),
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
        self._worst[:] = WORST.pack(0.0)
        os.truncate(self._stacks, 0)

    @property
    def worst_s(self) -> float:
        """The longest callback since ``begin``."""
        found: float = WORST.unpack(self._worst[:])[0]
        return found

    @property
    def stacks(self) -> str:
        """What the loop was doing in long callbacks since ``begin``, newest last."""
        return self._stacks.read_text()

    def close(self) -> None:
        """Ends it."""
        os.close(self._lifeline_fd)
        self._process.wait(START_TIMEOUT_S)
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._worst.close()

    def __enter__(self) -> WatchedServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Watch:
    """Measures the callbacks of the loop; with ``TDSERVE_TEST_STACKS`` set, a thread notes what long ones do."""

    def __init__(self, costs: str, stacks: str) -> None:
        with open(costs, "r+b") as file:
            self._worst = mmap.mmap(file.fileno(), WORST.size)
        self._stacks = stacks
        self._thread_id = threading.get_ident()
        self._number = 0
        self._began_s = 0.0
        if os.environ.get("LOOP_STACKS"):
            threading.Thread(target=self._look, daemon=True).start()

    def install(self) -> None:
        """From here on each callback is measured."""
        run = asyncio.Handle._run
        watch = self

        def measured(handle: asyncio.Handle) -> None:
            watch._number += 1
            began_s = watch._began_s = time.thread_time()
            run(handle)
            spent_s = time.thread_time() - began_s
            watch._began_s = 0.0
            if spent_s > WORST.unpack(watch._worst[:])[0]:
                watch._worst[:] = WORST.pack(spent_s)

        asyncio.Handle._run = measured  # type: ignore[method-assign, assignment]

    def _look(self) -> None:
        seen, number_at, pause = 0, 0.0, threading.Event()
        while True:
            pause.wait(0.003)
            number = self._number
            if not self._began_s:
                continue
            if number == seen and time.monotonic() - number_at > 0.003:
                frame = sys._current_frames().get(self._thread_id)
                with open(self._stacks, "a") as file:
                    stack = traceback.extract_stack(frame)[-7:]
                    file.write(
                        " < ".join(
                            f"{each.filename.split('/tdserve/')[-1]}:{each.lineno} {each.name}"
                            for each in reversed(stack)
                        )
                        + "\n"
                    )
                number_at = time.monotonic() + 1e-9
            elif number != seen:
                seen, number_at = number, time.monotonic()


if __name__ == "__main__":
    lifeline_fd, costs_path, stacks_path = sys.argv[1:]
    _Watch(costs_path, stacks_path).install()
    sys.exit(server_main.main([lifeline_fd]))
