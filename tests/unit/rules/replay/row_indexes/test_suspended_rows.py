"""Rows of a table keep their state in all counts, also while a part of them is written."""

from __future__ import annotations

import numpy as np
import pytest

from tdserve.rules.replay.limiter import Queue
from tdserve.rules.replay.settings import Settings
from tdserve.rules.replay.table import Table
from tdserve.rules.replay.table_state import TableState
from tests.unit.rules.replay.tables import delete, numbers, table_of, write


@pytest.fixture
def table() -> Table:
    """Four rows, of which the first two lack a leaf, and consumer "a" has had row 3."""
    made = table_of(8, limiter=Queue(8), consumers=("a", "b"))
    write(made, 2, keys=[0])
    write(made, 2)
    made.selectors.consume("a", numbers(3))
    return made


def figures(table: Table) -> tuple[int, dict[str, int]]:
    """Returns the numbers of rows that lack leaves, and that each consumer has not had."""
    return table.selectors.num_incomplete, table.selectors.count_backlog()


def test_figures_when_rows_are_being_written_then_as_before_and_after(table: Table) -> None:
    assert figures(table) == (2, {"a": 3, "b": 4})
    written = table.state.hold(numbers(0, 2, 3))
    assert figures(table) == (2, {"a": 3, "b": 4})
    table.ring.hide(written)
    assert figures(table) == (2, {"a": 3, "b": 4})
    table.state.show(written, [1])
    table.state.let_go(written)
    assert figures(table) == (1, {"a": 3, "b": 4})


def test_figures_when_a_row_leaves_while_it_is_being_written_then_without_it(table: Table) -> None:
    written = table.state.hold(numbers(0, 2))
    assert delete(table, numbers(0)) == 1
    assert figures(table) == (1, {"a": 2, "b": 3})
    table.state.let_go(written)
    assert figures(table) == (1, {"a": 2, "b": 3})
    assert delete(table, numbers(1, 2, 3)) == 3
    assert figures(table) == (0, {"a": 0, "b": 0})


def test_figures_when_a_restart_has_cut_a_write_short_then_its_rows_count_until_they_come_back() -> None:
    generations = np.array([3, 2, 2, 0])
    state = {"cursor": 3, "inserts": 3, "consumers": ["a"]}
    settings = Settings(limiter=Queue(4), consumers=("a",))
    table = Table(TableState.restore("replay", generations, settings, state, held=numbers(0)))
    assert table.selectors.count_backlog() == {"a": 3}
    table.state.show(numbers(0), [0])
    table.state.let_go(numbers(0))
    assert table.selectors.count_backlog() == {"a": 3}
    assert delete(table, numbers(0)) == 1
    assert table.selectors.count_backlog() == {"a": 2}
