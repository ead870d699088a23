"""The counts of a table that are sent with each answer: its rows, and all that were ever inserted."""

from __future__ import annotations

from tdserve.messages.row_sets import RowSet
from tdserve.rules.replay.plans import Departure
from tdserve.server.opened_store import OpenedStore
from tdserve.v1 import control_pb2


def find_lost(store: OpenedStore) -> RowSet:
    """Returns the half-written rows. They can be neither drawn nor written until no process writes to them."""
    return store.get_table().ring.select_held(store.lost.row_set) if store.lost else RowSet.run(0, 0)


def make_counts(
    store: OpenedStore, *, num_coming: int = 0, departure: Departure | None = None
) -> control_pb2.TableCounts:
    """Returns the counts of a table now, or once ``num_coming`` more reserved rows are committed, or others have
    left."""
    table, lost = store.get_table(), find_lost(store)
    num_rows = len(table) + num_coming
    if departure is not None:
        num_rows -= departure.num_leaving
        if departure.is_final:
            lost -= departure.rows
    return control_pb2.TableCounts(rows=num_rows - len(lost), inserts=table.inserts + num_coming)
