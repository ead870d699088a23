"""tdserve/server/sessions/client_reports.py: clients may report anything; only reports that can be true count."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tdserve.base.call_times import NUM_BUCKETS
from tdserve.server.sessions.client_reports import MAX_BYTES, MAX_COUNT, MAX_DEGRADED, UNKNOWN_CODE, ClientReports
from tdserve.v1 import control_pb2


class Reporter:
    """A session as a report sees it."""

    degraded: tuple[str, ...] = ()
    bytes_in = bytes_out = 0
    reported_s = 0.0


def make_report(call: str = "sample", num_buckets: int = NUM_BUCKETS, count: int = 1, sum_s: float = 0.5) -> Any:
    """Returns a report of calls that were all as quick as can be."""
    report = control_pb2.ClientReport()
    report.calls.add(call=call, buckets=[count, *[0] * (num_buckets - 1)] if num_buckets else [], sum_s=sum_s)
    return report


def test_reports_when_several_come_then_added_up() -> None:
    reports, session = ClientReports(), Reporter()
    report = make_report(count=3)
    report.calls[0].errors.add(code="NOT_FOUND", num_calls=1)
    report.calls[0].errors.add(code="<script>", num_calls=1)
    reports.add(session, report)
    reports.add(session, make_report(count=2))
    (tally,) = reports.call_times
    assert (tally.call, tally.buckets[0], tally.sum_s) == ("sample", 5, 1.0)
    assert tally.errors == {"NOT_FOUND": 1, UNKNOWN_CODE: 1}


def test_reports_when_content_was_moved_then_added_up_by_session_up_to_a_limit() -> None:
    reports, session, other = ClientReports(), Reporter(), Reporter()
    reports.add(session, control_pb2.ClientReport(bytes_in=5, bytes_out=7))
    reports.add(session, control_pb2.ClientReport(bytes_in=5))
    assert (session.bytes_in, session.bytes_out, other.bytes_in) == (10, 7, 0)
    assert session.reported_s > 0
    reports.add(other, control_pb2.ClientReport(bytes_out=2**64 - 1))
    assert other.bytes_out == MAX_BYTES


@pytest.mark.parametrize(
    "report",
    [
        make_report(call="<script>"),
        make_report(call=""),
        make_report(call="x" * 1_000_000),
        make_report(num_buckets=NUM_BUCKETS + 1),
        make_report(num_buckets=0),
        make_report(count=MAX_COUNT + 1),
        make_report(count=2**64 - 1),
        make_report(sum_s=-1.0),
        make_report(sum_s=math.inf),
        make_report(sum_s=math.nan),
    ],
)
def test_report_when_it_cannot_be_true_then_ignored(report: Any) -> None:
    reports = ClientReports()
    reports.add(Reporter(), report)
    assert not list(reports.call_times)


def test_report_when_it_has_more_errors_than_calls_then_ignored() -> None:
    reports, report = ClientReports(), make_report()
    report.calls[0].errors.add(code="ABORTED", num_calls=2**64 - 1)
    reports.add(Reporter(), report)
    assert not list(reports.call_times)


def test_degraded_when_reported_then_names_of_stores_and_not_too_many() -> None:
    reports, session = ClientReports(), Reporter()
    names = ["a", "../b", "x" * 1_000, "c\n", *(f"s{number}" for number in range(1_000))]
    reports.add(session, control_pb2.ClientReport(degraded=names))
    assert session.degraded == ("a", *(f"s{number}" for number in range(MAX_DEGRADED - 4)))
    reports.add(session, control_pb2.ClientReport())
    assert session.degraded == ()
