from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tdserve.base.errors import CapacityError, WrongStateError
from tdserve.rules.replay.columns import Columns
from tdserve.rules.replay.groups import GroupSelector
from tdserve.rules.replay.order import Fifo
from tdserve.rules.replay.sampler import Uniform
from tdserve.rules.replay.selections import MAX_CONSUMERS, MAX_NAMED, MAX_VIEWS, OWN, PLAIN, ViewKey, Views
from tdserve.rules.replay.settings import Settings
from tdserve.rules.replay.staleness import Staleness
from tdserve.rules.replay.without_replacement import WithoutReplacement

CAPACITY = 8


def rows(*numbers: int) -> Any:
    """Row numbers."""
    return np.array(numbers, np.int64)


@pytest.fixture
def columns() -> Columns:
    """Eight rows in order."""
    made = Columns(CAPACITY)
    made.sequence[:] = np.arange(CAPACITY) + 1
    return made


@pytest.fixture
def views(columns: Columns) -> Views:
    """Six rows of two leaves, oldest first."""
    made = Views(Settings(sampler=Fifo()), columns, num_keys=2)
    made.arrive(np.arange(6), None)
    made.enter(np.arange(6))
    return made


def members(views: Views, key: ViewKey = PLAIN) -> list[int]:
    """What a sample under these conditions may have, oldest first."""
    selector = views.get(key)
    drawn = selector.draw(len(selector), rng=np.random.default_rng(0)) if len(selector) else None
    return [] if drawn is None else [int(row) for row in drawn.rows]


def test_get_when_asked_twice_then_the_same_selector(views: Views) -> None:
    key = ViewKey(consumer="a")
    assert views.get(key) is views.get(ViewKey(consumer="a"))
    assert views.get(ViewKey()) is views.get(PLAIN)
    assert views.get(key) is not views.get(PLAIN)


def test_get_when_there_are_too_many_then_the_one_unused_longest_goes_and_is_built_again(views: Views) -> None:
    keys = [ViewKey((), group_size=number) for number in range(MAX_VIEWS)]
    made = [views.get(key) for key in keys[: MAX_VIEWS - 1]]
    views.get(keys[0])  # used again
    views.get(keys[-1])
    assert views.get(keys[0]) is made[0]
    assert views.get(keys[2]) is made[2]
    views.leave(rows(0))
    assert views.get(keys[1]) is not made[1]
    assert members(views, keys[1]) == [1, 2, 3, 4, 5]
    assert members(views) == [1, 2, 3, 4, 5]


def test_arrive_when_rows_lack_leaves_then_only_samples_that_need_none_of_them_get_them(views: Views) -> None:
    assert not views.has_partial_rows
    views.arrive(rows(6), (1,))
    views.enter(rows(6))
    views.arrive(rows(7), ())
    views.enter(rows(7))
    assert views.has_partial_rows
    assert members(views) == [0, 1, 2, 3, 4, 5]
    assert members(views, ViewKey((1,))) == [0, 1, 2, 3, 4, 5, 6]
    assert members(views, ViewKey(())) == list(range(8))
    assert members(views, ViewKey((0, 1))) == [0, 1, 2, 3, 4, 5]


def test_arrive_when_a_row_is_overwritten_then_nothing_of_the_one_before_counts(views: Views) -> None:
    key = ViewKey(consumer="a")
    views.get(key)
    views.lease(1, "a", rows(0, 1))
    views.acknowledge(1, "a", rows(0))
    views.arrive(rows(6), (0,))
    views.leave(rows(0, 1))
    views.arrive(rows(0, 1), (1,))
    views.enter(rows(0, 1))
    assert members(views, key) == [2, 3, 4, 5]
    assert members(views, ViewKey((1,), "a")) == [0, 1, 2, 3, 4, 5]
    assert views.leases.num_leased == 0


def test_suspend_when_rows_are_written_to_then_gone_for_a_while_and_leases_stay(views: Views) -> None:
    views.get(ViewKey((1,)))
    views.lease(1, OWN, rows(0))
    views.suspend(rows(0, 2))
    assert members(views) == members(views, ViewKey((1,))) == [1, 3, 4, 5]
    views.note_written(rows(0, 2), (1,))
    views.enter(rows(0, 2))
    assert members(views) == [1, 2, 3, 4, 5]
    views.give_back(1, OWN, rows(0))
    assert members(views) == [0, 1, 2, 3, 4, 5]


def test_give_back_when_a_row_is_suspended_then_there_when_it_is_resumed(views: Views) -> None:
    views.lease(1, OWN, rows(0, 1))
    views.suspend(rows(0))
    views.give_back(1, OWN, rows(0, 1))
    assert members(views) == [1, 2, 3, 4, 5]
    views.note_written(rows(0), ())
    views.enter(rows(0))
    assert members(views) == [0, 1, 2, 3, 4, 5]


def test_lease_when_of_a_consumer_then_others_still_have_the_rows(views: Views) -> None:
    mine, others, required = ViewKey(consumer="a"), ViewKey(consumer="b"), ViewKey((0,), "a")
    for key in (mine, others, required):
        views.get(key)
    views.lease(1, "a", rows(0, 1))
    assert members(views, mine) == members(views, required) == [2, 3, 4, 5]
    assert members(views, others) == members(views) == [0, 1, 2, 3, 4, 5]
    assert members(views, ViewKey((1,), "a")) == [2, 3, 4, 5]  # a view made meanwhile


def test_acknowledge_when_of_a_consumer_then_never_again_and_the_rows_stay(views: Views) -> None:
    key = ViewKey(consumer="a")
    views.get(key)
    views.lease(1, "a", rows(0, 1))
    assert views.acknowledge(1, "a", rows(0, 1)).tolist() == []
    assert members(views, key) == [2, 3, 4, 5]
    assert members(views, ViewKey(consumer="b")) == [0, 1, 2, 3, 4, 5]
    views.suspend(rows(0))
    views.note_written(rows(0), (1,))
    views.enter(rows(0))
    assert members(views, key) == [2, 3, 4, 5]


def test_acknowledge_when_of_no_consumer_then_the_rows_are_to_leave(views: Views) -> None:
    views.lease(1, OWN, rows(0, 1, 2))
    assert views.acknowledge(1, OWN, rows(0, 2)).tolist() == [0, 2]
    assert members(views) == [3, 4, 5]


@pytest.mark.parametrize("event", ["acknowledge", "give_back"])
def test_lease_when_another_owner_ends_it_then_refused_and_nothing_changes(views: Views, event: str) -> None:
    views.lease(1, OWN, rows(0, 1))
    with pytest.raises(WrongStateError, match="1 of these 2 rows"):
        getattr(views, event)(1, OWN, rows(1, 2))
    with pytest.raises(WrongStateError):
        getattr(views, event)(2, OWN, rows(1))
    assert views.leases.num_leased == 2
    assert members(views) == [2, 3, 4, 5]


def test_release_when_an_owner_goes_then_all_it_held_is_back_at_its_place(views: Views) -> None:
    key = ViewKey(consumer="a")
    views.get(key)
    views.lease(1, OWN, rows(0, 3))
    views.lease(1, "a", rows(1))
    views.lease(2, OWN, rows(2))
    assert sum(views.releasing(1))
    assert not sum(views.releasing(1))
    assert members(views) == [0, 1, 3, 4, 5]
    assert members(views, key) == [0, 1, 2, 3, 4, 5]


def test_leave_when_rows_are_on_lease_then_nobody_holds_them_any_more(views: Views) -> None:
    views.lease(1, OWN, rows(0, 1))
    views.leave(rows(0, 5))
    assert views.leases.num_leased == 1
    assert sum(views.releasing(1))
    assert members(views) == [1, 2, 3, 4]


def test_get_when_grouped_then_whole_groups(columns: Columns, views: Views) -> None:
    columns.array("g", np.int64)[:] = np.arange(CAPACITY) // 2
    selector = views.get(ViewKey(group="g", group_size=2))
    assert isinstance(selector, GroupSelector)
    assert (len(selector), selector.num_complete) == (6, 3)
    views.lease(1, OWN, rows(0))
    assert selector.num_complete == 2
    assert sum(views.releasing(1))
    assert selector.num_complete == 3


def test_consumers_when_there_are_too_many_then_refused_and_the_others_go_on(views: Views) -> None:
    for number in range(MAX_CONSUMERS):
        views.get(ViewKey(consumer=f"c{number}"))
        views.lease(1, f"c{number}", rows(number % 6))
        views.acknowledge(1, f"c{number}", rows(number % 6))
    with pytest.raises(CapacityError, match="'one more'"):
        views.get(ViewKey(consumer="one more"))
    assert len(views.consumers) == MAX_CONSUMERS
    for number in (0, 1, MAX_CONSUMERS - 1):
        assert members(views, ViewKey(consumer=f"c{number}")) == [row for row in range(6) if row != number % 6]


def test_views_when_made_again_then_consumers_and_leaves_are_as_they_were(columns: Columns, views: Views) -> None:
    views.get(ViewKey(consumer="a"))
    views.get(ViewKey(consumer="b"))
    views.arrive(rows(6), (0,))
    views.enter(rows(6))
    views.lease(1, "b", rows(0))
    views.acknowledge(1, "b", rows(0))
    again = Views(Settings(sampler=Fifo()), columns, num_keys=2, consumers=views.consumers, has_partial_rows=True)
    again.enter(np.arange(7))
    assert members(again) == [0, 1, 2, 3, 4, 5]
    assert members(again, ViewKey((0,), "b")) == [1, 2, 3, 4, 5, 6]
    assert members(again, ViewKey((0,), "a")) == [0, 1, 2, 3, 4, 5, 6]


def test_views_when_a_consumer_was_forgotten_by_a_crash_then_its_place_is_clean_for_the_next(
    columns: Columns, views: Views
) -> None:
    views.get(ViewKey(consumer="a"))
    views.lease(1, "a", rows(0))
    views.acknowledge(1, "a", rows(0))  # and killed before the record that names "a"
    again = Views(Settings(sampler=Fifo()), columns, num_keys=2)
    again.enter(np.arange(6))
    assert members(again, ViewKey(consumer="b")) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("key", "told"),
    [
        (PLAIN, "too few are whole"),
        (ViewKey(()), "too few can be drawn now"),
        (ViewKey((1,), "a"), "too few have all required keys and consumer 'a' has not had"),
        (ViewKey((), group="g", group_size=4), "too few are in whole groups of 4"),
    ],
)
def test_describe_when_rows_are_waited_for_then_says_what_keeps_them_out(key: ViewKey, told: str) -> None:
    assert key.describe() == told


def test_describe_missing_when_leaves_were_not_written_then_counts_them_by_name(columns: Columns) -> None:
    num_keys = MAX_NAMED + 2
    names = [f"'{letter}'" for letter in "abcdefgh"[:num_keys]]
    views = Views(Settings(sampler=Fifo()), columns, num_keys=num_keys)
    for row, keys in enumerate([range(num_keys), [0], [0, 1]]):
        views.arrive(rows(row), keys)
        views.enter(rows(row))
    assert views.describe_missing(PLAIN, names) == (
        "'c' is missing in 2, 'd' is missing in 2, 'e' is missing in 2, 'f' is missing in 2, 1 more leaves in others"
    )
    assert views.describe_missing(ViewKey((0, 1)), names) == "'b' is missing in 1"
    assert views.describe_missing(ViewKey((0,)), names) == views.describe_missing(ViewKey(()), names) == ""
    views.suspend(rows(1))
    views.note_written(rows(1), [1])
    views.enter(rows(1))
    assert views.describe_missing(ViewKey((0, 1)), names) == ""


# ---------------------------------------------------------------- staleness


def aged(sampler: Any, num_rows: int, columns: Columns) -> Views:
    """Rows of versions 1, 2 and so on, two of each, the newest of which is published."""
    made = Views(Settings(sampler=sampler, policy="p"), columns, num_keys=2, staleness=Staleness(columns))
    made.follow("a", num_rows // 2)
    for number in range(0, num_rows, 2):
        assert made.staleness is not None
        made.staleness.arrive(rows(number, number + 1), np.full(2, number // 2 + 1))
        made.enter(rows(number, number + 1))
    return made


def test_get_when_a_lag_is_asked_for_then_older_rows_are_no_members(columns: Columns) -> None:
    views = aged(Fifo(), 6, columns)
    assert [members(views, ViewKey(max_lag=lag)) for lag in (0, 1, 7)] == [[4, 5], [2, 3, 4, 5], [0, 1, 2, 3, 4, 5]]
    assert members(views) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("sampler", [Fifo(), WithoutReplacement(), Uniform()])
@pytest.mark.parametrize("num_rows", [2, 4, 8])
def test_follow_when_versions_are_published_then_rows_leave_the_views_that_want_younger_ones(
    columns: Columns, sampler: Any, num_rows: int
) -> None:
    views = aged(sampler, num_rows, columns)
    keys = [ViewKey(max_lag=lag) for lag in range(4)]
    for key in keys:
        views.get(key)
    for newest in range(num_rows // 2 + 1, num_rows // 2 + 5):
        views.follow("a", newest)
        for key in keys:
            assert key.max_lag is not None
            young = [row for row in range(num_rows) if row // 2 + 1 >= newest - key.max_lag]
            assert len(views.get(key)) == len(young)
    assert len(views.get(PLAIN)) == num_rows


@pytest.mark.parametrize("newest", [5, 6, 7])
def test_follow_when_rows_are_too_old_then_an_epoch_goes_on_without_them(columns: Columns, newest: int) -> None:
    for seed in range(20):
        views = aged(WithoutReplacement(), 8, columns)
        key = ViewKey(max_lag=3)
        drawn = views.get(key).draw(4, rng=np.random.default_rng(seed))
        assert drawn is not None
        views.follow("a", newest)
        left = [row for row in range(2 * (newest - 4), 8) if row not in drawn.rows]
        rest = views.get(key).draw(max(len(left), 1), rng=np.random.default_rng(seed))
        assert rest is not None
        assert sorted(rest.rows.tolist()) == left or not left


def test_give_back_when_rows_became_too_old_on_lease_then_only_views_without_a_lag_get_them(columns: Columns) -> None:
    views = aged(Fifo(), 6, columns)
    key = ViewKey(max_lag=0)
    views.get(key)
    views.lease(1, OWN, rows(4, 0))
    assert members(views, key) == [5]
    views.follow("a", 4)
    views.give_back(1, OWN, rows(4, 0))
    assert (members(views, key), members(views, ViewKey(max_lag=1)), len(members(views))) == ([], [4, 5], 6)


def test_resume_when_rows_were_suspended_over_a_publish_then_they_are_judged_anew(columns: Columns) -> None:
    views = aged(Fifo(), 6, columns)
    key = ViewKey(max_lag=1)
    views.get(key)
    views.suspend(rows(2, 4))
    views.follow("a", 4)
    views.note_written(rows(2, 4), ())
    views.enter(rows(2, 4))
    assert members(views, key) == [4, 5]


def test_follow_when_the_policy_was_made_anew_then_no_lag_lets_its_rows_through(columns: Columns) -> None:
    views = aged(Fifo(), 6, columns)
    assert len(views.get(ViewKey(max_lag=2))) == 6
    views.follow("b", 1)
    assert [len(views.get(ViewKey(max_lag=lag))) for lag in (0, 2, 100)] == [0, 0, 0]
    assert len(views.get(PLAIN)) == 6
