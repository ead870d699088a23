"""What the processes of a server log, and in which form: one line each on standard error, with time and level."""

from __future__ import annotations

import logging
import time

LEVELS = ("debug", "info", "warning", "error")
"""Names of levels, the most talkative first."""


def start_logging(level: str, *, process: str) -> None:
    """Logs to standard error from ``level`` on; called once, by the main function of a process.

    Args:
        level: One of ``LEVELS``.
        process: Name of this process in each line, such as ``"tdserve worker 0"``.
    """
    logging.basicConfig(level=level.upper(), format=f"%(asctime)s %(levelname)s {process}: %(message)s")


class SparseLog:
    """Logs what strangers can make happen often: one line in a while, which says how many were left out.

    Threads: one.

    Args:
        logger: Where to.
        interval_s: Between two lines.
    """

    def __init__(self, logger: logging.Logger, *, interval_s: float = 10.0) -> None:
        self._logger = logger
        self._interval_s = interval_s
        self._next_s = 0.0
        self._num_left_out = 0

    def warn(self, message: str) -> None:
        """Logs a warning, or counts it."""
        now_s = time.monotonic()
        if now_s < self._next_s:
            self._num_left_out += 1
            return
        more = f" ({self._num_left_out} more like it before)" if self._num_left_out else ""
        self._logger.warning("%s%s", message, more)
        self._next_s, self._num_left_out = now_s + self._interval_s, 0
