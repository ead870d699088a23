"""The parent of a span, as W3C Trace Context writes it."""

from __future__ import annotations

import re
import secrets
from typing import NamedTuple

_TRACEPARENT = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?P<trace>[0-9a-f]{32})-(?P<span>[0-9a-f]{16})-(?P<flags>[0-9a-f]{2})(-.*)?"
)

MAX_TRACESTATE_BYTES = 512
"""Longest state of a trace that is passed on, as the recommendation demands at least."""


class TraceParent(NamedTuple):
    """A span of a trace that is recorded.

    Attributes:
        trace_id: Id of the trace, 128 bits; not 0.
        span_id: Id of the span, 64 bits; not 0.
    """

    trace_id: int
    span_id: int

    def __str__(self) -> str:
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-01"

    def make_child(self) -> TraceParent:
        """Returns another span of the same trace."""
        return TraceParent(self.trace_id, secrets.randbits(64) or 1)


def parse_traceparent(text: str) -> TraceParent | None:
    """Parses a ``traceparent``; None if it is invalid, as the recommendation demands, or its trace is not recorded."""
    found = _TRACEPARENT.fullmatch(text)
    if found is None or not int(found["flags"], 16) & 1:
        return None
    parent = TraceParent(int(found["trace"], 16), int(found["span"], 16))
    return parent if all(parent) else None
