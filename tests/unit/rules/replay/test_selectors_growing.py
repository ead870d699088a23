"""Selectors that grow while rows come, go and change."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tdserve.rules.replay.columns import Columns
from tdserve.rules.replay.groups import GroupSelector
from tdserve.rules.replay.order import Fifo
from tdserve.rules.replay.selections import OWN, ViewKey, Views
from tdserve.rules.replay.selector import Selector
from tdserve.rules.replay.settings import Settings
from tdserve.rules.replay.staleness import Staleness

CAPACITY = 24
KEYS = (
    ViewKey(()),
    ViewKey((0,), "a"),
    ViewKey(group="g", group_size=2),
    ViewKey(max_lag=1),
    ViewKey((), group="g", group_size=2, max_lag=3),
)


def rows(*numbers: int) -> Any:
    """Row numbers."""
    return np.array(numbers, np.int64)


def views_of(num_rows: int) -> Views:
    """So many rows, oldest first."""
    columns = Columns(CAPACITY)
    columns.sequence[:] = np.arange(CAPACITY) + 1
    made = Views(Settings(sampler=Fifo()), columns, num_keys=2)
    made.arrive(np.arange(num_rows), None)
    made.enter(np.arange(num_rows))
    return made


def members(views: Views, key: ViewKey) -> list[int]:
    """What a sample under these conditions may have, oldest first."""
    drawn = views.get(key).draw(len(views.get(key)), rng=np.random.default_rng(0))
    assert drawn is not None
    found: list[int] = drawn.rows.tolist()
    return found


class Others:
    """Writers, takers and a policy, which do something of everything at random."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.columns = Columns(CAPACITY)
        self.columns.array("g", np.int64)[:] = np.arange(CAPACITY) // 3
        self.columns.sequence[:] = self.rng.permutation(CAPACITY) + 1
        self.staleness = Staleness(self.columns, uid="p")
        self.views = Views(Settings(sampler=Fifo()), self.columns, num_keys=2, staleness=self.staleness)
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
        self.views.update(self.some(self.present))
        self.take()
        if self.rng.random() < 0.4:
            self.views.follow("p", self.staleness.newest + 1)

    def write(self) -> None:
        coming = self.some(set(range(CAPACITY)) - self.present)
        self.views.arrive(coming, None if self.rng.random() < 0.7 else (1,))
        self.columns.sequence[coming] = self.columns.sequence.max() + 1 + np.arange(len(coming))
        self.staleness.arrive(coming, None)
        self.views.enter(coming)
        self.present |= set(coming.tolist())

    def leave(self) -> None:
        leaving = self.some(self.present)
        if self.rng.random() < 0.5:
            self.views.suspend(leaving)
            self.views.note_written(leaving, (0,))
            self.views.enter(leaving)
            return
        self.views.leave(leaving)
        self.present -= set(leaving.tolist())
        self.held = {row: owner for row, owner in self.held.items() if row in self.present}

    def take(self) -> None:
        taken = self.some(self.present - set(self.held))
        self.owner += 1
        self.views.lease(self.owner, OWN, taken)
        self.held |= dict.fromkeys(taken.tolist(), self.owner)
        if self.held and self.rng.random() < 0.5:
            first = next(iter(self.held.values()))
            self.views.give_back(first, OWN, rows(*(row for row, owner in self.held.items() if owner == first)))
            self.held = {row: owner for row, owner in self.held.items() if owner != first}


def check_grown(views: Views, key: ViewKey, selector: Selector) -> None:
    """What has grown has just the rows that a new selector of the same conditions gets."""
    assert views.get(key) is selector
    found = views.make(key)
    candidates = views._candidates(key)
    found.add(candidates[views._fits(key, candidates)])
    assert len(selector) == len(found)
    rng = np.random.default_rng(0)
    if isinstance(selector, GroupSelector) and isinstance(found, GroupSelector):
        assert selector.num_complete == found.num_complete
        drawn, expected = (each.draw(2 * each.num_complete, rng=rng) for each in (selector, found))
    else:
        drawn, expected = (each.draw(len(each), rng=rng) if len(each) else None for each in (selector, found))
    if drawn is not None and expected is not None:
        assert sorted(drawn.rows.tolist()) == sorted(expected.rows.tolist())


@pytest.mark.parametrize("seed", range(40))
def test_growing_when_rows_come_go_and_change_in_between_then_as_made_at_once(seed: int) -> None:
    others = Others(seed)
    others.act()
    others.act()
    views = others.views
    for key in KEYS:
        selector = views.make(key)
        for _ in views.growing(key, selector, piece_rows=5):
            others.act()
        check_grown(views, key, selector)
        others.act()
        if views.has(key):
            check_grown(views, key, selector)


def test_growing_when_the_policy_is_another_then_none_of_it_is_kept() -> None:
    columns = Columns(CAPACITY)
    views = Views(Settings(), columns, num_keys=1, staleness=Staleness(columns, uid="p"))
    views.arrive(np.arange(CAPACITY), None)
    views.enter(np.arange(CAPACITY))
    key = ViewKey(max_lag=0)
    steps = views.growing(key, views.make(key), piece_rows=4)
    next(steps)
    views.follow("another", 3)
    assert list(steps) == []
    assert not views.has(key)
    assert len(views.get(key)) == 0
    assert views.is_plain is False


def test_growing_when_given_up_then_the_next_begins_anew() -> None:
    views, key = views_of(6), ViewKey(consumer="a")
    steps = views.growing(key, views.make(key), piece_rows=2)
    next(steps)
    next(steps)
    steps.close()
    assert not views.has(key)
    for _ in views.growing(key, views.make(key), piece_rows=2):
        pass
    assert members(views, key) == [0, 1, 2, 3, 4, 5]


def test_growing_when_a_crash_has_left_what_another_consumer_had_then_it_is_not_its() -> None:
    columns = Columns(CAPACITY)
    columns.array("consumed", np.uint64)[:] = 3
    views = Views(Settings(sampler=Fifo()), columns, num_keys=1, consumers=["a"])
    views.enter(np.arange(6))
    assert members(views, ViewKey(consumer="a")) == []
    key = ViewKey(consumer="b")
    for _ in views.growing(key, views.make(key), piece_rows=2):
        pass
    assert views.consumers == ["a", "b"]
    assert members(views, key) == [0, 1, 2, 3, 4, 5]
