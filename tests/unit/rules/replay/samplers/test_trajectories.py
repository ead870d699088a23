from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tdserve.messages.row_numbers import Rows
from tdserve.rules.replay.row_indexes.columns import RowColumns
from tdserve.rules.replay.samplers.trajectories import Trajectories
from tests.state_machines import make_tests

_CAPACITY = 16


def _rows(rows: Iterable[int]) -> Rows:
    return np.array(list(rows), np.int64)


def _make(capacity: int = 12) -> tuple[RowColumns, Trajectories]:
    columns = RowColumns(capacity)
    columns.sequence[:] = np.arange(capacity)
    return columns, Trajectories(columns, capacity)


class _AgainstLists(RuleBasedStateMachine):
    """The model keeps each trajectory as a list of its places: rows, or None if a row has gone."""

    def __init__(self) -> None:
        super().__init__()
        self.columns = RowColumns(_CAPACITY)
        self.trajectories = Trajectories(self.columns, _CAPACITY)
        self.model: list[list[int | None]] = []
        self.open: dict[tuple[int, int | None], list[int | None]] = {}
        self.ends: set[int] = set()
        self.sequence = 0

    @property
    def live(self) -> set[int]:
        return {row for places in self.model for row in places if row is not None}

    @rule(data=st.data(), writer=st.integers(0, 2), has_ids=st.booleans(), has_ends=st.booleans())
    def append(self, data: st.DataObject, writer: int, has_ids: bool, has_ends: bool) -> None:
        absent = sorted(set(range(_CAPACITY)) - self.live)
        rows = data.draw(st.lists(st.sampled_from(absent), unique=True, max_size=6)) if absent else []
        flags = [data.draw(st.booleans()) if has_ends else False for _ in rows]
        ids = [data.draw(st.integers(-1, 2)) if has_ids else None for _ in rows]
        for row, flag, name in zip(rows, flags, ids, strict=True):
            self.columns.sequence[row] = self.sequence = self.sequence + 1
            if (writer, name) not in self.open:
                self.model.append([])
            places = self.open.setdefault((writer, name), self.model[-1])
            places.append(row)
            if flag:
                self.ends.add(row)
                del self.open[writer, name]
        given_ids = np.array(ids, np.int64) if has_ids else None
        given_ends = np.array(flags, np.bool_) if has_ends else None
        self.trajectories.append(_rows(rows), writer=writer, ends=given_ends, ids=given_ids)

    @rule(data=st.data(), writer=st.integers(0, 2), has_ids=st.booleans(), num_first=st.integers(0, 6))
    def append_and_take_back(self, data: st.DataObject, writer: int, has_ids: bool, num_first: int) -> None:
        rows = _rows(sorted(set(range(_CAPACITY)) - self.live)[:6])
        ids = np.array([data.draw(st.integers(-1, 2)) for _ in rows], np.int64) if has_ids else None
        ends = np.array([data.draw(st.booleans()) for _ in rows], np.bool_)
        parts = [slice(0, num_first), slice(num_first, None)]
        for part in parts:
            own_ids = None if ids is None else ids[part]
            self.trajectories.append(rows[part], writer=writer, ends=ends[part], ids=own_ids)
        for part in reversed(parts):
            self.trajectories.take_back(rows[part], writer=writer, ids=None if ids is None else ids[part])

    @rule(rows=st.lists(st.integers(0, _CAPACITY - 1), unique=True))
    def remove(self, rows: list[int]) -> None:
        self.trajectories.remove(_rows(rows))
        for places in self.model:
            places[:] = [None if row in rows else row for row in places]
        self.ends -= set(rows)
        self.open = {key: places for key, places in self.open.items() if places[-1] is not None}

    @rule()
    def restart(self) -> None:
        self.trajectories = Trajectories(self.columns, _CAPACITY)
        self.trajectories.restore(_rows(sorted(self.live)))
        self.open = {}

    @invariant()
    def links_are_the_same(self) -> None:
        after = dict.fromkeys(range(_CAPACITY), -1)
        for places in self.model:
            for first, second in pairwise(places):
                if first is not None and second is not None:
                    after[first] = second
        before = {**dict.fromkeys(range(_CAPACITY), -1), **{row: first for first, row in after.items() if row != -1}}
        assert self.trajectories.after.tolist() == [*after.values(), -1]
        assert self.trajectories.before.tolist() == [*(before[row] for row in range(_CAPACITY)), -1]
        assert (self.columns.previous == self.trajectories.before[:-1] + 1).all()
        assert set(np.flatnonzero(self.columns.is_end).tolist()) == self.ends
        assert self.trajectories.num_open == len(self.open)


TestAgainstLists, TestAgainstListsWithAllExamples = make_tests(_AgainstLists)


def test_follow_when_writers_take_turns_row_by_row_then_each_finds_its_own() -> None:
    _, trajectories = _make(12)
    for row in range(12):
        trajectories.append(_rows([row]), writer=f"actor {row % 4}", ends=np.array([row == 5]))
    assert trajectories.follow(_rows([0, 1, 6]), 3).tolist() == [[0, 4, 8], [1, 5, -1], [6, 10, -1]]
    assert trajectories.follow(_rows([0]), 1).tolist() == [[0]]
    assert trajectories.follow(_rows([]), 2).shape == (0, 2)


def test_follow_when_there_are_many_starts_then_as_from_each_alone() -> None:
    _, trajectories = _make(40)
    trajectories.append(np.arange(40), writer=1, ids=np.arange(40) % 3, ends=np.arange(40) % 7 == 0)
    starts = np.arange(40)
    alone = np.concatenate([trajectories.follow(starts[row : row + 1], 6) for row in range(40)])
    assert trajectories.follow(starts, 6).tolist() == alone.tolist()


def test_append_when_ids_mix_in_a_batch_then_each_goes_on_where_it_was() -> None:
    _, trajectories = _make()
    ids = np.array([-1, 2, -1, 2, 3])
    trajectories.append(np.arange(5), writer=1, ids=ids, ends=np.array([0, 0, 0, 1, 0], np.bool_))
    trajectories.append(np.arange(5, 8), writer=1, ids=np.array([2, -1, -1]))
    trajectories.append(np.arange(8, 9), writer=2, ids=np.array([-1]))
    found = trajectories.follow(_rows([0, 1, 4, 5, 8]), 4).tolist()
    assert found == [[0, 2, 6, 7], [1, 3, -1, -1], [4, -1, -1, -1], [5, -1, -1, -1], [8, -1, -1, -1]]
    assert trajectories.num_open == 4


def test_append_when_a_row_is_filled_anew_then_nothing_is_left_of_the_row_before() -> None:
    columns, trajectories = _make(3)
    trajectories.append(_rows([0, 1, 2]), writer=1, ends=np.array([False, True, False]))
    trajectories.remove(_rows([0, 1]))
    trajectories.append(_rows([1, 0]), writer=1)
    assert columns.is_end.tolist() == [False] * 3
    assert trajectories.follow(_rows([2]), 4).tolist() == [[2, 1, 0, -1]]


def test_remove_when_the_last_row_of_an_open_trajectory_goes_then_its_writer_begins_another() -> None:
    _, trajectories = _make()
    trajectories.append(_rows([0, 1]), writer=1)
    trajectories.remove(_rows([1]))
    assert trajectories.num_open == 0
    trajectories.append(_rows([1, 2]), writer=1)
    assert trajectories.follow(_rows([0, 1]), 3).tolist() == [[0, -1, -1], [1, 2, -1]]


def test_remove_when_rows_from_the_midst_go_then_both_sides_stay_apart() -> None:
    columns, trajectories = _make()
    trajectories.append(np.arange(6), writer=1)
    trajectories.remove(_rows([3, 2]))
    assert trajectories.follow(_rows([0, 4]), 3).tolist() == [[0, 1, -1], [4, 5, -1]]
    assert columns.previous[:6].tolist() == [0, 1, 0, 0, 0, 5]
    assert trajectories.num_open == 1


@pytest.mark.parametrize("claimed", [-7, -1, 3, 5, 9, 100], ids=str)
def test_restore_when_a_stored_link_leads_astray_then_it_is_dropped(claimed: int) -> None:
    columns, trajectories = _make(6)
    trajectories.append(np.arange(3), writer=1, ends=np.array([False, False, True]))
    columns.sequence[4] = 99
    columns.previous[3] = claimed  # no row, the row that ended, a newer one, none, out of range
    restored = Trajectories(columns, 6)
    restored.restore(_rows([0, 1, 2, 3, 4]))
    assert restored.follow(_rows([0, 3]), 4).tolist() == [[0, 1, 2, -1], [3, -1, -1, -1]]
    assert columns.previous.tolist() == [0, 1, 2, 0, 0, 0]


def test_restore_when_two_rows_claim_to_follow_one_then_one_does() -> None:
    columns, trajectories = _make(4)
    columns.previous[[2, 3]] = 1
    trajectories.restore(np.arange(4))
    assert (trajectories.before[:4] == 0).sum() == 1
    assert trajectories.before[trajectories.after[0]] == 0
    assert np.count_nonzero(columns.previous) == 1


def test_restore_when_a_row_before_is_not_live_then_the_link_is_dropped() -> None:
    columns, trajectories = _make(4)
    trajectories.append(np.arange(4), writer=1)
    trajectories.restore(_rows([0, 2, 3]))
    assert trajectories.follow(_rows([0, 2]), 2).tolist() == [[0, -1], [2, 3]]
    assert trajectories.num_open == 0
    assert columns.previous[[0, 2, 3]].tolist() == [0, 0, 3]


def test_repr_when_shown_then_has_the_number_of_open_ones() -> None:
    _, trajectories = _make()
    trajectories.append(_rows([0, 1]), writer=1)
    trajectories.append(_rows([]), writer=2)
    assert repr(trajectories) == "<Trajectories of 12 rows, 1 open>"
