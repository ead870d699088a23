from __future__ import annotations

import numpy as np
import pytest

from tdserve.base.errors import InvalidRequestError
from tdserve.messages.row_numbers import Rows
from tdserve.rules.replay.row_indexes.columns import RowColumns
from tdserve.rules.replay.samplers.order import Fifo, Lifo, OrderSelector

_RNG = np.random.default_rng(0)


def _selector(sampler: Fifo | Lifo, capacity: int = 20) -> OrderSelector:
    """Returns the selector of a ring that has wrapped around once: row 5 is the oldest."""
    columns = RowColumns(capacity)
    columns.sequence[:] = (np.arange(capacity) - 5) % capacity
    return sampler.make_selector(columns, capacity)


def _drawn(selector: OrderSelector, num_rows: int) -> list[int] | None:
    drawn = selector.draw(num_rows, rng=_RNG)
    return None if drawn is None else drawn.rows.tolist()


def _rows(*rows: int) -> Rows:
    return np.array(rows, np.int64)


def test_fifo_when_drawn_then_oldest_first_and_nothing_is_taken() -> None:
    selector = _selector(Fifo())
    selector.add(np.arange(20))
    assert _drawn(selector, 4) == [5, 6, 7, 8]
    assert _drawn(selector, 16)[-2:] == [19, 0]  # type: ignore[index]
    assert len(selector) == 20


def test_lifo_when_drawn_then_newest_first_and_nothing_is_taken() -> None:
    selector = _selector(Lifo())
    selector.add(np.arange(20))
    assert _drawn(selector, 6) == [4, 3, 2, 1, 0, 19]
    assert len(selector) == 20


@pytest.mark.parametrize("sampler", [Fifo(), Lifo()])
def test_draw_when_fewer_are_there_then_none_until_there_are_enough(sampler: Fifo | Lifo) -> None:
    selector = _selector(sampler)
    assert _drawn(selector, 1) is None
    selector.add(_rows(3, 9))
    assert _drawn(selector, 3) is None
    selector.add(_rows(7))
    assert sorted(_drawn(selector, 3) or []) == [3, 7, 9]


@pytest.mark.parametrize("sampler", [Fifo(), Lifo()])
def test_draw_when_more_than_the_capacity_then_refused(sampler: Fifo | Lifo) -> None:
    selector = _selector(sampler)
    selector.add(np.arange(20))
    with pytest.raises(InvalidRequestError, match="21 different rows never fit into a capacity of 20"):
        _drawn(selector, 21)


def test_add_when_rows_that_were_taken_come_back_then_they_stand_in_front_again() -> None:
    selector = _selector(Fifo())
    selector.add(np.arange(20))
    selector.remove(_rows(5, 6, 7, 8))
    assert _drawn(selector, 2) == [9, 10]
    selector.remove(_rows(9, 10))
    selector.add(_rows(8, 6))
    assert _drawn(selector, 4) == [6, 8, 11, 12]


def test_remove_when_rows_are_no_members_then_ignored() -> None:
    selector = _selector(Lifo())
    selector.add(_rows(1, 2))
    selector.remove(_rows(2, 15))
    selector.update(_rows(1))
    assert _drawn(selector, 1) == [1]
    assert repr(selector) == "<OrderSelector 1 rows, newest first>"


def test_order_when_compared_then_equal_as_settings_must_be() -> None:
    assert Fifo() == Fifo()
    assert (Fifo().kind, Lifo().kind) == ("fifo", "lifo")
    Fifo().check(1)
    Lifo().check(1)
