from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tdserve.base.errors import InvalidRequestError, LocalProtocolError
from tdserve.messages.row_numbers import Rows
from tdserve.rules.replay.eligibility.group_selector import GroupSelector
from tdserve.rules.replay.row_indexes.columns import RowColumns
from tdserve.rules.replay.samplers.selector import Selector
from tests import chi_square
from tests.errors import raises
from tests.state_machines import make_tests

_CAPACITY = 20
_SIZE = 3


def _rows(rows: Iterable[int]) -> Rows:
    return np.array(list(rows), np.int64)


def _selector(ids: Rows, size: int) -> GroupSelector:
    columns = RowColumns(len(ids))
    columns.sequence[:] = np.arange(len(ids))
    return GroupSelector(columns, ids, size)


class _AgainstDicts(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.columns = RowColumns(_CAPACITY)
        self.ids = np.zeros(_CAPACITY, np.int64)
        self.selector = GroupSelector(self.columns, self.ids, _SIZE)
        self.model: dict[int, tuple[int, int]] = {}
        self.sequence = 0

    @rule(data=st.data())
    def add(self, data: st.DataObject) -> None:
        absent = sorted(set(range(_CAPACITY)) - self.model.keys())
        rows = data.draw(st.lists(st.sampled_from(absent), unique=True)) if absent else []
        order = data.draw(st.permutations(range(len(rows))))
        for row, place in zip(rows, order, strict=True):
            group = data.draw(st.sampled_from([-(2**62), -1, 0, 7, 2**62]))
            self.ids[row], self.columns.sequence[row] = group, self.sequence + place
            self.model[row] = (group, self.sequence + place)
        self.sequence += len(rows)
        self.selector.add(_rows(rows))

    @rule(data=st.data())
    def come_back(self, data: st.DataObject) -> None:
        if not self.model:
            return
        rows = data.draw(st.lists(st.sampled_from(sorted(self.model)), unique=True))
        self.selector.remove(_rows(rows))
        self.selector.add(_rows(rows))

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        rows = data.draw(st.lists(st.integers(0, _CAPACITY - 1), unique=True))
        self.selector.remove(_rows(rows))
        for row in rows:
            self.model.pop(row, None)
        self.ids[rows] = 99  # the next rows there are of other groups

    @invariant()
    def draws_the_oldest_of_complete_groups(self) -> None:
        groups: dict[int, list[tuple[int, int]]] = {}
        for row, (group, sequence) in self.model.items():
            groups.setdefault(group, []).append((sequence, row))
        oldest = {tuple(row for _, row in sorted(rows)[:_SIZE]) for rows in groups.values() if len(rows) >= _SIZE}
        assert len(self.selector) == len(self.model)
        assert self.selector.num_complete == len(oldest)
        assert self.selector.draw(_SIZE * (len(oldest) + 1), rng=np.random.default_rng(0)) is None
        if oldest:
            drawn = self.selector.draw(_SIZE * len(oldest), rng=np.random.default_rng(0))
            assert drawn is not None
            assert {tuple(rows) for rows in drawn.rows.reshape(-1, _SIZE).tolist()} == oldest


TestAgainstDicts, TestAgainstDictsWithAllExamples = make_tests(_AgainstDicts)


@pytest.mark.slow
@pytest.mark.parametrize("num_groups", [3, 8])
def test_draw_when_groups_come_and_go_then_every_choice_is_equally_likely(num_groups: int) -> None:
    selector = _selector(np.arange(80) // 4, 4)
    selector.add(np.random.default_rng(1).permutation(80))
    selector.remove(_rows(range(0, 40, 4)))
    counts = np.zeros((20, num_groups), np.int64)
    rng = np.random.default_rng(2)
    for _ in range(4000):
        drawn = selector.draw(4 * num_groups, rng=rng)
        assert drawn is not None
        groups = drawn.rows.reshape(-1, 4)
        assert (groups[:, :1] // 4 == groups // 4).all()
        assert len({*groups[:, 0].tolist()}) == num_groups
        counts[groups[:, 0] // 4, np.arange(num_groups)] += 1
    assert not counts[:10].any()
    for place in range(num_groups):
        assert chi_square.statistic(counts[10:, place]) < chi_square.limit(10)


def test_draw_when_fewer_groups_are_complete_than_asked_then_waits() -> None:
    selector: Selector = _selector(_rows([5, 5, 6, 6, 7, 7]), 2)
    selector.add(_rows([0, 1, 2, 4]))
    assert selector.draw(4, rng=np.random.default_rng(0)) is None
    selector.add(_rows([3]))
    drawn = selector.draw(4, rng=np.random.default_rng(0))
    assert drawn is not None
    assert sorted(drawn.rows.tolist()) == [0, 1, 2, 3]
    assert drawn.columns == {}


def test_draw_when_a_group_has_more_rows_then_the_oldest_by_sequence_come() -> None:
    selector = _selector(np.zeros(6, np.int64), 2)
    selector.add(_rows([5, 3]))
    selector.add(_rows([4, 1]))
    drawn = selector.draw(2, rng=np.random.default_rng(0))
    assert drawn is not None
    assert drawn.rows.tolist() == [1, 3]
    selector.remove(_rows([1]))
    drawn = selector.draw(2, rng=np.random.default_rng(0))
    assert drawn is not None
    assert drawn.rows.tolist() == [3, 4]


def test_draw_when_some_groups_are_very_long_then_the_oldest_rows_of_each_come() -> None:
    ids = np.where(np.arange(6000) % 3 == 0, np.arange(6000) % 2, 10 + np.arange(6000) // 6)
    selector = _selector(ids, 4)
    selector.add(np.random.default_rng(0).permutation(6000))
    selector.remove(np.arange(7))
    drawn = selector.draw(4 * selector.num_complete, rng=np.random.default_rng(0))
    assert drawn is not None
    groups = {int(ids[rows[0]]): rows for rows in drawn.rows.reshape(-1, 4).tolist()}
    assert groups[0] == [12, 18, 24, 30]
    assert groups[1] == [9, 15, 21, 27]
    assert groups[10 + 2] == [13, 14, 16, 17]
    assert len(groups) == selector.num_complete == 1001


def test_remove_when_a_very_long_group_goes_at_once_then_nothing_is_left() -> None:
    selector = _selector(np.zeros(100_000, np.int64), 8)
    selector.add(np.arange(100_000))
    selector.remove(np.arange(99_990)[::-1])
    drawn = selector.draw(8, rng=np.random.default_rng(0))
    assert drawn is not None
    assert drawn.rows.tolist() == list(range(99_990, 99_998))
    selector.remove(np.arange(100_000))
    assert len(selector) == selector.num_complete == 0


@pytest.mark.parametrize(("num_rows", "reason"), [(3, "groups of 2"), (8, "capacity of 6")])
def test_draw_when_it_could_never_be_then_refused(num_rows: int, reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=reason):
        _selector(np.zeros(6, np.int64), 2).draw(num_rows, rng=np.random.default_rng(0))


@pytest.mark.parametrize("size", [0, 7])
def test_selector_when_the_size_cannot_be_then_refused(size: int) -> None:
    with raises(InvalidRequestError, argument="group_size"):
        _selector(np.zeros(6, np.int64), size)


def test_add_when_a_row_is_a_member_then_refused_and_nothing_changed() -> None:
    selector = _selector(np.zeros(6, np.int64), 2)
    selector.add(_rows([1, 2]))
    with pytest.raises(LocalProtocolError):
        selector.add(_rows([3, 2]))
    assert len(selector) == 2
    selector.update(_rows([1, 4]))
    assert repr(selector) == "<GroupSelector 1 of 1 groups complete>"
