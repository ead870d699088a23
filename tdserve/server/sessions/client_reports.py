"""What clients report of their own calls: added up over all of them, as far as it can be true."""

from __future__ import annotations

import time
from typing import Protocol

from tdserve.base.call_times import NUM_BUCKETS, CallTimes
from tdserve.base.errors import InvalidRequestError, list_error_classes
from tdserve.base.ids import check_store_name
from tdserve.messages.call_names import CALL_NAMES
from tdserve.v1 import control_pb2

MAX_CALLS = 64
"""Most kinds of calls in one report; there are about thirty."""

MAX_COUNT = 10**9
"""Most calls of a kind between two reports of one client: seconds apart, none makes that many."""

MAX_SUM_S = 1e9

MAX_BYTES = 1 << 42
"""Most bytes between two reports of one client."""

MAX_DEGRADED = 100

UNKNOWN_CODE = "UNKNOWN"
"""Stands for codes that no error of tdserve has."""


class ReportingSession(Protocol):
    """What is used of a session; see the attributes of ``ClientSession``."""

    degraded: tuple[str, ...]
    bytes_in: int
    bytes_out: int
    reported_s: float


class ClientReports:
    """The reports of all clients, in memory.

    Attributes:
        call_times: The calls, by kind.
    """

    def __init__(self) -> None:
        self.call_times = CallTimes()
        self._codes = {cls.code for cls in list_error_classes().values()}

    def add(self, session: ReportingSession, report: control_pb2.ClientReport) -> None:
        """Adds a report; leaves out what cannot be true."""
        session.bytes_in += min(report.bytes_in, MAX_BYTES)
        session.bytes_out += min(report.bytes_out, MAX_BYTES)
        session.reported_s = time.monotonic()
        session.degraded = tuple(name for name in report.degraded[:MAX_DEGRADED] if _is_store_name(name))
        for calls in report.calls[:MAX_CALLS]:
            buckets = list(calls.buckets)
            is_true = len(buckets) == NUM_BUCKETS and sum(buckets) <= MAX_COUNT and 0 <= calls.sum_s <= MAX_SUM_S
            if not is_true or calls.call not in CALL_NAMES:
                continue
            errors: dict[str, int] = {}
            for error in calls.errors[:MAX_CALLS]:
                code = error.code if error.code in self._codes else UNKNOWN_CODE
                errors[code] = errors.get(code, 0) + min(error.num_calls, MAX_COUNT)
            if sum(errors.values()) <= sum(buckets):
                self.call_times.add(calls.call, buckets, calls.sum_s, errors)


def _is_store_name(name: str) -> bool:
    try:
        check_store_name(name)
    except InvalidRequestError:
        return False
    return True
