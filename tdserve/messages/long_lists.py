"""Lists in requests that may have millions of rows: too long for a message that control parses and forwards."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tdserve.v1 import content_pb2, control_pb2

LongList = content_pb2.IntArray | control_pb2.Rows | control_pb2.RowColumn


def find_lists(message: control_pb2.ClientMessage) -> Sequence[LongList]:
    """Returns the lists of a request that may be long: of its selection, of rows to be deleted and their generations,
    or one entry per new row."""
    kind = message.WhichOneof("body")
    if kind == "read" or kind == "write":
        selection = message.read.selection if kind == "read" else message.write.selection
        return [item.positions for item in selection.items if item.HasField("positions")]
    if kind == "extend":
        return find_columns(message.extend)
    if kind != "change" or not message.change.HasField("delete"):
        return []
    has_generations = message.change.HasField("delete_generations")
    return [message.change.delete, *([message.change.delete_generations] if has_generations else [])]


def find_columns(extend: control_pb2.ExtendRequest) -> Sequence[control_pb2.RowColumn]:
    """Returns the columns that an extend has beside the content of its rows."""
    names = ("priorities", "ends", "policy_versions")
    return [getattr(extend, name) for name in names if extend.HasField(name)]


def read_list(asked: control_pb2.Rows | control_pb2.RowColumn) -> bytes:
    """Returns what a list has, from its file if it is in one. This reads the file: call it in a thread."""
    if not asked.file:
        return asked.data
    with Path(asked.file).open("rb") as file:
        file.seek(asked.offset)
        return file.read(asked.nbytes_ahead)
