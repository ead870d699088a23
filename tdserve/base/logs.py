"""The log of a server's processes: one line per entry on standard error, with time and level."""

from __future__ import annotations

import logging
import time

LEVELS = ("debug", "info", "warning", "error")
"""Names of levels, from the most to the least detailed."""


def start_logging(level: str, *, process: str) -> None:
    """Starts logging to standard error; called once, by the main function of a process.

    Args:
        level: The lowest level that is logged, one of ``LEVELS``.
        process: Name of this process in each line, such as ``"tdserve worker 0"``.
    """
    logging.basicConfig(level=level.upper(), format=f"%(asctime)s %(levelname)s {process}: %(message)s")


class SparseLog:
    """Logs warnings that strangers can cause often: at most one line per interval, with the number of lines left out.

    Threads: one.

    Args:
        logger: The logger.
        interval_s: Seconds between two lines.
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
