"""How a process begins that the server has started as a client of its own
(``tdserve.server.processes.client_process``)."""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

from tdserve.base.logs import read_log_format, start_logging
from tdserve.base.machine import die_with_parent


def begin_client_process(process: str, *, niceness: int) -> dict[str, Any] | None:
    """Reads the settings from standard input and starts logging.

    The process ends with the thread that started it, and Ctrl-C at the server's terminal is left to the server.

    Args:
        process: Name of this process in each line of the log.
        niceness: Niceness of this process: whatever serves requests goes first.

    Returns:
        The settings; None if the server is gone already.
    """
    die_with_parent()
    os.nice(niceness)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    line = _read_line(sys.stdin.fileno())
    if not line:
        return None
    settings: dict[str, Any] = json.loads(line)
    start_logging(settings["log_level"], process=process, form=read_log_format())
    return settings


def _read_line(fd: int) -> bytes:
    """Returns the first line; nothing of what follows is taken."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(fd, 1)
        if not byte:
            return b""
        line += byte
    return line
