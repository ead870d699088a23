"""How many rows a table has, and how many came: told with each answer of it."""

from __future__ import annotations

from tdserve.server.opened_store import OpenedStore
from tdserve.v1 import control_pb2


def num_lost(entry: OpenedStore) -> int:
    """Rows that somebody has left half written: until it is proved that nobody writes to them they are nobody's."""
    return len(entry.replay_table().ring.held_among(entry.lost.row_set)) if entry.lost else 0


def counts_of(entry: OpenedStore, *, num_coming: int = 0) -> control_pb2.TableCounts:
    """Of a table as it is now, or will be when so many rows that were reserved are committed."""
    table = entry.replay_table()
    num_rows = len(table) - num_lost(entry) + num_coming
    return control_pb2.TableCounts(rows=num_rows, inserts=table.inserts + num_coming)
