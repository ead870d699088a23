from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tdserve.base.errors import InvalidRequestError
from tdserve.rules.replay.draws.drawing import Drawing
from tdserve.rules.replay.eligibility.conditional_selectors import ConditionalSelectors
from tdserve.rules.replay.eligibility.conditions import PLAIN
from tdserve.rules.replay.remover import LowestPriority
from tdserve.rules.replay.row_indexes.columns import RowColumns
from tdserve.rules.replay.samplers.order import Fifo
from tdserve.rules.replay.samplers.prioritized import Prioritized
from tdserve.rules.replay.samplers.sampler import Uniform
from tdserve.rules.replay.samplers.selector import Selector
from tdserve.rules.replay.samplers.without_replacement import WithoutReplacement
from tdserve.rules.replay.settings import Settings
from tests import chi_square

CAPACITY = 10


class _Drawn:
    """Ten rows and who draws them."""

    def __init__(self, num_rows: int = CAPACITY, **parts: Any) -> None:
        settings = Settings(**parts)
        self.columns = RowColumns(CAPACITY)
        self.columns.sequence[:] = np.arange(CAPACITY) + 1
        self.columns.priority[:] = np.arange(CAPACITY) + 1.0
        self.selectors = ConditionalSelectors(settings, self.columns, num_keys=1)
        self.selectors.enter(np.arange(num_rows))
        self.drawing = Drawing(settings, self.columns, self.selectors)
        self.rng = np.random.default_rng(0)

    @property
    def plain(self) -> Selector:
        return self.selectors.get(PLAIN)

    @property
    def times(self) -> NDArray[np.int64]:
        return self.columns.times_sampled

    def draw(self, num_rows: int, num_batches: int = 1) -> Any:
        return self.drawing.draw(self.plain, num_rows, num_batches=num_batches, rng=self.rng)

    def draw_distinct(self, num_rows: int) -> Any:
        return self.drawing.draw_distinct(self.plain, num_rows, rng=self.rng)


def test_draw_when_rows_have_counts_then_each_occurrence_counts() -> None:
    made = _Drawn(3, sampler=Prioritized())
    found = made.draw(30)
    rows, columns = found.drawn
    assert made.times.tolist() == np.bincount(rows, minlength=CAPACITY).tolist()
    assert columns["times_sampled"].tolist() == made.times[rows].tolist()
    assert columns["priority"].dtype == np.float32
    assert columns["priority"].tolist() == (rows + 1.0).tolist()
    assert len(found.spent) == 0


def test_draw_when_only_the_remover_has_priorities_then_there_is_a_column_of_them() -> None:
    found = _Drawn(remover=LowestPriority()).draw(4)
    assert set(found.drawn.columns) == {"priority"}
    assert found.drawn.columns["priority"].tolist() == (found.drawn.rows + 1.0).tolist()


def test_draw_when_rows_may_come_twice_then_never_oftener_and_all_of_them_are_used() -> None:
    made = _Drawn(5, max_times_sampled=2)
    found = made.draw(10)
    assert np.bincount(found.drawn.rows).tolist() == [2] * 5
    assert sorted(found.spent.tolist()) == [0, 1, 2, 3, 4]
    assert len(made.plain) == 0
    assert made.draw(1) is None


def test_draw_when_rows_run_out_midway_then_none_and_nothing_changes() -> None:
    made = _Drawn(5, max_times_sampled=2)
    made.draw(3)
    before = made.times.tolist()
    num_left = len(made.plain)
    assert made.draw(8) is None
    assert made.times.tolist() == before
    assert len(made.plain) == num_left
    assert made.draw(7) is not None


def test_draw_when_a_later_batch_cannot_be_had_then_none_and_nothing_changes() -> None:
    made = _Drawn(5, sampler=Fifo(), max_times_sampled=1)
    assert made.draw(2, 3) is None
    assert not made.times.any()
    found = made.draw(2, 2)
    assert found.drawn.rows.tolist() == [0, 1, 2, 3]
    assert found.spent.tolist() == [0, 1, 2, 3]
    assert found.drawn.columns["times_sampled"].tolist() == [1] * 4


def test_draw_when_a_later_batch_is_refused_then_none_and_nothing_changes() -> None:
    made = _Drawn(5, sampler=WithoutReplacement(), max_times_sampled=1)
    assert made.draw(3, 2) is None  # one batch can be had
    assert not made.times.any()
    assert len(made.plain) == 5
    with pytest.raises(InvalidRequestError):
        made.draw(6, 2)
    assert len(made.plain) == 5


@pytest.mark.slow
def test_draw_when_rows_may_come_once_then_each_of_equal_chance() -> None:
    counts = np.zeros(5, np.int64)
    made = _Drawn(5, max_times_sampled=1)
    for _ in range(2000):
        found = made.draw(2)
        counts[found.drawn.rows] += 1
        made.drawing.undo(found.drawn.rows, found.spent)
    assert counts.sum() == 4000
    assert chi_square.statistic(counts) < chi_square.limit(5)
    assert not made.times.any()


@pytest.mark.parametrize("sampler", [Uniform(), Prioritized(), Fifo(), WithoutReplacement()])
def test_distinct_when_all_are_asked_then_each_once_and_gone_from_the_view(sampler: Any) -> None:
    made = _Drawn(sampler=sampler)
    found = made.draw_distinct(CAPACITY)
    assert sorted(found.drawn.rows.tolist()) == list(range(CAPACITY))
    assert len(made.plain) == 0
    assert made.draw_distinct(1) is None


@pytest.mark.parametrize("sampler", [Uniform(), Prioritized(), Fifo(), WithoutReplacement()])
def test_distinct_when_there_are_too_few_then_none_and_nothing_changes(sampler: Any) -> None:
    made = _Drawn(4, sampler=sampler)
    assert made.draw_distinct(5) is None
    assert len(made.plain) == 4
    assert not made.times.any()


def test_distinct_when_the_rest_may_not_be_drawn_then_none_and_nothing_changes() -> None:
    made = _Drawn(sampler=Prioritized(eps=0.0))
    made.columns.priority[2:] = 0.0
    made.selectors.update(np.arange(CAPACITY))
    assert made.draw_distinct(3) is None
    assert len(made.plain) == CAPACITY
    assert sorted(made.draw_distinct(2).drawn.rows.tolist()) == [0, 1]


def test_distinct_when_the_sampler_has_columns_then_they_stay_with_their_rows() -> None:
    made = _Drawn(sampler=Prioritized())
    rows, columns = made.draw_distinct(CAPACITY).drawn
    assert columns["priority"].tolist() == (rows + 1.0).tolist()
    assert columns["times_sampled"].tolist() == [1] * CAPACITY
    assert set(columns) == {"priority", "probability", "priority_weight", "times_sampled"}
    assert {len(column) for column in columns.values()} == {CAPACITY}


def test_undo_when_rows_came_several_times_then_as_before() -> None:
    made = _Drawn(2, max_times_sampled=3)
    found = made.draw(6)
    assert len(found.spent) == 2
    made.drawing.undo(found.drawn.rows, found.spent[:1])  # the other is not live any more
    assert made.times[:2].tolist() == [0, 0]
    assert len(made.plain) == 1


@pytest.mark.parametrize("sampler", [Uniform(), Prioritized(), Fifo(), WithoutReplacement()])
def test_draw_when_the_table_adds_columns_then_in_the_order_in_which_they_travel(sampler: Any) -> None:
    settings = Settings(sampler=sampler, remover=LowestPriority(), max_times_sampled=5)
    columns = RowColumns(4)
    selectors = ConditionalSelectors(settings, columns, num_keys=1)
    columns.priority[:] = 1.0
    selectors.enter(np.arange(4))
    found = Drawing(settings, columns, selectors).draw(
        selectors.get(PLAIN), 2, num_batches=1, rng=np.random.default_rng(0)
    )
    assert found is not None
    assert tuple(found.drawn.columns) == settings.list_added_columns()
