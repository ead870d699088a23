"""The names of calls, by which they are counted: the kinds of requests."""

from __future__ import annotations

from tdserve.v1 import control_pb2

CALL_NAMES = frozenset(field.name for field in control_pb2.ClientMessage.DESCRIPTOR.oneofs_by_name["body"].fields)
"""All of them, with those of the connection and notices, which are not counted."""

COUNTED_CALLS = CALL_NAMES - {
    "cancel",
    "catalog",
    "channel_lost",
    "claimed",
    "client_report",
    "group_notice",
    "hello",
    "part",
    "relay_report",
    "rendezvous",
    "written",
}
"""Those that users make."""

READ = "read"
"""A read of rows; also what a local client reads of a sample in shared memory, where it finds damage."""
