from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tdserve.base.errors import InvalidRequestError, LocalProtocolError
from tdserve.rules.replay.limiter import Queue
from tdserve.rules.replay.row_indexes.columns import RowColumns
from tdserve.rules.replay.samplers.priority_order import HighestPriority, LowestPriority, PriorityOrder
from tests.unit.rules.replay.tables import acknowledge, give_back, more, numbers, planned, rng, table_of, write

SAMPLERS = [HighestPriority(), LowestPriority()]


def _make(sampler: Any, *priorities: float) -> tuple[PriorityOrder, RowColumns]:
    """Returns an order of rows with these priorities, of which the last one is the oldest."""
    capacity = len(priorities)
    columns = RowColumns(capacity)
    columns.priority[:] = priorities
    columns.sequence[:] = np.arange(capacity)[::-1]
    order = sampler.make_selector(columns, capacity)
    order.add(np.arange(capacity))
    return order, columns


def _draw(order: PriorityOrder, num_rows: int, **fields: int) -> list[int] | None:
    drawn = order.draw(num_rows, rng=rng(), **fields)
    return None if drawn is None else drawn.rows.tolist()


def test_draw_when_priorities_are_equal_then_the_oldest_first() -> None:
    order, _ = _make(HighestPriority(), 1, 5, 0, 5, 1)
    assert _draw(order, 5) == [3, 1, 4, 0, 2]
    assert _draw(_make(LowestPriority(), 1, 5, 0, 5, 1)[0], 4) == [2, 4, 0, 3]
    assert len(order) == 5


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_find_when_very_many_rows_are_equal_then_the_oldest_of_them(sampler: Any) -> None:
    order, _ = _make(sampler, *[2.0] * 70_000)
    assert order.find_first(5).tolist() == [69_999, 69_998, 69_997, 69_996, 69_995]


def test_draw_when_a_priority_changes_then_in_the_new_order() -> None:
    order, columns = _make(HighestPriority(), 1, 2, 3)
    columns.priority[0] = 9
    order.update(np.array([0]))
    assert _draw(order, 2) == [0, 2]
    order.remove(np.array([0]))
    columns.priority[0] = 10
    order.update(np.array([0]))  # no member
    assert _draw(order, 2) == [2, 1]


def test_draw_when_a_sample_goes_on_then_behind_its_last_row() -> None:
    order, columns = _make(HighestPriority(), 1, 2, 3, 4, 5, 6, 7, 8)
    order.remove(np.arange(3))
    assert _draw(order, 2, num_total=4) == [7, 6]
    columns.priority[:3] = 9  # rows that come in front meanwhile
    order.add(np.arange(3))
    order.remove(np.array([7]))
    assert _draw(order, 2, num_drawn=2, num_total=4) == [5, 4]


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_draw_when_it_cannot_be_then_none_or_refused(sampler: Any) -> None:
    order, _ = _make(sampler, 1, 2, 3)
    order.remove(np.array([1]))
    assert _draw(order, 3) is None
    with pytest.raises(InvalidRequestError, match="4 different rows never fit into a capacity of 3"):
        _draw(order, 4)
    with pytest.raises(LocalProtocolError):
        order.add(np.array([0]))
    assert len(order) == 2


def test_queue_when_rows_are_urgent_then_they_go_first_and_come_back_to_their_place() -> None:
    table = table_of(8, sampler=HighestPriority(), limiter=Queue(8), is_queue=True)
    write(table, 5, priorities=np.array([1.0, 3.0, 1.0, 3.0, 2.0]))
    assert planned(table, 3, owner=7).rows.tolist() == [1, 3, 4]
    give_back(table, 7, "", numbers(3))
    assert acknowledge(table, 7, "", numbers(1, 4)) == 2
    assert planned(table, 3, owner=8).rows.tolist() == [3, 0, 2]


def test_sample_when_drawn_in_parts_then_as_at_once() -> None:
    table = table_of(64, sampler=LowestPriority())
    write(table, 64, priorities=rng().permutation(64).astype(np.float64))
    plan = planned(table, 30, max_drawn=10)
    rows = plan.rows.tolist()
    while plan.num_missing:
        plan = more(table, plan, 10)
        rows += plan.rows.tolist()
    assert table.columns.priority[rows].tolist() == list(range(30))
