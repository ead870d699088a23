"""Threads of this process, found by their names."""

from __future__ import annotations

import threading


def find_threads(beginning: str) -> list[threading.Thread]:
    """Returns the live threads whose names begin like this."""
    return [thread for thread in threading.enumerate() if thread.name.startswith(beginning)]
