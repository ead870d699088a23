from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tdserve.base.errors import SelectionError
from tdserve.messages.row_numbers import PIECE_ROWS
from tdserve.messages.row_sets import RowSet
from tdserve.messages.selection.selection import parse
from tdserve.rules.replay.settings import Settings
from tdserve.rules.replay.table import Table
from tdserve.rules.replay.table_state import TableState
from tdserve.server.tables.numbers import compute_row_numbers, plan_read
from tests.unit.rules.replay.tables import delete
from tests.unit.server.world import Loop, turns_during


def table_of(num_rows: int, *, capacity: int, gone: list[int]) -> Table:
    """A table whose rows of these numbers were deleted."""
    table = Table(TableState("r", capacity, np.zeros(capacity, np.int64), Settings()))
    reservation = table.arrivals.reserve(num_rows)
    assert reservation is not None
    table.arrivals.arrive(reservation.rows)
    table.arrivals.commit(reservation)
    delete(table, np.array(gone))
    return table


@pytest.fixture
def table() -> Table:
    """A table with the live rows 1, 2, 4 and 5."""
    return table_of(7, capacity=9, gone=[0, 3, 6])


@pytest.mark.parametrize(
    ("index", "numbers"),
    [
        ((), [1, 2, 4, 5]),
        (slice(None), [1, 2, 4, 5]),
        (slice(2, None), [2, 4, 5]),
        (slice(None, None, 2), [2, 4]),
        (slice(None, None, -1), [5, 4, 2, 1]),
        (slice(None, None, -2), [5, 1]),
        (slice(-2, None), [4, 5]),
        (4, [4]),
        (-1, [5]),
        ([5, 1, 1], [5, 1, 1]),
        ([5, -5], [5, 1]),
        (np.array([False, True, False, True, True, False]), [1, 4]),
    ],
)
def test_numbers_when_an_index_is_given_then_of_live_rows(
    table: Table, run: Loop, index: Any, numbers: list[int]
) -> None:
    assert run(compute_row_numbers(parse(index), table.state)).tolist() == numbers


@pytest.mark.parametrize(
    ("index", "numbers"),
    [
        (slice(None), [2, 4]),
        (slice(3, None), [4]),
        (np.array([False, True, False, False, False, True]), []),
        (5, [5]),
        (-1, [5]),
        ([5, 1, 2], [5, 1, 2]),
    ],
)
def test_numbers_when_rows_are_lost_then_only_selections_that_name_them_have_them(
    table: Table, run: Loop, index: Any, numbers: list[int]
) -> None:
    assert (
        run(compute_row_numbers(parse(index), table.state, lost=RowSet.from_rows(np.array([5, 1])))).tolist() == numbers
    )


@pytest.mark.parametrize("index", [7, -7, (0, 1), None, np.ones(5, dtype=bool), [0, 7]])
def test_numbers_when_the_index_does_not_fit_then_error(table: Table, run: Loop, index: Any) -> None:
    with pytest.raises(SelectionError):
        run(compute_row_numbers(parse(index), table.state))


@pytest.mark.parametrize("index", [-1, slice(None), slice(2, None), slice(-3, None), ()])
def test_numbers_when_there_are_no_rows_then_none(run: Loop, index: Any) -> None:
    table = table_of(2, capacity=4, gone=[0, 1])
    if index == -1:
        with pytest.raises(SelectionError):
            run(compute_row_numbers(parse(index), table.state))
    else:
        assert run(compute_row_numbers(parse(index), table.state)).tolist() == []


@pytest.mark.slow
def test_numbers_when_there_are_very_many_rows_then_all_are_found(run: Loop) -> None:
    num_rows = 40 * PIECE_ROWS
    table = table_of(num_rows, capacity=num_rows + 5, gone=[0, 7, num_rows - 1])
    live = np.setdiff1d(np.arange(num_rows), [0, 7, num_rows - 1])
    assert np.array_equal(run(compute_row_numbers(parse(()), table.state)), live)
    assert run(compute_row_numbers(parse(-1), table.state)).tolist() == [num_rows - 2]
    mask = np.zeros(num_rows - 1, np.bool_)
    mask[::3] = True
    assert np.array_equal(run(compute_row_numbers(parse(mask), table.state)), live[live % 3 == 0])


def test_plan_read_when_there_are_very_many_rows_then_others_have_their_turns_and_bad_ones_are_named(run: Loop) -> None:
    num_rows = 10 * PIECE_ROWS
    table = table_of(num_rows, capacity=num_rows, gone=[7])
    rows = np.flatnonzero(np.arange(num_rows) != 7)[::-1]
    plans = []

    async def plan(rows: Any) -> None:
        plans.append(await plan_read(table, rows))

    assert run(turns_during(plan(rows))) > 4
    assert plans[0].rows.tolist() == rows.tolist()
    assert (plans[0].generations == table.plan_read(rows).generations).all()
    with pytest.raises(SelectionError, match="not live"):
        run(plan(np.arange(num_rows)))
