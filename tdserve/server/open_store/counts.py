"""The counts of a table that are sent with each answer: its rows, and all that were ever inserted."""

from __future__ import annotations

from tdserve.messages.row_sets import RowSet
from tdserve.rules.replay.plans import Departure
from tdserve.rules.replay.table import Table
from tdserve.server.open_store.opened_store import OpenedStore
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
    num_live = num_rows - len(lost)
    return control_pb2.TableCounts(
        rows=num_live,
        inserts=table.totals.inserts + num_coming,
        overwritten=_count_overwritten(table, num_live, num_coming),
    )


def _count_overwritten(table: Table, num_live: int, num_coming: int) -> int:
    """Returns how many of the reserved rows were live before. After a deletion rows that were deleted are among them
    while they are written again."""
    counts = table.counts
    num_ever_live = min(counts.inserts + num_coming, counts.capacity)
    return max(0, min(counts.reserved - num_coming, num_ever_live - num_live))
