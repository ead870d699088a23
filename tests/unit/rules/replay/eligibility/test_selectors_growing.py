"""Selectors that grow while rows come, go and change."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

from tdserve.rules.replay.eligibility.conditional_selectors import GROWING_ROWS, MAX_SELECTORS, ConditionalSelectors
from tdserve.rules.replay.eligibility.conditions import OWN, SampleConditions
from tdserve.rules.replay.eligibility.group_selector import GroupSelector
from tdserve.rules.replay.eligibility.staleness import Staleness
from tdserve.rules.replay.row_indexes.columns import RowColumns
from tdserve.rules.replay.samplers.order import Fifo
from tdserve.rules.replay.samplers.sampler import Uniform
from tdserve.rules.replay.samplers.selector import Selector
from tdserve.rules.replay.samplers.without_replacement import WithoutReplacement
from tdserve.rules.replay.settings import Settings

CAPACITY = 24
KEYS = (
    SampleConditions(()),
    SampleConditions((0,), "a"),
    SampleConditions(group="g", group_size=2),
    SampleConditions(max_lag=1),
    SampleConditions((), group="g", group_size=2, max_lag=3),
)


def rows(*numbers: int) -> Any:
    """Row numbers."""
    return np.array(numbers, np.int64)


def views_of(num_rows: int) -> ConditionalSelectors:
    """Returns the selectors of so many rows, the oldest first."""
    columns = RowColumns(CAPACITY)
    columns.sequence[:] = np.arange(CAPACITY) + 1
    made = ConditionalSelectors(Settings(sampler=Fifo()), columns, num_keys=2)
    made.arrive(np.arange(num_rows), None)
    made.enter(np.arange(num_rows))
    return made


def members(selectors: ConditionalSelectors, key: SampleConditions) -> list[int]:
    """What a sample under these conditions may have, oldest first."""
    drawn = selectors.get(key).draw(len(selectors.get(key)), rng=np.random.default_rng(0))
    assert drawn is not None
    found: list[int] = drawn.rows.tolist()
    return found


class Others:
    """Writers, takers and a policy, which do something of everything at random."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.columns = RowColumns(CAPACITY)
        self.columns.get_array("g", np.int64)[:] = np.arange(CAPACITY) // 3
        self.columns.sequence[:] = self.rng.permutation(CAPACITY) + 1
        self.staleness = Staleness(self.columns, uid="p")
        self.selectors = ConditionalSelectors(
            Settings(sampler=Fifo()), self.columns, num_keys=2, staleness=self.staleness
        )
        self.present: set[int] = set()
        self.held: dict[int, int] = {}
        self.owner = 0

    def some(self, of: set[int]) -> Any:
        """A third of these rows."""
        return rows(*(row for row in sorted(of) if self.rng.random() < 0.3))

    def act(self) -> None:
        """Something of everything."""
        self.write()
        self.leave()
        self.selectors.update(self.some(self.present))
        self.take()
        if self.rng.random() < 0.4:
            self.selectors.follow("p", self.staleness.newest + 1)

    def write(self) -> None:
        coming = self.some(set(range(CAPACITY)) - self.present)
        self.selectors.arrive(coming, None if self.rng.random() < 0.7 else (1,))
        self.columns.sequence[coming] = self.columns.sequence.max() + 1 + np.arange(len(coming))
        self.staleness.arrive(coming, None)
        self.selectors.enter(coming)
        self.present |= set(coming.tolist())

    def leave(self) -> None:
        leaving = self.some(self.present)
        if self.rng.random() < 0.5:
            self.selectors.suspend(leaving)
            self.selectors.note_written(leaving, (0,))
            self.selectors.enter(leaving)
            return
        self.selectors.leave(leaving)
        self.present -= set(leaving.tolist())
        self.held = {row: owner for row, owner in self.held.items() if row in self.present}

    def take(self) -> None:
        taken = self.some(self.present - set(self.held))
        self.owner += 1
        self.selectors.lease(self.owner, OWN, taken)
        self.held |= dict.fromkeys(taken.tolist(), self.owner)
        if self.held and self.rng.random() < 0.5:
            first = next(iter(self.held.values()))
            self.selectors.give_back(first, OWN, rows(*(row for row, owner in self.held.items() if owner == first)))
            self.held = {row: owner for row, owner in self.held.items() if owner != first}


def check_grown(selectors: ConditionalSelectors, key: SampleConditions, selector: Selector) -> None:
    """A selector that has grown has exactly the rows of a new selector with the same conditions."""
    assert selectors.get(key) is selector
    others = copy.deepcopy(selectors)
    for number in range(MAX_SELECTORS):
        others.get(SampleConditions(max_lag=1000 + number))
    assert not others.has(key)
    found = others.get(key)
    assert len(selector) == len(found)
    rng = np.random.default_rng(0)
    if isinstance(selector, GroupSelector) and isinstance(found, GroupSelector):
        assert selector.num_complete == found.num_complete
        drawn, expected = (each.draw(2 * each.num_complete, rng=rng) for each in (selector, found))
    else:
        drawn, expected = (each.draw(len(each), rng=rng) if len(each) else None for each in (selector, found))
    if drawn is not None and expected is not None:
        assert sorted(drawn.rows.tolist()) == sorted(expected.rows.tolist())


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_growing_when_rows_come_go_and_change_in_between_then_as_made_at_once(seed: int) -> None:
    others = Others(seed)
    others.act()
    others.act()
    selectors = others.selectors
    for key in KEYS:
        selector = selectors.make(key)
        for _ in selectors.grow_in_pieces(key, selector, piece_rows=5):
            others.act()
        check_grown(selectors, key, selector)
        others.act()
        if selectors.has(key):
            check_grown(selectors, key, selector)


def test_growing_when_the_policy_is_another_then_none_of_it_is_kept() -> None:
    columns = RowColumns(CAPACITY)
    selectors = ConditionalSelectors(Settings(), columns, num_keys=1, staleness=Staleness(columns, uid="p"))
    selectors.arrive(np.arange(CAPACITY), None)
    selectors.enter(np.arange(CAPACITY))
    key = SampleConditions(max_lag=0)
    steps = selectors.grow_in_pieces(key, selectors.make(key), piece_rows=4)
    next(steps)
    selectors.follow("another", 3)
    assert list(steps) == []
    assert not selectors.has(key)
    assert len(selectors.get(key)) == 0
    assert selectors.is_plain is False


def test_growing_when_given_up_then_the_next_begins_anew() -> None:
    selectors, key = views_of(6), SampleConditions(consumer="a")
    steps = selectors.grow_in_pieces(key, selectors.make(key), piece_rows=2)
    next(steps)
    next(steps)
    steps.close()
    assert not selectors.has(key)
    for _ in selectors.grow_in_pieces(key, selectors.make(key), piece_rows=2):
        pass
    assert members(selectors, key) == [0, 1, 2, 3, 4, 5]


def test_growing_when_a_crash_has_left_what_another_consumer_had_then_it_is_not_its() -> None:
    columns = RowColumns(CAPACITY)
    columns.get_array("consumed", np.uint64)[:] = 3
    selectors = ConditionalSelectors(Settings(sampler=Fifo()), columns, num_keys=1, consumers=["a"])
    selectors.enter(np.arange(6))
    assert members(selectors, SampleConditions(consumer="a")) == []
    key = SampleConditions(consumer="b")
    for _ in selectors.grow_in_pieces(key, selectors.make(key), piece_rows=2):
        pass
    assert selectors.consumers.names == ["a", "b"]
    assert members(selectors, key) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("sampler", [Fifo(), Uniform(), WithoutReplacement()])
def test_shedding_when_very_many_rows_are_too_old_then_as_made_at_once_whatever_happens_in_between(
    sampler: Any,
) -> None:
    capacity, key = 8 * GROWING_ROWS, SampleConditions(max_lag=1)
    columns = RowColumns(capacity)
    columns.sequence[:] = np.arange(capacity) + 1
    staleness = Staleness(columns, uid="p")
    selectors = ConditionalSelectors(Settings(sampler=sampler), columns, num_keys=1, staleness=staleness)
    every = np.arange(capacity)
    staleness.arrive(every, None)
    selectors.enter(every)
    selector = selectors.get(key)
    selectors.follow("p", 1)
    assert selectors.has(key)
    selectors.follow("p", 2)
    assert not selectors.has(key)
    steps = selectors.shed_in_pieces(key)
    next(steps)
    assert 0 < len(selector) < capacity
    back, new, gone = every[-9:], every[:7], every[-30:-20]
    selectors.suspend(back)
    selectors.enter(back)
    selectors.leave(new)
    staleness.arrive(new, None)
    selectors.enter(new)
    selectors.leave(gone)
    next(steps)
    selectors.follow("p", 4)  # rows that came meanwhile are too old as well
    last = every[40:45]
    selectors.leave(last)
    staleness.arrive(last, None)
    selectors.enter(last)
    assert len(list(steps)) > 2
    assert selectors.has(key)
    assert selectors.get(key) is selector
    assert len(selector) == len(last)
    assert set(members(selectors, key)) <= set(last.tolist())


def test_shedding_when_the_policy_is_another_then_it_ends() -> None:
    columns = RowColumns(4 * GROWING_ROWS)
    selectors = ConditionalSelectors(Settings(), columns, num_keys=1, staleness=Staleness(columns, uid="p"))
    key = SampleConditions(max_lag=0)
    selectors.enter(np.arange(4 * GROWING_ROWS))
    selectors.get(key)
    selectors.follow("p", 1)
    steps = selectors.shed_in_pieces(key)
    next(steps)
    selectors.follow("another", 1)
    assert list(steps) == []
    assert not selectors.has(key)
    assert len(selectors.dropped) == 1
    assert len(selectors.get(key)) == 0
