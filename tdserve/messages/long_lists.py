"""Lists in requests that may be of millions of rows: too long for a message that control reads and hands on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tdserve.v1 import content_pb2, control_pb2

LongList = content_pb2.IntArray | control_pb2.Rows


def lists_in(message: control_pb2.ClientMessage) -> Sequence[LongList]:
    """The lists of a request that may be long: of its selection, or of rows to be deleted."""
    kind = message.WhichOneof("body")
    if kind == "read" or kind == "write":
        selection = message.read.selection if kind == "read" else message.write.selection
        return [item.positions for item in selection.items if item.HasField("positions")]
    return [message.change.delete] if kind == "change" and message.change.HasField("delete") else []


def read_list(rows: control_pb2.Rows) -> bytes:
    """The row numbers as they were encoded, from the file where they lie in one. Reads it: to be called in a thread."""
    if not rows.file:
        return rows.data
    with Path(rows.file).open("rb") as file:
        file.seek(rows.offset)
        return file.read(rows.nbytes_ahead)
