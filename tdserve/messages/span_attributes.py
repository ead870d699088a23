"""What the spans of a request tell about it, at its client and in the control process."""

from __future__ import annotations

from typing import Any

from tdserve.base.ids import MAX_NAME_BYTES
from tdserve.v1 import control_pb2

SPAN_PREFIX = "tdserve."
"""Begins the names of spans and of their attributes; the kind of a request follows, or of a worker's order."""

ERROR_TYPE = "error.type"
"""Attribute with the code of an error, named by the semantic conventions of OpenTelemetry."""

BYTES = "tdserve.bytes"
"""Attribute with the size of the content."""


def name_request(message: control_pb2.ClientMessage, kind: str) -> str:
    """Returns the name of the spans of a request; a question about stores is named like its own call."""
    asked = message.catalog.WhichOneof("body") if kind == "catalog" else None
    return SPAN_PREFIX + (asked or kind)


def name_rows(store: str, num_rows: int, *, transport: str) -> dict[str, Any]:
    """Returns the attributes of a span that concerns rows of a store."""
    return {"tdserve.store": store, "tdserve.rows": num_rows, "tdserve.transport": transport}


def describe_request(
    message: control_pb2.ClientMessage, kind: str, *, transport: str, request_id: str
) -> dict[str, Any]:
    """Returns the attributes of a request's span; it may be one of a stranger, whose names are of any length.

    Args:
        kind: Its field of the message.
        transport: Transport of its session.
        request_id: As in the log.
    """
    attributes: dict[str, Any] = {"tdserve.transport": transport, "tdserve.request_id": request_id}
    asked = getattr(message, kind, None)
    if kind == "catalog":
        asked = getattr(asked, message.catalog.WhichOneof("body") or "", None)
    if store := getattr(asked, "store", "") or getattr(asked, "name", ""):
        attributes["tdserve.store"] = store[:MAX_NAME_BYTES]
    if num_rows := getattr(asked, "num_rows", 0) * max(getattr(asked, "num_batches", 1), 1):
        attributes["tdserve.rows"] = num_rows
    content = getattr(asked, "content", None)
    if nbytes := content.nbytes if content is not None else sum(getattr(asked, "message_nbytes", ())):
        attributes[BYTES] = nbytes
    return attributes
