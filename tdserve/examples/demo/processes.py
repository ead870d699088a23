"""Starts the child processes of the demo, notices a death, and ends all of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import NamedTuple

STOP_TIMEOUT_S = 5.0
"""Seconds between SIGTERM and SIGKILL: a child ends as soon as its present call returns."""

NUM_LOG_LINES = 12
"""This many of the last lines of a dead child are shown: the interesting end of a traceback."""


class Death(NamedTuple):
    """The unexpected end of a child."""

    name: str
    exit_code: int
    last_lines: str

    def __str__(self) -> str:
        how = f"signal {-self.exit_code}" if self.exit_code < 0 else f"exit code {self.exit_code}"
        return f"{self.name} ended unexpectedly ({how})"


class Processes:
    """Child processes, each in a session of its own: Ctrl-C reaches only the parent, which ends them in order.

    Args:
        logs: An existing folder for their output, with a file for each.
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

    def find_death(self) -> Death | None:
        """Returns the first child found dead, or None while all live."""
        for name, child in self._children.items():
            exit_code = child.poll()
            if exit_code is not None:
                lines = self._log(name).read_text(errors="replace").splitlines()
                return Death(name, exit_code, "\n".join(lines[-NUM_LOG_LINES:]))
        return None

    def close(self) -> None:
        """Ends all children, politely at first, and returns when all are gone."""
        for child in self._children.values():
            child.terminate()
        end_s = time.monotonic() + STOP_TIMEOUT_S
        for child in self._children.values():
            with child:  # at the end of the block it is waited for
                try:
                    child.wait(max(0.0, end_s - time.monotonic()))
                except subprocess.TimeoutExpired:
                    child.kill()
        self._children.clear()

    def _log(self, name: str) -> Path:
        return self._logs / f"{name}.log"


@contextmanager
def hold_signals() -> Iterator[list[signal.Signals]]:
    """Yields a list that collects SIGINT, SIGTERM and SIGHUP, so that no signal interrupts a clean-up."""
    received: list[signal.Signals] = []

    def receive(number: int, _: object) -> None:
        received.append(signal.Signals(number))

    before = {number: signal.signal(number, receive) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def end_with_parent() -> None:
    """Lets SIGTERM and the death of the parent unwind the stack of a child, so that ``with`` closes its client."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))

    def wait_for_parent() -> None:
        os.read(sys.stdin.fileno(), 1)  # returns when the parent, which never writes, is gone
        os.kill(os.getpid(), signal.SIGTERM)

    Thread(target=wait_for_parent, name="demo-lifeline", daemon=True).start()
