"""The counts of a table that are sent with each answer: its rows, and all that were ever inserted."""

from __future__ import annotations

from tdserve.server.opened_store import OpenedStore
from tdserve.v1 import control_pb2


def num_lost(store: OpenedStore) -> int:
    """Returns the number of half-written rows. They can be neither drawn nor written until no process writes to
    them."""
    return len(store.get_table().ring.select_held(store.lost.row_set)) if store.lost else 0


def make_counts(store: OpenedStore, *, num_coming: int = 0) -> control_pb2.TableCounts:
    """Returns the counts of a table now, or once ``num_coming`` more reserved rows are committed."""
    table = store.get_table()
    num_rows = len(table) - num_lost(store) + num_coming
    return control_pb2.TableCounts(rows=num_rows, inserts=table.inserts + num_coming)
