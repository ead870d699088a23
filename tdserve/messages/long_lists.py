"""Lists in requests that may have millions of rows: too long for a message that control parses and forwards."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tdserve.v1 import content_pb2, control_pb2

LongList = content_pb2.IntArray | control_pb2.Rows


def lists_in(message: control_pb2.ClientMessage) -> Sequence[LongList]:
    """Returns the lists of a request that may be long: of its selection, or of rows to be deleted."""
    kind = message.WhichOneof("body")
    if kind == "read" or kind == "write":
        selection = message.read.selection if kind == "read" else message.write.selection
        return [item.positions for item in selection.items if item.HasField("positions")]
    return [message.change.delete] if kind == "change" and message.change.HasField("delete") else []


def read_list(rows: control_pb2.Rows) -> bytes:
    """Returns encoded row numbers, from their file if they are in one. This reads the file: call it in a thread."""
    if not rows.file:
        return rows.data
    with Path(rows.file).open("rb") as file:
        file.seek(rows.offset)
        return file.read(rows.nbytes_ahead)
