from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tdserve.base.errors import CapacityError, WrongStateError
from tdserve.rules.replay.eligibility.conditional_selectors import MAX_NAMED, MAX_SELECTORS, ConditionalSelectors
from tdserve.rules.replay.eligibility.conditions import OWN, PLAIN, SampleConditions
from tdserve.rules.replay.eligibility.group_selector import GroupSelector
from tdserve.rules.replay.eligibility.staleness import Staleness
from tdserve.rules.replay.row_indexes.columns import RowColumns
from tdserve.rules.replay.samplers.order import Fifo
from tdserve.rules.replay.samplers.sampler import Uniform
from tdserve.rules.replay.samplers.without_replacement import WithoutReplacement
from tdserve.rules.replay.settings import MAX_CONSUMERS, Settings

CAPACITY = 8


def rows(*numbers: int) -> Any:
    """Row numbers."""
    return np.array(numbers, np.int64)


@pytest.fixture
def columns() -> RowColumns:
    """Eight rows in order."""
    made = RowColumns(CAPACITY)
    made.sequence[:] = np.arange(CAPACITY) + 1
    return made


@pytest.fixture
def selectors(columns: RowColumns) -> ConditionalSelectors:
    """Six rows of two leaves, oldest first."""
    made = ConditionalSelectors(Settings(sampler=Fifo()), columns, num_keys=2)
    made.arrive(np.arange(6), None)
    made.enter(np.arange(6))
    return made


def members(selectors: ConditionalSelectors, key: SampleConditions = PLAIN) -> list[int]:
    """What a sample under these conditions may have, oldest first."""
    selector = selectors.get(key)
    drawn = selector.draw(len(selector), rng=np.random.default_rng(0)) if len(selector) else None
    return [] if drawn is None else [int(row) for row in drawn.rows]


def test_get_when_asked_twice_then_the_same_selector(selectors: ConditionalSelectors) -> None:
    key = SampleConditions(consumer="a")
    assert selectors.get(key) is selectors.get(SampleConditions(consumer="a"))
    assert selectors.get(SampleConditions()) is selectors.get(PLAIN)
    assert selectors.get(key) is not selectors.get(PLAIN)


def test_get_when_there_are_too_many_then_the_one_unused_longest_goes_and_is_built_again(
    selectors: ConditionalSelectors,
) -> None:
    keys = [SampleConditions((), group_size=number) for number in range(MAX_SELECTORS)]
    made = [selectors.get(key) for key in keys[: MAX_SELECTORS - 1]]
    selectors.get(keys[0])  # used again
    selectors.get(keys[-1])
    assert selectors.get(keys[0]) is made[0]
    assert selectors.get(keys[2]) is made[2]
    selectors.leave(rows(0))
    assert selectors.get(keys[1]) is not made[1]
    assert members(selectors, keys[1]) == [1, 2, 3, 4, 5]
    assert members(selectors) == [1, 2, 3, 4, 5]


def test_arrive_when_rows_lack_leaves_then_only_samples_that_need_none_of_them_get_them(
    selectors: ConditionalSelectors,
) -> None:
    assert not selectors.has_partial_rows
    selectors.arrive(rows(6), (1,))
    selectors.enter(rows(6))
    selectors.arrive(rows(7), ())
    selectors.enter(rows(7))
    assert selectors.has_partial_rows
    assert members(selectors) == [0, 1, 2, 3, 4, 5]
    assert members(selectors, SampleConditions((1,))) == [0, 1, 2, 3, 4, 5, 6]
    assert members(selectors, SampleConditions(())) == list(range(8))
    assert members(selectors, SampleConditions((0, 1))) == [0, 1, 2, 3, 4, 5]


def test_arrive_when_a_row_is_overwritten_then_nothing_of_the_one_before_counts(
    selectors: ConditionalSelectors,
) -> None:
    key = SampleConditions(consumer="a")
    selectors.get(key)
    selectors.lease(1, "a", rows(0, 1))
    selectors.acknowledge(1, "a", rows(0))
    selectors.arrive(rows(6), (0,))
    selectors.leave(rows(0, 1))
    selectors.arrive(rows(0, 1), (1,))
    selectors.enter(rows(0, 1))
    assert members(selectors, key) == [2, 3, 4, 5]
    assert members(selectors, SampleConditions((1,), "a")) == [0, 1, 2, 3, 4, 5]
    assert selectors.leases.num_leased == 0


def test_suspend_when_rows_are_written_to_then_gone_for_a_while_and_leases_stay(
    selectors: ConditionalSelectors,
) -> None:
    selectors.get(SampleConditions((1,)))
    selectors.lease(1, OWN, rows(0))
    selectors.suspend(rows(0, 2))
    assert members(selectors) == members(selectors, SampleConditions((1,))) == [1, 3, 4, 5]
    selectors.note_written(rows(0, 2), (1,))
    selectors.enter(rows(0, 2))
    assert members(selectors) == [1, 2, 3, 4, 5]
    selectors.give_back(1, OWN, rows(0))
    assert members(selectors) == [0, 1, 2, 3, 4, 5]


def test_give_back_when_a_row_is_suspended_then_there_when_it_is_resumed(selectors: ConditionalSelectors) -> None:
    selectors.lease(1, OWN, rows(0, 1))
    selectors.suspend(rows(0))
    selectors.give_back(1, OWN, rows(0, 1))
    assert members(selectors) == [1, 2, 3, 4, 5]
    selectors.note_written(rows(0), ())
    selectors.enter(rows(0))
    assert members(selectors) == [0, 1, 2, 3, 4, 5]


def test_lease_when_of_a_consumer_then_others_still_have_the_rows(selectors: ConditionalSelectors) -> None:
    mine, others, required = SampleConditions(consumer="a"), SampleConditions(consumer="b"), SampleConditions((0,), "a")
    for key in (mine, others, required):
        selectors.get(key)
    selectors.lease(1, "a", rows(0, 1))
    assert members(selectors, mine) == members(selectors, required) == [2, 3, 4, 5]
    assert members(selectors, others) == members(selectors) == [0, 1, 2, 3, 4, 5]
    assert members(selectors, SampleConditions((1,), "a")) == [2, 3, 4, 5]  # a view made meanwhile


def test_acknowledge_when_of_a_consumer_then_never_again_and_the_rows_stay(selectors: ConditionalSelectors) -> None:
    key = SampleConditions(consumer="a")
    selectors.get(key)
    selectors.lease(1, "a", rows(0, 1))
    selectors.acknowledge(1, "a", rows(0, 1))
    assert selectors.leases.num_leased == 0
    assert members(selectors, key) == [2, 3, 4, 5]
    assert members(selectors, SampleConditions(consumer="b")) == [0, 1, 2, 3, 4, 5]
    selectors.suspend(rows(0))
    selectors.note_written(rows(0), (1,))
    selectors.enter(rows(0))
    assert members(selectors, key) == [2, 3, 4, 5]


def test_acknowledge_when_others_hold_the_rows_then_their_leases_stay(selectors: ConditionalSelectors) -> None:
    key = SampleConditions(consumer="a")
    selectors.get(key)
    selectors.lease(1, "a", rows(0))
    selectors.lease(2, "a", rows(1))
    selectors.acknowledge(1, "a", rows(0, 1, 2))  # as where the second owner got a row meanwhile
    assert selectors.leases.num_leased == 1
    selectors.give_back(2, "a", rows(1))
    assert members(selectors, key) == [3, 4, 5]


def test_give_back_when_another_owner_does_it_then_refused_and_nothing_changes(
    selectors: ConditionalSelectors,
) -> None:
    selectors.lease(1, OWN, rows(0, 1))
    with pytest.raises(WrongStateError, match="1 of these 2 rows"):
        selectors.give_back(1, OWN, rows(1, 2))
    with pytest.raises(WrongStateError):
        selectors.give_back(2, OWN, rows(1))
    assert selectors.leases.num_leased == 2
    assert members(selectors) == [2, 3, 4, 5]


def test_release_when_an_owner_goes_then_all_it_held_is_back_at_its_place(selectors: ConditionalSelectors) -> None:
    key = SampleConditions(consumer="a")
    selectors.get(key)
    selectors.lease(1, OWN, rows(0, 3))
    selectors.lease(1, "a", rows(1))
    selectors.lease(2, OWN, rows(2))
    assert sum(selectors.release_in_pieces(1))
    assert not sum(selectors.release_in_pieces(1))
    assert members(selectors) == [0, 1, 3, 4, 5]
    assert members(selectors, key) == [0, 1, 2, 3, 4, 5]


def test_leave_when_rows_are_on_lease_then_their_leases_end(selectors: ConditionalSelectors) -> None:
    selectors.lease(1, OWN, rows(0, 1))
    selectors.leave(rows(0, 5))
    assert selectors.leases.num_leased == 1
    assert sum(selectors.release_in_pieces(1))
    assert members(selectors) == [1, 2, 3, 4]


def test_get_when_grouped_then_whole_groups(columns: RowColumns, selectors: ConditionalSelectors) -> None:
    columns.get_array("g", np.int64)[:] = np.arange(CAPACITY) // 2
    selector = selectors.get(SampleConditions(group="g", group_size=2))
    assert isinstance(selector, GroupSelector)
    assert (len(selector), selector.num_complete) == (6, 3)
    selectors.lease(1, OWN, rows(0))
    assert selector.num_complete == 2
    assert sum(selectors.release_in_pieces(1))
    assert selector.num_complete == 3


def test_consumers_when_there_are_too_many_then_refused_and_the_others_go_on(selectors: ConditionalSelectors) -> None:
    for number in range(MAX_CONSUMERS):
        selectors.get(SampleConditions(consumer=f"c{number}"))
        selectors.lease(1, f"c{number}", rows(number % 6))
        selectors.acknowledge(1, f"c{number}", rows(number % 6))
    with pytest.raises(CapacityError, match="'one more'"):
        selectors.get(SampleConditions(consumer="one more"))
    assert len(selectors.consumers.names) == MAX_CONSUMERS
    for number in (0, 1, MAX_CONSUMERS - 1):
        assert members(selectors, SampleConditions(consumer=f"c{number}")) == [
            row for row in range(6) if row != number % 6
        ]


def test_views_when_made_again_then_consumers_and_leaves_are_as_they_were(
    columns: RowColumns, selectors: ConditionalSelectors
) -> None:
    selectors.get(SampleConditions(consumer="a"))
    selectors.get(SampleConditions(consumer="b"))
    selectors.arrive(rows(6), (0,))
    selectors.enter(rows(6))
    selectors.lease(1, "b", rows(0))
    selectors.acknowledge(1, "b", rows(0))
    again = ConditionalSelectors(
        Settings(sampler=Fifo()), columns, num_keys=2, consumers=selectors.consumers.names, has_partial_rows=True
    )
    again.enter(np.arange(7))
    assert members(again) == [0, 1, 2, 3, 4, 5]
    assert members(again, SampleConditions((0,), "b")) == [1, 2, 3, 4, 5, 6]
    assert members(again, SampleConditions((0,), "a")) == [0, 1, 2, 3, 4, 5, 6]


def test_views_when_a_consumer_was_forgotten_by_a_crash_then_its_place_is_clean_for_the_next(
    columns: RowColumns, selectors: ConditionalSelectors
) -> None:
    selectors.get(SampleConditions(consumer="a"))
    selectors.lease(1, "a", rows(0))
    selectors.acknowledge(1, "a", rows(0))  # and killed before the record that names "a"
    again = ConditionalSelectors(Settings(sampler=Fifo()), columns, num_keys=2)
    again.enter(np.arange(6))
    assert members(again, SampleConditions(consumer="b")) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        (PLAIN, "too few are whole"),
        (SampleConditions(()), "too few can be drawn now"),
        (SampleConditions((1,), "a"), "too few have all required keys and consumer 'a' has not had"),
        (SampleConditions((), group="g", group_size=4), "too few are in whole groups of 4"),
    ],
)
def test_describe_when_rows_are_waited_for_then_names_the_conditions_that_exclude_them(
    key: SampleConditions, expected: str
) -> None:
    assert key.describe() == expected


def test_describe_missing_when_leaves_were_not_written_then_counts_them_by_name(columns: RowColumns) -> None:
    num_keys = MAX_NAMED + 2
    names = [f"'{letter}'" for letter in "abcdefgh"[:num_keys]]
    selectors = ConditionalSelectors(Settings(sampler=Fifo()), columns, num_keys=num_keys)
    for row, keys in enumerate([range(num_keys), [0], [0, 1]]):
        selectors.arrive(rows(row), keys)
        selectors.enter(rows(row))
    assert selectors.describe_missing(PLAIN, names) == (
        "'c' is missing in 2, 'd' is missing in 2, 'e' is missing in 2, 'f' is missing in 2, 1 more leaf in others"
    )
    assert selectors.describe_missing(SampleConditions((0, 1)), names) == "'b' is missing in 1"
    assert (
        selectors.describe_missing(SampleConditions((0,)), names)
        == selectors.describe_missing(SampleConditions(()), names)
        == ""
    )
    selectors.suspend(rows(1))
    selectors.note_written(rows(1), [1])
    selectors.enter(rows(1))
    assert selectors.describe_missing(SampleConditions((0, 1)), names) == ""


# ---------------------------------------------------------------- staleness


def aged(sampler: Any, num_rows: int, columns: RowColumns) -> ConditionalSelectors:
    """Rows of versions 1, 2 and so on, two of each, the newest of which is published."""
    made = ConditionalSelectors(
        Settings(sampler=sampler, policy="p"), columns, num_keys=2, staleness=Staleness(columns)
    )
    made.follow("a", num_rows // 2)
    for number in range(0, num_rows, 2):
        assert made.staleness is not None
        made.staleness.arrive(rows(number, number + 1), np.full(2, number // 2 + 1))
        made.enter(rows(number, number + 1))
    return made


def test_get_when_a_lag_is_asked_for_then_older_rows_are_no_members(columns: RowColumns) -> None:
    selectors = aged(Fifo(), 6, columns)
    assert [members(selectors, SampleConditions(max_lag=lag)) for lag in (0, 1, 7)] == [
        [4, 5],
        [2, 3, 4, 5],
        [0, 1, 2, 3, 4, 5],
    ]
    assert members(selectors) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("sampler", [Fifo(), WithoutReplacement(), Uniform()])
@pytest.mark.parametrize("num_rows", [2, 4, 8])
def test_follow_when_versions_are_published_then_old_rows_leave_selectors_with_a_max_lag(
    columns: RowColumns, sampler: Any, num_rows: int
) -> None:
    selectors = aged(sampler, num_rows, columns)
    keys = [SampleConditions(max_lag=lag) for lag in range(4)]
    for key in keys:
        selectors.get(key)
    for newest in range(num_rows // 2 + 1, num_rows // 2 + 5):
        selectors.follow("a", newest)
        for key in keys:
            assert key.max_lag is not None
            young = [row for row in range(num_rows) if row // 2 + 1 >= newest - key.max_lag]
            assert len(selectors.get(key)) == len(young)
    assert len(selectors.get(PLAIN)) == num_rows


@pytest.mark.parametrize("newest", [5, 6, 7])
def test_follow_when_rows_are_too_old_then_an_epoch_goes_on_without_them(columns: RowColumns, newest: int) -> None:
    for seed in range(20):
        selectors = aged(WithoutReplacement(), 8, columns)
        key = SampleConditions(max_lag=3)
        drawn = selectors.get(key).draw(4, rng=np.random.default_rng(seed))
        assert drawn is not None
        selectors.follow("a", newest)
        left = [row for row in range(2 * (newest - 4), 8) if row not in drawn.rows]
        rest = selectors.get(key).draw(max(len(left), 1), rng=np.random.default_rng(seed))
        assert rest is not None
        assert sorted(rest.rows.tolist()) == left or not left


def test_give_back_when_rows_became_too_old_on_lease_then_only_views_without_a_lag_get_them(
    columns: RowColumns,
) -> None:
    selectors = aged(Fifo(), 6, columns)
    key = SampleConditions(max_lag=0)
    selectors.get(key)
    selectors.lease(1, OWN, rows(4, 0))
    assert members(selectors, key) == [5]
    selectors.follow("a", 4)
    selectors.give_back(1, OWN, rows(4, 0))
    assert (members(selectors, key), members(selectors, SampleConditions(max_lag=1)), len(members(selectors))) == (
        [],
        [4, 5],
        6,
    )


def test_resume_when_rows_were_suspended_over_a_publish_then_they_are_judged_anew(columns: RowColumns) -> None:
    selectors = aged(Fifo(), 6, columns)
    key = SampleConditions(max_lag=1)
    selectors.get(key)
    selectors.suspend(rows(2, 4))
    selectors.follow("a", 4)
    selectors.note_written(rows(2, 4), ())
    selectors.enter(rows(2, 4))
    assert members(selectors, key) == [4, 5]


def test_follow_when_the_policy_was_made_anew_then_no_lag_lets_its_rows_through(columns: RowColumns) -> None:
    selectors = aged(Fifo(), 6, columns)
    assert len(selectors.get(SampleConditions(max_lag=2))) == 6
    selectors.follow("b", 1)
    assert [len(selectors.get(SampleConditions(max_lag=lag))) for lag in (0, 2, 100)] == [0, 0, 0]
    assert len(selectors.get(PLAIN)) == 6
