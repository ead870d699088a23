from __future__ import annotations

import numpy as np
import pytest

from tdserve.messages.row_sets import RowSet
from tdserve.rules.replay.plans import Departure
from tdserve.server.recovery.departure_records import complete_departure, forget_departure, save_departure
from tests.unit.rules.replay.tables import numbers, planned, small_table, write
from tests.unit.server.world import World

ROW_SETS = [RowSet.run(1, 3), RowSet.from_rows(numbers(0, 1, 3)), RowSet.from_mask(np.arange(70_000) % 2 == 0)]


@pytest.mark.parametrize("rows", ROW_SETS, ids=["run", "listed", "bits"])
def test_complete_when_rows_are_there_then_they_leave_and_later_ones_stay(world: World, rows: RowSet) -> None:
    table = small_table(80_000)
    write(table, 4)
    departure = Departure(rows & RowSet.run(0, 4), 2, newest=table.order.last_sequence)
    with world.db.begin_transaction() as txn:
        save_departure("uid", departure, txn)
    complete_departure(world.db, "another", table)
    assert len(table) == 4
    complete_departure(world.db, "uid", table)
    num_left = 4 - len(departure.rows)
    assert len(table) == num_left
    write(table, 4)
    with world.db.begin_transaction() as txn:
        save_departure("uid", departure, txn)
    complete_departure(world.db, "uid", table)
    assert len(table) == num_left + 4


def test_complete_when_forgotten_then_nothing_leaves(world: World) -> None:
    table = small_table()
    write(table, 4)
    with world.db.begin_transaction() as txn:
        save_departure("uid", table.departures.plan_departure(RowSet.run(0, 2)), txn)
    forget_departure(world.db, "uid")
    complete_departure(world.db, "uid", table)
    assert len(table) == 4
    assert sorted(planned(table, 4, owner=1).rows.tolist()) == [0, 1, 2, 3]
