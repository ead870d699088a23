"""Figures that arrive as a message, as plain values: a new field of the message is shown without another line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from google.protobuf.message import Message

from tdserve.v1 import control_pb2


def to_facts(message: Message) -> dict[str, Any]:
    """Returns a protobuf message as a dict, including fields that are 0 or empty."""
    facts: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        is_many = isinstance(value, Sequence) and not isinstance(value, (str, bytes))
        plain = [to_facts(item) if isinstance(item, Message) else item for item in (value if is_many else [value])]
        facts[field.name] = plain if is_many else plain[0]
    return facts


def convert_stats(stats: control_pb2.GetStatsResponse) -> dict[str, Any]:
    """Returns the figures of a server, with the counts of ``transports`` by the name of the transport. A worker
    that has not started has None as its process id."""
    facts = to_facts(stats)
    workers = [{**worker, "pid": worker["pid"] or None} for worker in facts["workers"]]
    return {**facts, "workers": workers, "transports": {each.pop("transport"): each for each in facts["transports"]}}
