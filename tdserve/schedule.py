"""``python -m tdserve.schedule``: writes checkpoints of a server on schedule, as an ordinary client of it.

The control process starts it and sends its settings on standard input, whose end ends it. A checkpoint that fails is
tried again at the next time, and costs the server nothing.

``server/README.md`` has a reading order of checkpoints.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from threading import Thread
from typing import Any

import tdserve
from tdserve.base.client_setup import begin_client_process
from tdserve.base.deadline import Deadline
from tdserve.base.errors import TDServeError
from tdserve.client.moves.manifest import Checkpoint
from tdserve.client.moves.server_checkpoints import find_newest_of, report_checkpoint

NICENESS = 10
"""Niceness of the process: whatever serves requests goes first."""

_log = logging.getLogger("tdserve.checkpoints")


class CheckpointSchedule:
    """Writes checkpoints of a server to a place, one each interval; one that takes longer delays the next.

    Args:
        address: Address of the server.
        token: Its token.
        every_s: Time from the begin of one to that of the next.
        place: Folder, or URL of fsspec.
        keep: How many of them stay there.
    """

    def __init__(self, *, address: str, token: str | None, every_s: float, place: str, keep: int) -> None:
        self._address = address
        self._token = token
        self._every_s = every_s
        self._place = place
        self._keep = keep

    def run(self, *, is_restarted: bool) -> None:
        """Writes them until the process ends.

        Args:
            is_restarted: Whether this process takes the place of one that has died: the next time is an interval away.
        """
        newest = self._attempt(self._report_newest)
        rest_s = self._every_s if is_restarted else 0.0
        if newest is not None:
            rest_s = max(rest_s, newest.created_s + self._every_s - time.time())
        while True:
            time.sleep(min(rest_s, self._every_s))
            begun_s = time.monotonic()
            self._attempt(self._write)
            rest_s = max(begun_s + self._every_s - time.monotonic(), 0.0)

    def _attempt(self, step: Any) -> Checkpoint | None:
        try:
            with tdserve.connect(self._address, token=self._token, transport="grpc") as client:
                found: Checkpoint | None = step(client)
                return found
        except TDServeError as error:
            _log.warning("no checkpoint at %s, tried again in %g s: %s", self._place, self._every_s, error)
        except Exception as fault:  # noqa: BLE001 (file systems of fsspec raise what they like)
            name = type(fault).__name__
            _log.warning("no checkpoint at %s, tried again in %g s: %s: %s", self._place, self._every_s, name, fault)
        return None

    def _report_newest(self, client: tdserve.Client) -> Checkpoint | None:
        newest = find_newest_of(self._place, client.stats()["server_id"])
        if newest is not None:
            report_checkpoint(client, newest, deadline=Deadline.after(client.timeout_s))
        return newest

    def _write(self, client: tdserve.Client) -> Checkpoint | None:
        if not client.stores():  # what the place has of an earlier root stays the newest
            _log.info("no checkpoint: there are no stores")
            return None
        begun_s = time.monotonic()
        made = client.checkpoint(self._place, keep=self._keep)
        _log.info(
            "checkpoint %s: %d stores, %d bytes, %d of them new, %.1f s, paused %.0f ms%s",
            made.id,
            len(made.stores),
            made.nbytes,
            made.written_nbytes,
            time.monotonic() - begun_s,
            made.paused_s * 1e3,
            f", left out: {', '.join(made.left_out)}" if made.left_out else "",
        )
        return made


def main() -> int:
    """Runs the process."""
    settings = begin_client_process("tdserve checkpoints", niceness=NICENESS)
    if settings is None:
        return 0
    logging.getLogger("tdserve.client").setLevel(logging.ERROR)  # it repeats what the control process logs
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    Thread(target=_end_with_input, daemon=True, name="tdserve-input").start()
    names = ("address", "token", "every_s", "place", "keep")
    schedule = CheckpointSchedule(**{name: settings[name] for name in names})
    schedule.run(is_restarted=settings["num_restarts"] > 0)
    return 0


def _end_with_input() -> None:
    while os.read(sys.stdin.fileno(), 1 << 12):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
