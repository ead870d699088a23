"""tdserve/client/session/calls/observed_calls.py: calls are counted, and reported from time to time."""

from __future__ import annotations

import time

import pytest

from tdserve.client.session.calls import observed_calls
from tdserve.client.session.calls.observed_calls import MAX_DEGRADED, ObservedCalls


def test_report_when_calls_were_counted_then_has_them_once() -> None:
    calls = ObservedCalls()
    assert calls.take_report() is None
    begun_s = time.perf_counter()
    for code in ("", "", "NOT_FOUND"):
        calls.count("sample", begun_s, code)
    calls.count("extend", begun_s)
    report = calls.take_report()
    assert report is not None
    assert {each.call: sum(each.buckets) for each in report.calls} == {"sample": 3, "extend": 1}
    assert [(error.code, error.num_calls) for error in report.calls[0].errors] == [("NOT_FOUND", 1)]
    assert 0 < report.calls[0].sum_s < 60
    assert calls.take_report() is None


def test_report_when_it_is_time_then_due(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = ObservedCalls()
    assert not calls.count("sample", time.perf_counter())
    monkeypatch.setattr(observed_calls, "REPORT_S", -1.0)
    calls.take_report()
    assert calls.count("sample", time.perf_counter())


def test_report_when_a_store_is_degraded_then_due_at_once_and_again_when_it_is_whole() -> None:
    calls = ObservedCalls()
    calls.note_degraded("table", is_degraded=False)
    assert calls.take_report() is None
    calls.note_degraded("table", is_degraded=True)
    assert calls.count("sample", time.perf_counter())
    report = calls.take_report()
    assert report is not None
    assert list(report.degraded) == ["table"]
    calls.note_degraded("table", is_degraded=False)
    report = calls.take_report()
    assert report is not None
    assert not report.degraded
    for number in range(2 * MAX_DEGRADED):
        calls.note_degraded(str(number), is_degraded=True)
    report = calls.take_report()
    assert report is not None
    assert len(report.degraded) == MAX_DEGRADED


def test_report_when_content_has_moved_then_its_bytes_since_the_last_one() -> None:
    calls = ObservedCalls()
    calls.count_content(bytes_in=5)
    calls.count_content(bytes_in=1, bytes_out=7)
    report = calls.take_report()
    assert report is not None
    assert (report.bytes_in, report.bytes_out, len(report.calls)) == (6, 7, 0)
    assert calls.take_report() is None
