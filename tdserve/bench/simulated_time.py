"""A clock that does not wait: processes that run at the same simulated time, in one thread."""

from __future__ import annotations

from collections.abc import Generator
from heapq import heappop, heappush

Process = Generator[float, None, None]
"""A process yields the seconds that it waits; ``yield from`` runs a part of it."""


class SimulatedTime:
    """Runs processes in the order of time, those of the same moment in the order in which they began to wait.

    Attributes:
        now_s: Simulated seconds since the beginning.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self._waiting: list[tuple[float, int, Process]] = []
        self._num_waits = 0

    def start(self, process: Process, *, after_s: float = 0.0) -> None:
        """Adds a process."""
        self._num_waits += 1
        heappush(self._waiting, (self.now_s + after_s, self._num_waits, process))

    def run(self, until_s: float) -> None:
        """Runs all processes until a moment; those that wait longer stay where they are."""
        while self._waiting and self._waiting[0][0] <= until_s:
            self.now_s, _, process = heappop(self._waiting)
            wait_s = next(process, None)
            if wait_s is not None:
                self.start(process, after_s=wait_s)
        self.now_s = until_s


class Station:
    """Something that serves one request at a time, first come, first served: a process, or a wire.

    Attributes:
        busy_s: Seconds that it has worked, and will for those who wait.
    """

    def __init__(self) -> None:
        self.busy_s = 0.0
        self._free_s = 0.0

    def serve(self, arrival_s: float, service_s: float) -> float:
        """Takes a request; returns when it will be done."""
        self.busy_s += service_s
        self._free_s = max(self._free_s, arrival_s) + service_s
        return self._free_s
