"""Local writers that have disconnected and may still write; finds out when they are proved gone.

``server/README.md`` has a reading order of recovery.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tdserve.base.errors import TDServeError
from tdserve.store.exchange import session_locks

FIRST_LOOK_S = 0.001
MAX_LOOK_S = 0.25
"""Longest pause between looks. A killed process releases its files just after its connection ends, a stopped one
never."""

_log = logging.getLogger("tdserve.server")


class ProcessWatch:
    """A watch on the locks of sessions that have ended.

    Args:
        folder: Folder of the lock files.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._waiting: dict[str, list[Callable[[], None]]] = {}
        self._task: asyncio.Task[None] | None = None

    def is_gone(self, name: str) -> bool:
        """Returns whether the process that held this lock can write no more; if so, removes the file."""
        try:
            if session_locks.is_held(self._folder, name):
                return False
        except TDServeError:  # no file can be opened now: nothing is proved
            return False
        session_locks.remove(self._folder, name)
        return True

    def watch(self, name: str, on_gone: Callable[[], None]) -> None:
        """Calls ``on_gone`` once, on the event loop, when the holder of a lock is proved gone."""
        self._waiting.setdefault(name, []).append(on_gone)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._look(), name="tdserve-process-watch")

    def remove_unused(self) -> None:
        """Removes the files of locks that are neither held nor watched; call it while no session is open."""
        with suppress(FileNotFoundError):  # the root was removed while its server ran
            for name in os.listdir(self._folder):
                if name not in self._waiting:
                    self.is_gone(name)

    def close(self) -> None:
        """Stops the watch; locks that are still held stay for the next run of the server."""
        if self._task is not None:
            self._task.cancel()
        for name in self._waiting:
            self.is_gone(name)

    async def _look(self) -> None:
        pause_s = FIRST_LOOK_S
        while self._waiting:
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_LOOK_S)
            for name in list(self._waiting):
                if self.is_gone(name):
                    for on_gone in self._waiting.pop(name):
                        _call_logged(on_gone)


def _call_logged(on_gone: Callable[[], None]) -> None:
    try:
        on_gone()
    except Exception:  # noqa: BLE001 (the outermost frame of a callback: the others must run too)
        _log.exception("rows of a local writer that is gone could not be freed")
