"""Programs that start others: all their processes have a mark in their environment, by which they are found again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

from tests.processes import REPOSITORY, wait_for

MARK = "TEST_MARK"


class MarkedProgram:
    """A Python program as a process group of its own, with everything that it starts.

    Args:
        folder: For what it prints, and for its temporary files.
        *arguments: Of the interpreter.
    """

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        self._mark = uuid.uuid4().hex
        self._printed = folder / "printed"
        with self._printed.open("wb") as printed:
            self.process = subprocess.Popen(
                [sys.executable, *arguments],
                cwd=REPOSITORY,
                env={**os.environ, MARK: self._mark, "TMPDIR": str(self.temporary)},
                stdout=printed,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def printed(self) -> str:
        """Returns what it has printed so far."""
        return self._printed.read_text()

    def processes(self) -> dict[int, str]:
        """Returns the command lines of its living processes, by id."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if f"{MARK}={self._mark}".encode() in (folder / "environ").read_bytes():
                    found[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ")
            except OSError:
                continue  # it ended meanwhile
        return found

    def wait_gone(self) -> None:
        """Waits until all of its processes have ended. Some end by themselves only after the program has ended."""
        wait_for(lambda: not self.processes(), "the end of all its processes")

    def kill(self) -> None:
        """Kills everything, for a test that has failed half way."""
        for pid in self.processes():
            os.kill(pid, signal.SIGKILL)
        self.process.wait()
