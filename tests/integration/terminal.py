"""Commands on a terminal of their own."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager

from tests.processes import REPOSITORY, wait_for


class Terminal:
    """A command on a terminal of its own.

    Args:
        arguments: Arguments of the command.
        columns: Its width.
    """

    def __init__(self, *arguments: str, columns: int = 200) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
        command = [sys.executable, "-m", "tdserve", *arguments]
        environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(columns), "LINES": "50"}
        self.process = subprocess.Popen(
            command, cwd=REPOSITORY, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, close_fds=True
        )
        self._theirs = theirs
        os.set_blocking(self._ours, False)
        self.text = ""

    def read(self) -> str:
        """All that was shown until now."""
        try:
            while piece := os.read(self._ours, 1 << 16):
                self.text += piece.decode()
        except BlockingIOError:
            pass
        return self.text

    def wait_for(self, pattern: str, *, timeout_s: float = 30.0) -> re.Match[str]:
        """Waits until something is shown."""
        return wait_for(lambda: re.search(pattern, self.read()), f"{pattern!r} on the terminal", timeout_s=timeout_s)

    def type(self, keys: str) -> None:
        """Presses keys."""
        os.write(self._ours, keys.encode())

    @property
    def is_as_usual(self) -> bool:
        """Whether the terminal echoes and waits for lines."""
        return bool(termios.tcgetattr(self._theirs)[3] & termios.ICANON)

    def close(self) -> None:
        """Ends the command."""
        self.process.kill()
        self.process.wait()
        os.close(self._ours)
        os.close(self._theirs)


@contextmanager
def run_on_terminal(*arguments: str, columns: int = 200) -> Iterator[Terminal]:
    """Runs a command on a terminal."""
    terminal = Terminal(*arguments, columns=columns)
    try:
        yield terminal
    finally:
        terminal.close()
