"""A server that is killed with SIGKILL and started again, and writers that go on through it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from threading import Thread

import tdserve
from tests.processes import quiet_port, wait_for


class Crashing:
    """A server on one root and one port that can be killed and started again; a context manager."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.port = quiet_port()
        self.server = tdserve.Server(root, port=self.port, transfer_timeout_s=5.0).start()

    def kill(self) -> None:
        """Kills the control process."""
        os.kill(self.server.pid, signal.SIGKILL)
        wait_for(lambda: not self.server.is_alive, "the end of the control process")

    def start(self) -> None:
        """Starts a new server on the same root and port."""
        self.server.shutdown()
        self.server = tdserve.Server(self.root, port=self.port, transfer_timeout_s=5.0).start()

    def restart(self) -> None:
        """Kills the server and starts a new one."""
        self.kill()
        self.start()

    def __enter__(self) -> Crashing:
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()


class Writer(Thread):
    """Writes again and again, and knows which numbers were acknowledged.

    Args:
        write: Stores a number; returns when it is acknowledged.
    """

    def __init__(self, write: Callable[[int], object]) -> None:
        super().__init__(daemon=True)
        self._write = write
        self.acknowledged: list[int] = []
        self.fault: Exception | None = None
        self.is_ending = False
        self.start()

    def run(self) -> None:
        number = 0
        try:
            while not self.is_ending:
                number += 1
                self._write(number)
                self.acknowledged.append(number)
        except Exception as fault:  # noqa: BLE001 (the test looks at it)
            self.fault = fault

    def goes_on(self) -> None:
        """Waits until one more write is acknowledged."""
        so_far = len(self.acknowledged)
        wait_for(lambda: self.fault is not None or len(self.acknowledged) > so_far + 3, "more writes", timeout_s=60.0)
        assert self.fault is None, self.fault

    def end(self) -> list[int]:
        """Stops writing; returns every number that was acknowledged."""
        self.is_ending = True
        self.join(60.0)
        assert self.fault is None, self.fault
        return self.acknowledged
