"""The demo's child processes: start, notice a death, end every one of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from threading import Thread
from typing import NamedTuple

STOP_TIMEOUT_S = 5.0
"""Seconds between SIGTERM and SIGKILL: a child answers as soon as its present call returns."""

NUM_LOG_LINES = 12
"""Last lines of a dead child's output that are shown: a traceback's interesting end."""


class Death(NamedTuple):
    """A child that ended although nobody asked it to."""

    name: str
    exit_code: int
    last_lines: str

    def __str__(self) -> str:
        how = f"signal {-self.exit_code}" if self.exit_code < 0 else f"exit code {self.exit_code}"
        return f"{self.name} ended unexpectedly ({how})"


class Processes:
    """Child processes, each in a session of its own, so that Ctrl-C reaches the parent only, which ends them in order.

    Args:
        logs: Existing folder for their output, a file each.
    """

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._children: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, module: str, arguments: Sequence[str]) -> int:
        """Starts ``python -m module`` and returns its process id."""
        with self._log(name).open("wb") as log:
            self._children[name] = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return self._children[name].pid

    def death(self) -> Death | None:
        """The first child found dead, or None while all live."""
        for name, child in self._children.items():
            exit_code = child.poll()
            if exit_code is not None:
                lines = self._log(name).read_text(errors="replace").splitlines()
                return Death(name, exit_code, "\n".join(lines[-NUM_LOG_LINES:]))
        return None

    def stop(self) -> None:
        """Ends all children, first politely; returns when every one is gone."""
        for child in self._children.values():
            child.terminate()
        deadline_s = time.monotonic() + STOP_TIMEOUT_S
        for child in self._children.values():
            try:
                child.wait(max(0.0, deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
            if child.stdin is not None:
                child.stdin.close()
        self._children.clear()

    def _log(self, name: str) -> Path:
        return self._logs / f"{name}.log"


class Signals:
    """SIGINT, SIGTERM and SIGHUP as a value to look at, so that no signal tears a clean-up apart. A context manager."""

    NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self) -> None:
        self.received: signal.Signals | None = None

    def __enter__(self) -> Signals:
        self._before = {number: signal.signal(number, self._receive) for number in self.NUMBERS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, _: object) -> None:
        self.received = self.received or signal.Signals(number)


def end_with_parent() -> None:
    """In a child: SIGTERM unwinds the stack, so that ``with`` closes the client; so does a parent that dies unseen."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))

    def wait_for_parent() -> None:
        os.read(sys.stdin.fileno(), 1)  # returns when the parent, which never writes, is gone
        os.kill(os.getpid(), signal.SIGTERM)

    Thread(target=wait_for_parent, name="demo-lifeline", daemon=True).start()
