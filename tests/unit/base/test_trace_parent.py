from __future__ import annotations

import pytest

from tdserve.base.trace_parent import TraceParent, parse_traceparent

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def test_traceparent_when_written_and_parsed_then_is_equal() -> None:
    parent = parse_traceparent(f"00-{TRACE}-{SPAN}-01")
    assert parent == TraceParent(int(TRACE, 16), int(SPAN, 16))
    assert str(parent) == f"00-{TRACE}-{SPAN}-01"


def test_child_when_made_then_is_another_span_of_the_trace() -> None:
    parent = TraceParent(1, 2)
    child = parent.make_child()
    assert child.trace_id == 1
    assert child.span_id not in (0, 2)
    assert parse_traceparent(str(child)) == child


def test_traceparent_when_of_a_later_version_then_what_follows_is_ignored() -> None:
    assert parse_traceparent(f"01-{TRACE}-{SPAN}-03-what-follows") == TraceParent(int(TRACE, 16), int(SPAN, 16))


@pytest.mark.parametrize(
    "text",
    [
        "",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE}-{SPAN}-00",
        f"00-{TRACE}-{SPAN}-02",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01\n",
        "x" * 100_000,
    ],
)
def test_traceparent_when_invalid_or_not_recorded_then_none(text: str) -> None:
    assert parse_traceparent(text) is None
