from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tdserve.rules.replay.eligibility.staleness import UNKNOWN, Lags, Staleness
from tdserve.rules.replay.row_indexes.columns import RowColumns
from tdserve.rules.weights import STEP_AFTER_LOSS
from tests.memory import count_bytes


def rows(*numbers: int) -> Any:
    """Row numbers, or versions."""
    return np.array(numbers, np.int64)


@pytest.fixture
def subject() -> Staleness:
    """Eight rows, of which 0 and 1 were made by version 2, and 2 by version 4; the newest is 5."""
    made = Staleness(RowColumns(8))
    made.follow("a", 5)
    made.arrive(rows(0, 1, 2), rows(2, 2, 4))
    made.enter(rows(0, 1, 2))
    return made


def test_fits_when_lags_are_asked_for_then_counts_from_the_newest(subject: Staleness) -> None:
    assert [subject.is_fresh(rows(0, 1, 2), lag).tolist() for lag in (0, 1, 3)] == [
        [False] * 3,
        [False, False, True],
        [True] * 3,
    ]
    assert (subject.compute_floor(3), subject.compute_floor(9)) == (2, 0)


def test_arrive_when_no_version_is_given_then_it_is_the_newest(subject: Staleness) -> None:
    subject.arrive(rows(5, 6), None)
    subject.enter(rows(5, 6))
    assert subject.find_between(5).tolist() == [5, 6]


def test_pieces_when_rows_go_and_come_meanwhile_then_members_that_were_there_at_first(subject: Staleness) -> None:
    subject.leave(rows(0))
    subject.enter(rows(0))
    subject.arrive(rows(3, 4), rows(4, 2))
    subject.enter(rows(3))
    found = subject.iter_pieces(0, 5, piece_rows=2)
    assert next(found).tolist() == [0, 1]
    subject.enter(rows(4))
    subject.leave(rows(2))
    assert [piece.tolist() for piece in found] == [[0], [3]]


def test_between_when_rows_come_and_go_then_each_member_once_and_oldest_first(subject: Staleness) -> None:
    subject.leave(rows(0, 2))
    subject.enter(rows(2, 0))
    subject.arrive(rows(3), rows(1))
    subject.enter(rows(3))
    assert (subject.find_between(0).tolist(), subject.count(0)) == ([3, 1, 0, 2], 4)
    assert (subject.find_between(2, 4).tolist(), subject.count(2, 4)) == ([1, 0], 2)
    assert (subject.find_between(3, 4).tolist(), subject.count(3, 4)) == ([], 0)


def test_lags_when_rows_leave_then_those_of_the_others(subject: Staleness) -> None:
    assert subject.measure_lags() == Lags(1, 5 - 8 / 3, 3)
    subject.leave(rows(0, 1))
    assert subject.measure_lags() == Lags(1, 1.0, 1)
    subject.follow("a", 3)  # as after a loss of power, which took versions that rows were made by
    assert subject.measure_lags() == Lags(0, 0.0, 0)
    subject.leave(rows(2))
    assert subject.measure_lags() is None


def test_follow_when_the_first_version_comes_then_rows_from_before_are_of_version_0() -> None:
    subject = Staleness(RowColumns(4))
    subject.arrive(rows(0), None)
    subject.enter(rows(0))
    assert not subject.follow("a", 2)
    assert subject.measure_lags() == Lags(2, 2.0, 2)


def test_follow_when_numbers_are_skipped_then_they_do_not_count(subject: Staleness) -> None:
    first, second = 5 + STEP_AFTER_LOSS + 1, 5 + 3 * STEP_AFTER_LOSS + 4
    subject.follow("a", first)  # restored; it is 6 places from the beginning
    assert [subject.compute_floor(lag) for lag in (0, 1, 2, 9)] == [first, 5, 4, 0]
    assert subject.compute_lags(rows(2, 5, 7, first)).tolist() == [4, 1, 1, 0], "7 was lost"
    subject.arrive(rows(3), None)
    subject.enter(rows(3))
    assert subject.measure_lags() == Lags(0, (4 + 4 + 2 + 0) / 4, 4)
    subject.follow("a", second)  # restored twice, and two versions more
    assert [subject.compute_floor(lag) for lag in (0, 2, 3, 4)] == [second, second - 2, first, 5]
    restored = Staleness.restore(RowColumns(8), subject.get_state())
    assert restored.compute_floor(4) == 5
    restored.follow("b", 9)
    assert restored.compute_floor(4) == 5


def test_follow_when_the_newest_is_lost_then_rows_made_by_it_lag_least(subject: Staleness) -> None:
    subject.follow("a", 3)
    assert subject.compute_lags(rows(2, 4)).tolist() == [1, 0]
    subject.follow("a", 5 + STEP_AFTER_LOSS + 1)
    assert subject.compute_lags(rows(2, 4)).tolist() == [4, 2]


def test_follow_when_the_policy_is_another_then_rows_are_of_an_unknown_version(subject: Staleness) -> None:
    assert not subject.follow("a", 6)
    assert subject.follow("b", 3)
    assert (subject.measure_lags(), subject.find_between(UNKNOWN, 0).tolist()) == (None, [0, 1, 2])
    assert not subject.is_fresh(rows(0, 1, 2), 1000).any()
    assert not subject.follow("b", 4)
    subject.arrive(rows(4, 5), rows(3, UNKNOWN))
    subject.enter(rows(4, 5))
    assert subject.measure_lags() == Lags(1, 1.0, 1)
    assert subject.get_versions(rows(0, 2, 4, 5)).tolist() == [UNKNOWN, UNKNOWN, 3, UNKNOWN]
    subject.leave(rows(0, 2))
    assert (subject.find_between(UNKNOWN).tolist(), subject.count(UNKNOWN), subject.count(0)) == ([1, 5, 4], 3, 1)
    assert subject.follow("", 0)  # deleted
    assert subject.measure_lags() is None


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_between_when_a_history_is_random_then_as_in_a_dict(seed: int) -> None:
    rng = np.random.default_rng(seed)
    capacity = 300
    subject, members, versions = Staleness(RowColumns(capacity)), dict[int, int](), np.zeros(capacity, np.int64)
    for step in range(400):
        subject.follow("a", step // 10)
        others = np.setdiff1d(np.arange(capacity), list(members))
        coming = rng.choice(others, min(len(others), int(rng.integers(1, 60))), replace=False)
        given = rng.integers(max(0, subject.newest - 4), subject.newest + 1, len(coming))
        if rng.random() < 0.5:
            given[:] = subject.newest
        if rng.random() < 0.2:  # come back as they were
            given = versions[coming]
        subject.arrive(coming, given)
        subject.enter(coming)
        versions[coming] = given
        members |= dict(zip(coming.tolist(), given.tolist(), strict=True))
        going = rng.choice(list(members), int(rng.integers(0, len(members) + 1)) // 3, replace=False)
        subject.leave(going)
        for row in going.tolist():
            del members[row]
        low = int(rng.integers(0, subject.newest + 1))
        high = low + int(rng.integers(0, 4))
        found = subject.find_between(low, high)
        assert len(found) == len(set(found.tolist())) == subject.count(low, high)
        assert set(found.tolist()) == {row for row, version in members.items() if low <= version < high}
        known = list(members.values())
        lags = subject.measure_lags()
        assert (lags is None) == (not known)
        if lags is not None:
            newest = subject.newest
            assert (lags.min, lags.max) == (newest - max(known), newest - min(known))
            assert lags.mean == pytest.approx(newest - sum(known) / len(known))


def test_enter_when_a_version_stays_the_newest_for_long_then_its_bucket_does_not_grow() -> None:
    subject = Staleness(RowColumns(1000))
    subject.enter(np.arange(1000))
    before = count_bytes(subject)
    for start in range(0, 100_000, 100):
        going = np.arange(start, start + 100) % 1000
        subject.leave(going)
        subject.enter(going)
    assert count_bytes(subject) <= before + 2 * 4096 * going.itemsize
    assert subject.count(0) == len(subject.find_between(0)) == 1000


def test_pieces_when_rows_are_moved_meanwhile_then_none_is_left_out() -> None:
    subject = Staleness(RowColumns(1000))
    subject.enter(np.arange(1000))
    pieces = subject.iter_pieces(0, 1, piece_rows=100)
    found = [next(pieces)]
    for _ in range(500):
        subject.leave(np.arange(900, 1000))
        subject.enter(np.arange(900, 1000))
    assert np.unique(np.concatenate([*found, *pieces])).tolist() == list(range(1000))
