"""What a client observes of its own calls, and reports to the server from time to time, while it makes some."""

from __future__ import annotations

import time
from threading import Lock

from tdserve.base.call_times import CallTimes
from tdserve.v1 import control_pb2

REPORT_S = 5.0
"""Time between two reports. One costs the server as much as a request; a client that makes no calls sends none."""

FIRST_REPORT_S = 1.0
"""Time from a client's first call to its first report: many clients live for seconds."""

MAX_DEGRADED = 100
"""Most stores that are reported as degraded."""


class ObservedCalls:
    """The calls of one client since its last report. Threads: safe."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._times = CallTimes()
        self._bytes_in = self._bytes_out = 0
        self._degraded: set[str] = set()
        self._has_changed = False
        self._due_s = time.perf_counter() + FIRST_REPORT_S

    def count(self, call: str, begun_s: float, code: str = "") -> bool:
        """Counts a call that ends now; returns whether a report is due.

        Args:
            call: Its name.
            begun_s: When it began, by ``time.perf_counter``.
            code: As in ``CallTimes.count``.
        """
        now_s = time.perf_counter()
        with self._lock:
            self._times.count(call, now_s - begun_s, code)
        return now_s >= self._due_s

    def count_content(self, *, bytes_in: int = 0, bytes_out: int = 0) -> None:
        """Counts content to the server, and from it, whichever way it goes."""
        with self._lock:
            self._bytes_in += bytes_in
            self._bytes_out += bytes_out

    def note_degraded(self, store: str, is_degraded: bool) -> None:
        """Notes whether parts of a cluster's store are out of reach."""
        with self._lock:
            if is_degraded != (store in self._degraded):
                (self._degraded.add if is_degraded else self._degraded.discard)(store)
                self._has_changed = True
                self._due_s = 0.0  # that must not wait

    def take_report(self) -> control_pb2.ClientReport | None:
        """Returns what was observed since the last report; None if nothing was."""
        with self._lock:
            times, self._times = self._times, CallTimes()
            has_changed, self._has_changed = self._has_changed, False
            bytes_in, bytes_out, self._bytes_in, self._bytes_out = self._bytes_in, self._bytes_out, 0, 0
            self._due_s = time.perf_counter() + REPORT_S
            degraded = sorted(self._degraded)[:MAX_DEGRADED]
        if not (times or has_changed or bytes_in or bytes_out):
            return None
        report = control_pb2.ClientReport(degraded=degraded, bytes_in=bytes_in, bytes_out=bytes_out)
        for tally in times:
            calls = report.calls.add(call=tally.call, buckets=tally.buckets, sum_s=tally.sum_s)
            calls.errors.extend(control_pb2.ErrorCount(code=code, num_calls=num) for code, num in tally.errors.items())
        return report
