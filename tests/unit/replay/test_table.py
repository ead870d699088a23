from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tdserve.errors import CapacityError, InvalidRequestError, SelectionError, WrongStateError
from tdserve.replay.limiter import MinSize
from tdserve.replay.ring import Reservation
from tdserve.replay.settings import Settings
from tdserve.replay.table import Table


def _table(capacity: int = 8, min_size: int = 1) -> Table:
    return Table("replay", capacity, np.zeros(capacity, np.int64), Settings(limiter=MinSize(min_size)))


def _reserve(table: Table, num_rows: int) -> Reservation:
    reservation = table.plan_extend(num_rows)
    assert reservation is not None
    return reservation


def _rng() -> np.random.Generator:
    return np.random.default_rng(0)


def test_sample_when_rows_are_reserved_but_not_committed_then_waits() -> None:
    table = _table()
    reservation = _reserve(table, 4)
    assert table.plan_sample(2, rng=_rng()) is None
    table.commit(reservation)
    plan = table.plan_sample(2, 3, rng=_rng())
    assert plan is not None
    assert plan.rows.shape == (6,)
    assert plan.generations.tolist() == [2] * 6
    assert set(plan.rows.tolist()) <= {0, 1, 2, 3}


def test_sample_when_below_min_size_then_waits_and_says_why() -> None:
    table = _table(min_size=3)
    table.commit(_reserve(table, 2))
    assert table.plan_sample(1, rng=_rng()) is None
    assert "'replay' (size 2 of 8" in table.why_sample(1)
    assert "needs a size of 3" in table.why_sample(1)
    table.commit(_reserve(table, 1))
    assert table.plan_sample(1, rng=_rng()) is not None


def test_sample_when_rows_are_being_overwritten_then_never_gets_them() -> None:
    table = _table(4)
    table.commit(_reserve(table, 4))
    _reserve(table, 3)
    plan = table.plan_sample(100, rng=_rng())
    assert plan is not None
    assert set(plan.rows.tolist()) == {3}


def test_sample_when_every_row_is_being_overwritten_then_waits() -> None:
    table = _table(4)
    table.commit(_reserve(table, 4))
    _reserve(table, 4)
    assert table.plan_sample(1, rng=_rng()) is None


@pytest.mark.parametrize(("num_rows", "num_batches"), [(0, 1), (1, 0), (-1, 1)])
def test_sample_when_nothing_is_asked_then_refused_and_not_counted(num_rows: int, num_batches: int) -> None:
    table = _table()
    table.commit(_reserve(table, 4))
    with pytest.raises(InvalidRequestError):
        table.plan_sample(num_rows, num_batches, rng=_rng())
    assert table.info()["samples"] == 0


def test_extend_when_it_fits_never_then_capacity_error_and_now_then_none() -> None:
    table = _table(4)
    with pytest.raises(CapacityError):
        table.plan_extend(5)
    held = _reserve(table, 3)
    assert table.plan_extend(2) is None
    table.abort(held)
    assert table.plan_extend(2) is not None


def test_extend_when_the_writer_died_then_the_next_one_gets_the_rows() -> None:
    table = _table(4)
    table.commit(_reserve(table, 4))
    table.abort(_reserve(table, 2))
    assert table.live_rows().tolist() == [2, 3]
    assert _reserve(table, 2).rows.tolist() == [0, 1]


def test_quarantine_when_the_writer_is_silent_then_nobody_gets_the_rows_until_release() -> None:
    table = _table(4)
    held = _reserve(table, 2)
    table.quarantine(held)
    assert _reserve(table, 2).rows.tolist() == [2, 3]
    assert table.plan_extend(1) is None
    with pytest.raises(WrongStateError):
        table.commit(held)
    table.release(held)
    assert _reserve(table, 2).rows.tolist() == [0, 1]


def test_read_when_rows_are_live_then_given_in_order_and_not_counted() -> None:
    table = _table(4)
    table.commit(_reserve(table, 3))
    plan = table.plan_read(np.array([2, 0, 2]))
    assert plan.rows.tolist() == [2, 0, 2]
    assert plan.generations.tolist() == [2, 2, 2]
    assert table.info()["samples"] == 0
    assert table.plan_read(np.empty(0, np.int64)).rows.size == 0


@pytest.mark.parametrize(("row", "reason"), [(3, "not live"), (4, "rows 0 to 3"), (-1, "rows 0 to 3")])
def test_read_when_a_row_is_not_there_then_selection_error(row: int, reason: str) -> None:
    table = _table(4)
    table.commit(_reserve(table, 3))
    with pytest.raises(SelectionError, match=reason) as caught:
        table.plan_read(np.array([0, row]))
    assert caught.value.selection == str(row)


def test_info_when_used_then_every_count_is_right() -> None:
    table = _table(8, min_size=2)
    table.commit(_reserve(table, 5))
    table.abort(_reserve(table, 2))
    table.plan_sample(3, 2, rng=_rng())
    _reserve(table, 1)
    expected: dict[str, Any] = {"num_rows": 5, "capacity": 8, "num_reserved": 1, "num_holes": 1, "num_leased": 0}
    expected |= {"cursor": 7, "inserts": 5, "samples": 6, "settings": table.settings.to_json()}
    assert table.info() == expected
    assert len(table) == 5


def test_restore_when_the_server_restarts_then_rows_and_counts_are_back() -> None:
    generations = np.zeros(8, np.int64)
    table = Table("replay", 8, generations, Settings())
    table.commit(_reserve(table, 5))
    table.plan_sample(3, rng=_rng())
    _reserve(table, 2)
    again = Table.restore("replay", generations, table.settings, table.state())
    assert again.live_rows().tolist() == [0, 1, 2, 3, 4]
    assert again.info() == {**table.info(), "num_reserved": 0, "num_holes": 2}
    assert _reserve(again, 3).rows.tolist() == [5, 6, 7]


def test_restore_when_writers_may_live_then_their_rows_are_held() -> None:
    generations = np.array([2, 1, 1, 0], np.int64)
    table = Table.restore("replay", generations, Settings(), {"cursor": 3}, now_reserved=[np.array([2])])
    assert table.info()["num_reserved"] == 1
    assert _reserve(table, 2).rows.tolist() == [1, 3]


def test_table_when_the_limiter_could_never_let_through_then_refused() -> None:
    with pytest.raises(InvalidRequestError):
        _table(4, min_size=5)
