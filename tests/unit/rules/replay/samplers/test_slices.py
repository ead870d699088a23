from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tdserve.base.errors import InvalidRequestError, LocalProtocolError
from tdserve.rules.replay.row_indexes.columns import RowColumns
from tdserve.rules.replay.samplers.selector import Drawn, Selector
from tdserve.rules.replay.samplers.slices import Search, Slices
from tests import chi_square
from tests.state_machines import make_tests
from tests.unit.rules.replay.slice_model import Model, row_numbers

_LENGTHS = (1, 2, 3, 5, 8)
_SETTINGS = (
    Slices(slice_len=3),
    Slices(slice_len=4, strict_length=False),
    Slices(num_slices=2),
    Slices(num_slices=2, strict_length=False),
)


def _rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def _cut(drawn: Drawn | None) -> list[tuple[int, ...]]:
    """The slices of a draw."""
    assert drawn is not None
    ends = np.flatnonzero(drawn.columns["slice_end"]) + 1
    assert ends[-1] == len(drawn.rows) == len(drawn.columns["slice_end"])
    return [tuple(part.tolist()) for part in np.split(drawn.rows, ends[:-1])]


class _AgainstLists(RuleBasedStateMachine):
    capacity = 14

    def __init__(self) -> None:
        super().__init__()
        self.model = Model(self.capacity)
        for setting in _SETTINGS:
            self.model.view(setting)
        self.searches: dict[int, tuple[Search, Iterator[None] | None]] = {}

    @rule(num=st.integers(2, 3), length=st.sampled_from(_LENGTHS))
    def search(self, num: int, length: int) -> None:
        """Begins a search, passes over the table, or finishes by a step; others act in between."""
        selector, _ = self.model.selectors[num]
        if num not in self.searches:
            begun = selector.prepare(2 * length)
            assert (begun is not None) == selector.is_unprepared(2 * length)
            if begun is not None:
                self.searches[num] = begun, None
            return
        search, steps = self.searches[num]
        if steps is None:
            search.search()
            self.searches[num] = search, search.finish_in_pieces()
        elif next(steps, self) is self:
            assert not selector.is_unprepared(2 * search.length)
            del self.searches[num]

    @rule(writer=st.integers(0, 3), ends=st.lists(st.booleans(), min_size=1, max_size=5))
    def write(self, writer: int, ends: list[bool]) -> None:
        self.model.write(writer, ends)

    @rule(num_rounds=st.integers(1, 3), end=st.integers(0, 11))
    def write_in_turn(self, num_rounds: int, end: int) -> None:
        for turn in range(4 * num_rounds):
            self.model.write(turn % 4, [turn == end])

    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        self.model.remove(data.draw(st.lists(st.integers(0, self.capacity - 1), unique=True)))

    @rule(data=st.data(), num=st.integers(0, 3))
    def leave_a_view(self, data: st.DataObject, num: int) -> None:
        selector, members = self.model.selectors[num]
        rows = data.draw(st.lists(st.integers(0, self.capacity - 1), unique=True))
        selector.remove(row_numbers(rows))
        members.difference_update(rows)

    @rule(data=st.data(), num=st.integers(0, 3))
    def come_back_to_a_view(self, data: st.DataObject, num: int) -> None:
        selector, members = self.model.selectors[num]
        rows = data.draw(st.permutations(sorted(set(self.model.live) - members)))
        rows = rows[: data.draw(st.integers(0, len(rows)))]
        selector.add(row_numbers(rows))
        members.update(rows)

    @rule(num=st.integers(2, 3), length=st.sampled_from(_LENGTHS))
    def ask_for_a_length(self, num: int, length: int) -> None:
        self.model.selectors[num][0].list_starts(length)

    @rule(num=st.integers(0, 3), seed=st.integers(0, 2**32))
    def draw(self, num: int, seed: int) -> None:
        selector, members = self.model.selectors[num]
        setting = _SETTINGS[num]
        length = setting.slice_len or 2
        valid = self.model.slices(members, length, strict=setting.strict_length)
        drawn = selector.draw(2 * length, rng=_rng(seed))
        assert (drawn is None) == (not valid)
        if drawn is not None:
            assert len(found := _cut(drawn)) == 2
            assert set(found) <= valid

    @rule(data=st.data())
    def update(self, data: st.DataObject) -> None:
        rows = data.draw(st.lists(st.integers(0, self.capacity - 1), unique=True))
        for selector, _ in self.model.selectors:
            selector.update(row_numbers(rows))

    @invariant()
    def starts_are_the_same(self) -> None:
        for setting, (selector, members) in zip(_SETTINGS, self.model.selectors, strict=True):
            assert len(selector) == len(members)
            for length in map(int, re.findall(r"\d+", repr(selector).partition("starts of ")[2])):
                valid = self.model.slices(members, length, strict=setting.strict_length)
                assert selector.list_starts(length).tolist() == sorted(rows[0] for rows in valid)


class _AgainstListsInALargeTable(_AgainstLists):
    """The table is so large that a pass over it finds starts only for a new length."""

    capacity = 4000

    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        live = self.model.live
        self.model.remove(data.draw(st.lists(st.sampled_from(live), unique=True)) if live else [])

    @rule(data=st.data(), num=st.integers(0, 3))
    def leave_a_view(self, data: st.DataObject, num: int) -> None:
        selector, members = self.model.selectors[num]
        rows = data.draw(st.lists(st.sampled_from(sorted(members)), unique=True)) if members else []
        selector.remove(row_numbers(rows))
        members.difference_update(rows)


TestAgainstLists, TestAgainstListsWithAllExamples = make_tests(_AgainstLists, num_examples=40, num_steps=40)
TestAgainstListsInALargeTable, TestAgainstListsInALargeTableWithAllExamples = make_tests(
    _AgainstListsInALargeTable, num_examples=25, num_steps=30
)


@pytest.mark.slow
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in (1, 2))])
def test_draw_when_writers_take_turns_and_rows_come_and_go_then_every_start_is_equally_likely(
    seed: int, strict: bool
) -> None:
    rng = _rng(seed)
    model = Model(200)
    view = model.view(Slices(slice_len=8, strict_length=strict))
    for turn in range(3000):
        model.write(turn % 4, [bool(rng.random() < 0.05)])
        if turn % 100 == 99:
            model.remove(rng.choice(model.live, 2, replace=False).tolist())
    valid = sorted(model.slices(set(model.live), 8, strict=strict))
    found = _cut(view.draw(8 * 20_000, rng=rng))
    place = {rows: num for num, rows in enumerate(valid)}
    counts = np.bincount([place[rows] for rows in found], minlength=len(valid))
    assert len(valid) > 20
    assert chi_square.statistic(counts) < chi_square.limit(len(valid))


def test_draw_when_the_ring_writes_over_a_trajectory_then_no_slice_crosses_the_writing_position() -> None:
    model = Model(10)
    view = model.view(Slices(slice_len=4))
    model.write(0, [False] * 10)
    model.write(0, [False] * 3)
    assert view.list_starts(4).tolist() == [3, 4, 5, 6, 7, 8, 9]  # row 9 goes on in row 0, and row 2 not in row 3
    model.write(1, [False] * 3)
    assert view.list_starts(4).tolist() == [6, 7, 8, 9]
    assert set(_cut(view.draw(4 * 100, rng=_rng()))) == {(6, 7, 8, 9), (7, 8, 9, 0), (8, 9, 0, 1), (9, 0, 1, 2)}


def test_draw_when_a_trajectory_ends_then_no_slice_crosses_its_end() -> None:
    model = Model(10)
    view: Selector = model.view(Slices(slice_len=2))
    model.write(0, [False, False, True, False, False])
    drawn = view.draw(400, rng=_rng())
    assert set(_cut(drawn)) == {(0, 1), (1, 2), (3, 4)}
    assert drawn is not None
    assert drawn.columns["slice_end"].tolist() == [False, True] * 200


def test_draw_when_only_shorter_trajectories_ended_then_they_come_whole_and_fewer_rows() -> None:
    model = Model(10)
    view = model.view(Slices(slice_len=4, strict_length=False))
    model.write(0, [False, True, False, False])
    drawn = view.draw(40, rng=_rng())
    assert set(_cut(drawn)) == {(0, 1)}
    assert drawn is not None
    assert len(drawn.rows) == 20
    model.write(0, [True])
    assert set(_cut(view.draw(40, rng=_rng()))) == {(0, 1), (2, 3, 4)}


def test_draw_when_slices_are_longer_than_the_table_then_whole_trajectories_come() -> None:
    model = Model(6)
    view = model.view(Slices(slice_len=1000, strict_length=False))
    model.write(0, [False] * 5 + [True])
    assert _cut(view.draw(2000, rng=_rng())) == [(0, 1, 2, 3, 4, 5)] * 2


def test_draw_when_nowhere_begins_a_slice_then_waits() -> None:
    model = Model(10)
    view = model.view(Slices(slice_len=3))
    assert view.draw(3, rng=_rng()) is None
    model.write(0, [False, False])
    model.write(1, [False])
    assert view.draw(3, rng=_rng()) is None
    model.write(0, [False])
    assert _cut(view.draw(3, rng=_rng())) == [(0, 1, 3)]


def test_draw_when_slices_are_counted_then_their_length_follows_from_the_rows() -> None:
    model = Model(20)
    view = model.view(Slices(num_slices=2))
    model.write(0, [False] * 20)
    for length in (3, 5, 10, 1, 7, 20):
        assert [len(rows) for rows in _cut(view.draw(2 * length, rng=_rng()))] == [length] * 2
    # The last four lengths that were asked for.
    assert repr(view) == "<SliceSelector 20 members, starts of [10, 1, 7, 20]>"


def test_draw_slices_when_each_is_removed_before_the_next_then_none_overlap() -> None:
    model = Model(20)
    view = model.view(Slices(num_slices=4))
    model.write(0, [False] * 20)
    seen: list[int] = []
    while (drawn := view.draw_slices(1, 3, rng=_rng(len(seen)))) is not None:
        (rows,) = _cut(drawn)
        view.remove(drawn.rows)
        seen += rows
    assert len(seen) == len(set(seen)) == 20 - len(view) >= 12


@pytest.mark.slow
def test_starts_when_many_rows_come_and_go_at_once_then_as_one_by_one() -> None:
    at_once, single = Model(3000), Model(3000)
    views = [model.view(Slices(slice_len=7, strict_length=False)) for model in (at_once, single)]
    ends = (_rng(1).random((4, 600)) < 0.1).tolist()
    for model in (at_once, single):
        for writer in range(4):
            model.write(writer, ends[writer], list(range(writer, 2400, 4)))
    gone = _rng(2).permutation(2400)[:1500]
    views[0].remove(gone)
    for row in gone.tolist():
        views[1].remove(row_numbers([row]))
    assert views[0].list_starts(7).tolist() == views[1].list_starts(7).tolist() != []
    back = gone[::-1][:1000]
    views[0].add(back)
    for row in back.tolist():
        views[1].add(row_numbers([row]))
    assert views[0].list_starts(7).tolist() == views[1].list_starts(7).tolist() != []


@pytest.mark.parametrize(
    ("setting", "num_rows", "reason"),
    [
        (Slices(slice_len=3), 7, "7 rows are not a whole number of slices of 3 rows"),
        (Slices(num_slices=3), 7, "7 rows are not a whole number of rows in each of 3 slices"),
        (Slices(num_slices=2), 22, "slices of 11 rows never fit into a capacity of 10"),
    ],
)
def test_draw_when_it_could_never_be_then_refused(setting: Slices, num_rows: int, reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=reason):
        Model(10).view(setting).draw(num_rows, rng=_rng())


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"slice_len": 2, "num_slices": 2},
        {"slice_len": 0},
        {"slice_len": True},
        {"num_slices": 1.5},
        {"num_slices": "2"},
        {"slice_len": 2, "end_key": "done", "trajectory_key": "episode"},
        {"slice_len": 2, "end_key": ""},
        {"slice_len": 2, "end_key": ()},
        {"slice_len": 2, "trajectory_key": ("next", 1)},
        {"slice_len": 2, "trajectory_key": 1},
        {"slice_len": 2, "strict_length": 1},
    ],
    ids=str,
)
def test_slices_when_a_value_cannot_be_then_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError):
        Slices(**arguments)


def test_check_when_a_slice_is_longer_than_the_table_then_refused_unless_shorter_ones_count() -> None:
    with pytest.raises(InvalidRequestError, match="slices of 11 rows never fit into a capacity of 10"):
        Slices(slice_len=11).check(10)
    Slices(slice_len=10).check(10)
    Slices(slice_len=11, strict_length=False).check(10)


def test_slices_when_stored_as_json_then_equal_again() -> None:
    for setting in (Slices(slice_len=2, end_key=("next", "done")), Slices(num_slices=2, trajectory_key="episode")):
        assert Slices(**json.loads(json.dumps(dataclasses.asdict(setting)))) == setting
    assert Slices(slice_len=2, end_key="done") == Slices(slice_len=2, end_key=("done",))
    assert hash(Slices(slice_len=2, end_key="done")) == hash(Slices(slice_len=2, end_key=("done",)))


def test_selector_when_the_table_has_no_trajectories_then_our_own_fault() -> None:
    with pytest.raises(LocalProtocolError):
        Slices(slice_len=2).make_selector(RowColumns(4), 4)


def test_add_when_a_row_is_a_member_then_refused_and_nothing_changed() -> None:
    model = Model(10)
    view = model.view(Slices(slice_len=2))
    model.write(0, [False] * 3)
    with pytest.raises(LocalProtocolError):
        view.add(row_numbers([5, 2]))
    assert len(view) == 3
    assert view.list_starts(2).tolist() == [0, 1]


@pytest.mark.slow
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("length", [3, 40])
def test_starts_when_very_many_rows_of_writers_that_take_turns_come_and_go_then_as_a_pass_finds_them(
    strict: bool, length: int
) -> None:
    rng, num_rows = _rng(), 100_000
    model = Model(num_rows)
    setting = Slices(slice_len=length, strict_length=strict)
    view, is_member = model.view(setting), np.zeros(num_rows, np.bool_)
    for start in range(0, 2 * num_rows, 2000):
        rows = np.arange(start, start + 2000) % num_rows
        if start >= num_rows:
            view.remove(rows)
            model.links.remove(rows)
        model.columns.sequence[rows] = np.arange(start, start + 2000)
        model.links.append(rows, writer=0, ids=rng.integers(0, 50, 2000), ends=rng.random(2000) < 0.01)
        view.add(rows)
        is_member[rows] = True
        some = rng.choice(num_rows, 1000, replace=False)
        some = some[is_member[some]]
        view.remove(some)
        if start % 3:
            view.add(rng.permutation(some))
        else:
            model.links.remove(some)
            is_member[some] = False
    assert 0 < len(view.list_starts(length)) < num_rows
    passing = Slices(num_slices=1, strict_length=strict).make_selector(model.columns, num_rows)
    passing.add(np.flatnonzero(is_member))
    assert passing.is_unprepared(length)
    assert view.list_starts(length).tolist() == passing.list_starts(length).tolist()
