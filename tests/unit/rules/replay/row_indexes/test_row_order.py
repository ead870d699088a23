"""Which rows continue the row before theirs, and the places of rows in the order of commits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tdserve.base.errors import SelectionError
from tdserve.rules.replay.plans import Arrival
from tdserve.rules.replay.row_indexes import row_order
from tdserve.rules.replay.row_indexes.row_order import to_place
from tdserve.rules.replay.table import Table
from tdserve.rules.replay.table_state import TableState
from tests.unit.rules.replay.tables import clear, delete, numbers, reserve, small_table, table_of, write


def list_continuing(table: Table) -> list[int]:
    rows = table.state.list_live_rows()
    found: list[int] = rows[table.get_sequences(rows) & 1 == 0].tolist()
    return found


def test_continuing_when_writers_take_turns_then_the_rows_of_one_turn_do() -> None:
    table = small_table(16)
    write(table, 3, writer="a")
    write(table, 2, writer="a")
    write(table, 3, writer="b")
    write(table, 2, writer="a")
    assert list_continuing(table) == [1, 2, 3, 4, 6, 7, 9]
    assert to_place(table.columns.sequence[:10]).tolist() == list(range(1, 11))
    with pytest.raises(SelectionError, match="0 to 15"):
        table.get_sequences(numbers(16))


def test_continuing_when_rows_of_several_writers_arrive_together_then_each_for_itself() -> None:
    table = small_table(16)
    write(table, 2, writer="a")
    write(table, 7, writers=[("a", 2), ("a", 1), ("b", 2), ("b", 1), ("a", 1)])
    assert list_continuing(table) == [1, 2, 3, 4, 6, 7]


def test_continuing_when_other_rows_are_committed_in_between_then_those_of_one_block_still_do() -> None:
    table = small_table(16)
    first, other, last = (reserve(table, 2) for _ in range(3))
    table.ring.abort(last)
    for reservation, writer in ((first, "a"), (other, "b")):
        table.arrivals.arrive(reservation.rows, Arrival(writer=writer))
        table.arrivals.commit(reservation)
    halves = [reserve(table, 2) for _ in range(4)]
    for place, writer in ((0, "a"), (2, "b"), (1, "a"), (3, "b")):
        table.arrivals.arrive(halves[place].rows, Arrival(writer=writer))
        table.arrivals.commit(halves[place])
    assert list_continuing(table) == [1, 3, 5, 6, 7, 9, 10, 11]


def test_continuing_when_the_ring_begins_again_then_over_its_end_and_not_into_older_rows() -> None:
    table = small_table(4)
    write(table, 3, writer="a")
    write(table, 3, writer="a")
    assert list_continuing(table) == [0, 1, 3]
    write(table, 4, writer="a")
    assert list_continuing(table) == [0, 1, 3]


@pytest.mark.parametrize("refilled", ["a", "b"])
def test_continuing_when_a_deleted_row_is_filled_again_then_it_and_the_row_after_it_do_not(refilled: str) -> None:
    table = small_table(6)
    write(table, 6, writer="a")
    delete(table, numbers(2))
    assert write(table, 1, writer=refilled) == [2]
    assert list_continuing(table) == [1, 4, 5]


@pytest.mark.parametrize("other", ["a", "b"])
def test_continuing_when_the_last_row_of_a_writer_was_replaced_then_its_next_does_not(other: str) -> None:
    table = small_table(6)
    write(table, 3, writer="a")
    write(table, 3, writer="c")
    delete(table, numbers(2, 3))
    assert write(table, 1, writer=other) == [2]
    assert write(table, 1, writer="a") == [3]
    assert list_continuing(table) == ([1, 3, 5] if other == "a" else [1, 5])


def test_continuing_when_restored_then_as_before_and_no_writer_goes_on() -> None:
    kept: dict[str, Any] = {}
    generations = np.zeros(8, np.int64)

    def make_column(name: str, dtype: Any, shape: Any) -> Any:
        return kept.setdefault(name, np.zeros(shape, dtype))

    table = Table(TableState("replay", 8, generations, small_table().settings, make_column=make_column))
    write(table, 2, writer="a")
    write(table, 2, writer="b")
    restored = Table(
        TableState.restore("replay", generations, table.settings, table.state.get_state(), make_column=make_column)
    )
    write(restored, 2, writer="b")
    assert list_continuing(restored) == [1, 3, 5]
    assert to_place(kept["sequence"][:6]).tolist() == [1, 2, 3, 4, 5, 6]


def test_continuing_when_there_are_too_many_writers_then_those_that_wrote_last_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(row_order, "MAX_WRITERS", 2)
    table = small_table(16)
    blocks = [[reserve(table, 1) for _ in range(2)] for _ in range(3)]
    for step in range(2):
        for place in ((0, 1, 2), (2, 1, 0))[step]:
            table.arrivals.arrive(blocks[place][step].rows, Arrival(writer=place))
            table.arrivals.commit(blocks[place][step])
    assert list_continuing(table) == [3, 5]


@pytest.mark.parametrize("empties", [clear, lambda table: delete(table, table.state.list_live_rows())])
def test_ring_when_it_was_emptied_in_the_middle_of_a_round_then_the_newest_rows_stay(
    empties: Callable[[Table], Any],
) -> None:
    table = table_of(20)
    for num_rows in (8, 12, 8):
        write(table, num_rows)
    empties(table)
    before = table.order.last_sequence
    for _ in range(6):
        write(table, 5)
    live = table.state.list_live_rows()
    assert len(live) == 20
    places = np.sort(table.columns.sequence[live] - before) // 2
    assert places.tolist() == [*range(places[0], places[0] + 20)]
    assert to_place(int(table.columns.sequence[live].max())) == to_place(table.order.last_sequence)
