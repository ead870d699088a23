"""The contract of a selector, held against every sampler, and against groups."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tdserve.base.errors import InvalidRequestError
from tdserve.rules.replay.eligibility.group_selector import GroupSelector
from tdserve.rules.replay.row_indexes.columns import RowColumns
from tdserve.rules.replay.samplers.order import Fifo, Lifo
from tdserve.rules.replay.samplers.prioritized import Prioritized
from tdserve.rules.replay.samplers.priority_order import HighestPriority
from tdserve.rules.replay.samplers.sampler import Uniform
from tdserve.rules.replay.samplers.selector import Selector
from tdserve.rules.replay.samplers.slices import Slices
from tdserve.rules.replay.samplers.trajectories import Trajectories
from tdserve.rules.replay.samplers.without_replacement import WithoutReplacement

CAPACITY = 12

EVERY: dict[str, Any] = {
    "uniform": Uniform(),
    "prioritized": Prioritized(),
    "fifo": Fifo(),
    "lifo": Lifo(),
    "highest_priority": HighestPriority(),
    "without_replacement": WithoutReplacement(),
    "slices": Slices(slice_len=2),
    "groups": None,
}


@pytest.fixture(params=EVERY)
def kind(request: pytest.FixtureRequest) -> str:
    """The kind of a selector."""
    return str(request.param)


@pytest.fixture
def columns() -> RowColumns:
    """Columns of twelve rows that one writer committed in order, two of each group."""
    made = RowColumns(CAPACITY)
    rows = np.arange(CAPACITY)
    made.sequence[:] = rows + 1
    made.priority[:] = 1.0
    made.trajectories = Trajectories(made, CAPACITY)
    made.trajectories.append(rows, writer="w")
    return made


@pytest.fixture
def selector(kind: str, columns: RowColumns) -> Selector:
    """A selector without members."""
    if kind == "groups":
        return GroupSelector(columns, np.arange(CAPACITY) // 2, 2)
    made: Selector = EVERY[kind].make_selector(columns, CAPACITY)
    return made


def _drawn(selector: Selector, num_rows: int = 2, times: int = 60) -> set[int]:
    rng, found = np.random.default_rng(0), set()
    for _ in range(times):
        drawn = selector.draw(num_rows, rng=rng)
        assert drawn is not None
        assert drawn.rows.shape == (num_rows,)
        assert all(len(column) == num_rows for column in drawn.columns.values())
        found |= set(drawn.rows.tolist())
    return found


def test_draw_when_there_are_no_members_then_waits(selector: Selector) -> None:
    assert len(selector) == 0
    assert selector.draw(2, rng=np.random.default_rng(0)) is None


def test_draw_when_some_rows_are_members_then_only_of_them(selector: Selector) -> None:
    selector.add(np.arange(8))
    selector.remove(np.array([6, 7, 10]))  # the last is no member
    assert len(selector) == 6
    assert _drawn(selector) <= {0, 1, 2, 3, 4, 5}
    selector.remove(np.array([0, 1]))
    selector.add(np.array([6, 7]))
    assert len(selector) == 6
    assert _drawn(selector) <= {2, 3, 4, 5, 6, 7}


def test_draw_when_all_have_gone_then_waits_and_takes_others_again(selector: Selector) -> None:
    selector.add(np.arange(CAPACITY))
    selector.remove(np.arange(CAPACITY))
    assert len(selector) == 0
    assert selector.draw(2, rng=np.random.default_rng(0)) is None
    selector.add(np.array([4, 5]))
    assert _drawn(selector, times=3) == {4, 5}


def test_draw_when_it_draws_then_takes_no_row_out(selector: Selector) -> None:
    selector.add(np.arange(4))
    _drawn(selector)
    assert len(selector) == 4


def test_update_when_rows_are_no_members_then_ignored(selector: Selector, columns: RowColumns) -> None:
    selector.add(np.arange(4))
    columns.priority[:] = 3.0
    selector.update(np.arange(CAPACITY))
    assert len(selector) == 4
    assert _drawn(selector) <= {0, 1, 2, 3}


@pytest.mark.parametrize("kind", ["uniform", "prioritized"], indirect=True)
def test_draw_when_a_row_may_come_several_times_then_more_than_there_are_may_be_had(selector: Selector) -> None:
    selector.add(np.arange(4))
    drawn = selector.draw(CAPACITY + 1, rng=np.random.default_rng(0))
    assert drawn is not None
    assert len(drawn.rows) == CAPACITY + 1
    assert set(drawn.rows.tolist()) <= {0, 1, 2, 3}


@pytest.mark.parametrize("kind", sorted(EVERY.keys() - {"uniform", "prioritized"}), indirect=True)
def test_draw_when_more_than_could_ever_be_had_then_refused_and_nothing_changes(selector: Selector) -> None:
    selector.add(np.arange(4))
    with pytest.raises(InvalidRequestError):
        selector.draw(CAPACITY + 1, rng=np.random.default_rng(0))
    assert len(selector) == 4
    assert _drawn(selector) <= {0, 1, 2, 3}
