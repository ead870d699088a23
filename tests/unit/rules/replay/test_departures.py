"""Rows that are deleted as exactly those that somebody has seen."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tdserve.base.errors import SelectionError
from tdserve.messages.row_sets import RowSet
from tdserve.rules.replay.table import Table
from tests.unit.rules.replay.tables import delete, numbers, small_table, write


def get_halves(table: Table, rows: Any) -> Any:
    """Returns the lower halves of the generations of rows."""
    return table.get_row_ids(rows).astype(np.uint32)


def find_same(table: Table, rows: Any, generations: Any) -> list[int]:
    """Returns the rows that are still the same, of all parts together."""
    found: list[int] = np.concatenate(list(table.find_same_in_parts(rows, generations))).tolist()
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
    assert table.reserve(1) is not None
    assert find_same(table, numbers(0), seen) == []


def test_find_same_when_a_number_is_out_of_range_then_refused() -> None:
    table = small_table()
    write(table, 8)
    with pytest.raises(SelectionError, match="rows 0 to 7"):
        list(table.find_same_in_parts(numbers(0, 8), get_halves(table, numbers(0, 1))))


def test_plan_departure_when_rows_came_after_the_search_then_they_stay() -> None:
    table = small_table()
    write(table, 8)
    newest = table.order.last_sequence
    (found,) = table.find_same_in_parts(numbers(0, 1, 2), get_halves(table, numbers(0, 1, 2)))
    write(table, 2)  # between two turns, in the places of 0 and 1
    departure = table.plan_departure(RowSet.from_rows(found), newest=newest)
    assert sum(table.depart_in_pieces(departure)) == 1
    assert table.list_live_rows().tolist() == [0, 1, 3, 4, 5, 6, 7]
