"""How long a data worker took for orders, and for requests that it has answered by itself."""

from __future__ import annotations

import time
from threading import Lock

from tdserve.base.call_times import CallTimes
from tdserve.v1 import control_pb2


class ObservedWork:
    """The work of one data worker since control has asked for it last. Threads: safe."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._times = CallTimes()

    def count(self, call: str, begun_s: float, code: str = "") -> None:
        """Records one call that has just ended.

        Args:
            call: Kind of the order, or of the request that the worker has answered by itself.
            begun_s: When it began, by ``time.perf_counter``.
            code: As in ``CallTimes.count``.
        """
        seconds = time.perf_counter() - begun_s
        with self._lock:
            self._times.count(call, seconds, code)

    def take_figures(self) -> list[control_pb2.CallFigures]:
        """Returns the figures since the last call of this method."""
        with self._lock:
            times, self._times = self._times, CallTimes()
        return [
            control_pb2.CallFigures(
                call=tally.call,
                buckets=tally.buckets,
                sum_s=tally.sum_s,
                errors=(control_pb2.ErrorCount(code=code, num_calls=num) for code, num in tally.errors.items()),
            )
            for tally in times
        ]
