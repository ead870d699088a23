"""A server whose log a test reads."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tdserve.server.start_lines import READY_PREFIX
from tests.processes import REPOSITORY
from tests.roots import make_quick_root


class LoggedServer:
    """A server whose log goes into a file.

    Args:
        root: Its root.
        path: Path of the log.
        options: Options of ``tdserve serve``.
    """

    def __init__(self, root: str, path: Path, *options: str) -> None:
        self._path = path
        command = [sys.executable, "-m", "tdserve", "serve", root, "--port", "0", *options]
        with path.open("wb") as log:
            self.process = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=log, text=True)
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().removeprefix(READY_PREFIX).strip()

    def lines(self) -> list[str]:
        """All lines until now."""
        return self._path.read_text().splitlines()

    def entries(self) -> list[dict[str, Any]]:
        """All lines until now, as JSON."""
        return [json.loads(line) for line in self.lines()]

    def close(self) -> None:
        """Ends it."""
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(timeout=60)
        assert self.process.stdout is not None
        self.process.stdout.close()
        assert code == 0


@contextmanager
def run_server(path: Path, *options: str) -> Iterator[LoggedServer]:
    """Runs a server."""
    with make_quick_root() as root:
        server = LoggedServer(str(root), path, *options)
        try:
            yield server
        finally:
            server.close()
