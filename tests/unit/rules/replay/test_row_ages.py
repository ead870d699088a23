"""The ages of sampled rows, by a clock of the test."""

from __future__ import annotations

import numpy as np
import pytest

from tdserve.rules.replay.row_ages import MAX_KEPT_ROWS, DrawnRows, RowAges, SampleAge
from tdserve.rules.replay.sample_ages import measure_sample_age, note_arrival, note_sample
from tdserve.rules.replay.table import Table
from tests.unit.rules.replay.tables import planned, rng, small_table, table_of, write


def write_at(table: Table, now_s: float, num_rows: int) -> None:
    """Commits rows at a time."""
    write(table, num_rows)
    note_arrival(table.state, num_rows, now_s)


def measure(table: Table, now_s: float = 0.0) -> SampleAge:
    """Returns the age of the newest sample; there must be one."""
    age = measure_sample_age(table.state, now_s, rng=rng())
    assert age is not None
    return age


def test_measure_when_there_was_no_sample_then_none() -> None:
    table = small_table()
    write_at(table, 1.0, 3)
    assert measure_sample_age(table.state, 2.0, rng=rng()) is None


def test_measure_when_rows_were_drawn_then_their_age_at_that_moment() -> None:
    table = table_of(capacity=8)
    write_at(table, 10.0, 1)
    write_at(table, 14.0, 3)
    plan = planned(table, 64)
    note_sample(table.state, plan, 20.0)
    before = measure(table)
    write_at(table, 60.0, 4)  # what comes later changes nothing
    assert measure(table, 100.0) == before
    is_first = plan.rows == 0
    assert 0 < is_first.sum() < 64
    assert before.mean_s == pytest.approx(np.where(is_first, 10.0, 6.0).mean())
    assert before.mean_rows == pytest.approx((3 - plan.rows).mean())
    assert (before.max_s, before.max_rows, before.mean_lag) == (10.0, 3, None)


def test_measure_when_readers_draw_by_themselves_then_of_rows_that_stand_for_theirs() -> None:
    table = small_table()
    write_at(table, 1.0, 4)
    table.shared.count_drawn(16, 100)
    age = measure(table, 11.0)
    assert (age.mean_s, age.max_rows) == (10.0, 3)
    assert 1.2 < age.mean_rows < 1.8  # of 0, 1, 2 and 3, each equally likely
    assert measure(table, 50.0) == age  # nobody has drawn since
    table.shared.count_drawn(16, 1)
    assert measure(table, 51.0).mean_s == 50.0


def test_measure_when_rows_were_there_before_then_they_count_from_the_opening() -> None:
    ages = RowAges()
    ages.note_rows(0, 100.0)
    ages.note_sample(DrawnRows(130.0, np.array([5, 7]), 9))
    assert ages.measure() == SampleAge(30.0, 30.0, 3.0, 4)


def test_measure_when_the_table_has_a_policy_then_versions_too_but_for_unknown_ones() -> None:
    ages = RowAges()
    ages.note_rows(0, 0.0)
    ages.note_sample(DrawnRows(1.0, np.arange(4), 3, np.array([-1, 4, 2, 0])))
    age = ages.measure()
    assert age is not None
    assert (age.mean_lag, age.max_lag) == (2.0, 4)
    ages.note_sample(DrawnRows(1.0, np.arange(2), 3, np.array([-1, -1])))
    unknown = ages.measure()
    assert unknown is not None
    assert unknown.max_lag is None


@pytest.mark.slow
def test_measure_when_writers_write_for_long_then_wrong_by_a_second_or_a_few_per_cent() -> None:
    ages, seconds, rates = RowAges(), 200_000, np.array([1, 3, 0, 0, 7])
    come_s: list[float] = []
    for now_s in range(seconds):  # also with pauses of two seconds, and one of a day
        if now_s < 50_000 or now_s > 136_400:
            for _ in range(rates[now_s % 5]):
                come_s.append(float(now_s))
                ages.note_rows(len(come_s) - 1, float(now_s))
    for place in range(0, len(come_s), 997):
        ages.note_sample(DrawnRows(float(seconds), np.array([place]), len(come_s) - 1))
        age = ages.measure()
        assert age is not None
        assert age.mean_s == pytest.approx(seconds - come_s[place], rel=0.12, abs=2.0)


def test_note_sample_when_it_is_large_then_few_of_its_rows_are_kept() -> None:
    ages = RowAges()
    ages.note_rows(0, 0.0)
    drawn = DrawnRows(
        1.0, np.arange(10 * MAX_KEPT_ROWS), 10 * MAX_KEPT_ROWS - 1, np.zeros(10 * MAX_KEPT_ROWS, np.int64)
    )
    thinned = drawn.thin_out()
    assert len(thinned.places) == MAX_KEPT_ROWS
    assert thinned.places.base is None
    ages.note_sample(drawn)
    age = ages.measure()
    assert age is not None
    assert age.mean_rows == pytest.approx(5 * MAX_KEPT_ROWS, rel=0.01)
