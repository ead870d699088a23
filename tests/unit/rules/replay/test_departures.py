"""Rows that are deleted as exactly those that were seen, and those that a sample has spent meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tdserve.base.errors import SelectionError
from tdserve.messages.row_sets import RowSet
from tdserve.rules.replay.draws.kept_draw import DrawTerms
from tdserve.rules.replay.eligibility.conditions import PLAIN
from tdserve.rules.replay.rank_draws import RankDraw
from tdserve.rules.replay.table import Table
from tdserve.rules.replay.table_state import TableState
from tests.unit.rules.replay.tables import clear, delete, numbers, planned, rng, small_table, table_of, write


def get_halves(table: Table, rows: Any) -> Any:
    """Returns the lower halves of the generations of rows."""
    return table.state.get_row_ids(rows).astype(np.uint32)


def find_same(table: Table, rows: Any, generations: Any) -> list[int]:
    """Returns the rows that are still the same, of all parts together."""
    found: list[int] = np.concatenate(list(table.departures.find_same_in_parts(rows, generations))).tolist()
    return found


def test_find_same_when_rows_left_or_were_overwritten_then_only_the_others() -> None:
    table, rows = small_table(), numbers(5, 2, 1, 0, 2)
    write(table, 8)
    seen = get_halves(table, rows)
    assert find_same(table, rows, seen) == [5, 2, 1, 0, 2]
    delete(table, numbers(5))
    write(table, 3)  # in the place of row 5, then of 0 and 1
    assert find_same(table, rows, seen) == [2, 2]


def test_find_same_when_a_writer_fills_the_row_then_it_is_none_of_them() -> None:
    table = small_table()
    write(table, 8)
    seen = get_halves(table, numbers(0))
    assert table.arrivals.reserve(1) is not None
    assert find_same(table, numbers(0), seen) == []


def test_find_same_when_a_number_is_out_of_range_then_refused() -> None:
    table = small_table()
    write(table, 8)
    with pytest.raises(SelectionError, match="rows 0 to 7"):
        list(table.departures.find_same_in_parts(numbers(0, 8), get_halves(table, numbers(0, 1))))


def test_plan_departure_when_rows_came_after_the_search_then_they_stay() -> None:
    table = small_table()
    write(table, 8)
    newest = table.order.last_sequence
    (found,) = table.departures.find_same_in_parts(numbers(0, 1, 2), get_halves(table, numbers(0, 1, 2)))
    write(table, 2)  # between two turns, in the places of 0 and 1
    departure = table.departures.plan_departure(RowSet.from_rows(found), newest=newest)
    assert sum(table.departures.depart_in_pieces(departure)) == 1
    assert table.state.list_live_rows().tolist() == [0, 1, 3, 4, 5, 6, 7]


def delete_all_seen(table: Table) -> int:
    """Deletes all rows, as those that a client has seen; returns how many were there."""
    everything = np.arange(table.ring.capacity)
    found = find_same(table, everything, get_halves(table, everything))
    return sum(table.departures.depart_in_pieces(table.departures.plan_departure(RowSet.from_rows(numbers(*found)))))


def reopened(table: Table) -> Table:
    """Returns the table as it is after a crash at this moment."""
    columns = {"sequence": table.columns.sequence, "times_sampled": table.columns.times_sampled}
    return Table(
        TableState.restore(
            "replay",
            table.plan_rows(np.arange(table.ring.capacity), {}).generations,
            table.settings,
            table.state.get_state(),
            make_column=lambda name, dtype, shape: columns.get(name, np.zeros(shape, dtype)),
        )
    )


@pytest.mark.parametrize("depart", [clear, delete_all_seen])
def test_depart_when_a_sample_has_spent_rows_then_they_come_back_neither_with_it_nor_after_a_crash(
    depart: Callable[[Table], int],
) -> None:
    table = table_of(8, max_times_sampled=1)
    write(table, 4)
    under_way = planned(table, 2)
    assert depart(table) == 4
    assert (len(table), len(reopened(table))) == (0, 0)
    write(table, 8)
    table.samples.undo(under_way)
    assert (len(table), table.state.list_live_rows().tolist()) == (8, list(range(8)))
    assert len(planned(table, 8).spent) == 8


def test_depart_when_rows_are_spent_after_the_decision_then_they_do_not_come_back() -> None:
    table = table_of(8, max_times_sampled=1)
    write(table, 4)
    departure = table.departures.plan_departure(RowSet.run(0, 4))
    sent, under_way = planned(table, 1), planned(table, 2)  # between two turns
    table.samples.finish(sent)
    write(table, 1)
    assert sum(table.departures.depart_in_pieces(departure)) == 3
    table.samples.undo(under_way)
    assert (len(table), len(table.state.list_live_rows())) == (1, 1)


def test_depart_when_a_draw_for_ranks_has_spent_rows_then_they_leave_with_that() -> None:
    table = table_of(8, max_times_sampled=1)
    write(table, 8)
    made = RankDraw.make(table, 0, DrawTerms(2, 2, PLAIN), rng=rng())
    assert made is not None
    planned(table, 2)
    assert delete_all_seen(table) == 4
    assert (len(table), len(table.ring)) == (0, 4)
    table.draws.forget_all(table.state)
    assert (len(table), len(table.ring)) == (0, 0)
