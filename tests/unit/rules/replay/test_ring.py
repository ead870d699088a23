from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, precondition, rule

from tdserve.base.errors import CorruptDataError, InvalidRequestError, TooLargeError, WrongStateError
from tdserve.messages.row_sets import RowSet
from tdserve.rules.replay.reservation import Reservation
from tdserve.rules.replay.ring import Ring
from tests.unit.rules.replay.rings import make_ring, reserve

_CAPACITY = 13


class _AgainstALoop(RuleBasedStateMachine):
    """The ring beside the simplest thing that obeys the same rules, one row at a time."""

    reservations = Bundle("reservations")

    def __init__(self) -> None:
        super().__init__()
        self.generations = np.zeros(_CAPACITY, np.int64)
        self.ring = Ring(_CAPACITY, self.generations)
        self.owner: dict[int, Reservation] = {}
        self.live: set[int] = set()
        self.holes: list[int] = []
        self.cursor = 0
        self.inserts = 0
        self.state: dict[int, str] = {}
        self.held: set[int] = set()
        self.hidden: set[int] = set()  # of those that are held
        self.left: set[int] = set()  # while they were held

    def _expected_rows(self, num_rows: int) -> list[int]:
        rows, self.holes = self.holes[:num_rows], self.holes[num_rows:]
        while len(rows) < num_rows:
            if self.cursor not in {*self.owner, *self.holes, *self.held, *self.left, *rows}:
                rows.append(self.cursor)
            self.cursor = (self.cursor + 1) % _CAPACITY
        return rows

    @rule(target=reservations, num_rows=st.integers(1, _CAPACITY))
    def reserve(self, num_rows: int) -> Any:
        before = self.generations.copy()
        reservation = self.ring.reserve(num_rows)
        if num_rows > _CAPACITY - len(self.owner) - len(self.held) - len(self.left):
            assert reservation is None
            assert (before == self.generations).all()
            return None
        assert reservation is not None
        rows = reservation.rows.tolist()
        assert not set(rows) & (self.owner.keys() | self.held | self.left), "a row was given to two writers"
        assert rows == self._expected_rows(num_rows)
        assert reservation.evicted.tolist() == [row for row in rows if row in self.live]
        self.live -= set(rows)
        self.owner.update(dict.fromkeys(rows, reservation))
        self.state[id(reservation)] = "open"
        return reservation

    def _may(self, reservation: Reservation | None, needed: str, event: str) -> bool:
        """Performs the event if it is legal, else proves that it is refused and changes nothing."""
        if reservation is None:
            return False
        if self.state.get(id(reservation)) == needed:
            return True
        before = (self.generations.copy(), repr(self.ring))
        with pytest.raises(WrongStateError):
            getattr(self.ring, event)(reservation)
        assert (before[0] == self.generations).all()
        assert before[1] == repr(self.ring)
        return False

    def _gone(self, reservation: Reservation) -> None:
        for row in reservation.rows.tolist():
            del self.owner[row]
        self.state[id(reservation)] = "closed"

    @rule(reservation=reservations)
    def commit(self, reservation: Reservation | None) -> None:
        if not self._may(reservation, "open", "commit") or reservation is None:
            return
        before = self.generations[reservation.rows]
        generations = self.ring.commit(reservation)
        assert (generations == self.generations[reservation.rows]).all()
        assert (generations == before + 1).all()
        self._gone(reservation)
        self.live |= set(reservation.rows.tolist())
        self.inserts += len(reservation)

    @rule(reservation=reservations)
    def abort(self, reservation: Reservation | None) -> None:
        if self._may(reservation, "open", "abort") and reservation is not None:
            self.ring.abort(reservation)
            self._gone(reservation)
            self.holes += reservation.rows.tolist()

    @rule(reservation=reservations)
    def quarantine(self, reservation: Reservation | None) -> None:
        if self._may(reservation, "open", "quarantine") and reservation is not None:
            self.ring.quarantine(reservation)
            self.state[id(reservation)] = "quarantined"

    @rule(reservation=reservations)
    def release(self, reservation: Reservation | None) -> None:
        if self._may(reservation, "quarantined", "release") and reservation is not None:
            self.ring.release(reservation)
            self._gone(reservation)
            self.holes += reservation.rows.tolist()

    @rule(numbers=st.lists(st.integers(0, _CAPACITY - 1), unique=True))
    def free(self, numbers: list[int]) -> None:
        rows = [row for row in numbers if row in self.live | self.held]
        self.ring.free(np.array(rows, np.int64))
        self.holes += [row for row in rows if row in self.live]
        self.left |= self.held & set(rows)
        self.live -= set(rows)
        self.held -= set(rows)
        self.hidden -= set(rows)

    @rule(numbers=st.lists(st.integers(0, _CAPACITY - 1), unique=True))
    def hold(self, numbers: list[int]) -> None:
        rows = [row for row in numbers if row in self.live]
        self.ring.hold(np.array(rows, np.int64))
        self.live -= set(rows)
        self.held |= set(rows)

    @rule(numbers=st.lists(st.integers(0, _CAPACITY - 1), unique=True))
    def hide(self, numbers: list[int]) -> None:
        rows = [row for row in numbers if row in self.held | self.left]
        names = self.ring.get_names(np.array(rows, np.int64))
        self.ring.hide(np.array(rows, np.int64))
        assert (self.ring.get_names(np.array(rows, np.int64)) == names).all()
        self.hidden |= self.held & set(rows)

    @rule(numbers=st.lists(st.integers(0, _CAPACITY - 1), unique=True))
    def show(self, numbers: list[int]) -> None:
        rows = np.array([row for row in numbers if row in self.hidden], np.int64)
        names, before = self.ring.get_names(rows), self.generations[rows]
        self.ring.show(np.array([row for row in numbers if row in self.hidden | self.left], np.int64))
        assert (self.generations[rows] != before - 1).all()
        assert (self.generations[rows] & ((1 << 44) - 1) == names).all(), "still the same rows"
        assert (self.ring.get_names(rows) == names).all()
        self.hidden -= set(rows.tolist())

    @rule(numbers=st.lists(st.integers(0, _CAPACITY - 1), unique=True))
    def let_go(self, numbers: list[int]) -> None:
        given_up = [row for row in numbers if row in self.left]
        rows = np.array([row for row in numbers if row in self.held - self.hidden], np.int64)
        before = self.generations.copy()
        assert self.ring.let_go(
            np.array([row for row in numbers if row in (self.held - self.hidden) | self.left], np.int64)
        ).tolist() == (rows.tolist())
        assert (self.generations == before).all()
        self.left -= set(given_up)
        self.holes += given_up
        self.held -= set(rows.tolist())
        self.live |= set(rows.tolist())

    @precondition(lambda self: "quarantined" not in self.state.values())
    @rule()
    def restart(self) -> None:
        held = np.array(sorted(self.held), np.int64)
        self.ring = Ring.restore(_CAPACITY, self.generations, self.ring.state(), held=held)
        self.holes = sorted([*self.holes, *self.owner, *self.left])
        self.left.clear()
        self.live |= self.held - self.hidden
        self.held = set(self.hidden)
        circle = [*range(self.cursor, _CAPACITY), *range(self.cursor)]
        self.cursor = next((row for row in circle if row not in {*self.holes, *self.held}), self.cursor)
        self.owner.clear()
        self.state = dict.fromkeys(self.state, "closed")

    @invariant()
    def agrees(self) -> None:
        live = sorted(self.live)
        readable = sorted(self.live | (self.held - self.hidden))
        assert self.ring.list_live_rows().tolist() == readable
        assert np.flatnonzero((self.generations > 0) & (self.generations % 2 == 0)).tolist() == readable
        assert self.ring.select_held(RowSet.run(0, _CAPACITY)).rows.tolist() == sorted(self.held)
        assert self.ring.list_rows().tolist() == sorted(self.live | self.held)
        odd = {*self.owner, *self.holes, *self.hidden, *self.left}
        assert set(np.flatnonzero(self.generations % 2).tolist()) == odd
        assert (len(self.ring), self.ring.num_held) == (len(live) + len(self.held), len(self.held))
        assert self.ring.num_reserved == len(self.owner) + len(self.left)
        assert self.ring.num_free == _CAPACITY - len(self.ring) - self.ring.num_reserved
        assert self.ring.num_holes == len(self.holes)
        assert (self.ring.cursor, self.ring.inserts) == (self.cursor, self.inserts)


TestAgainstALoop = _AgainstALoop.TestCase
TestAgainstALoop.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


def test_reserve_when_full_then_the_oldest_rows_go_first() -> None:
    ring, generations = make_ring()
    for _ in range(2):
        ring.commit(reserve(ring, 2))
    reservation = reserve(ring, 3)
    assert reservation.rows.tolist() == [0, 1, 2]
    assert reservation.evicted.tolist() == [0, 1, 2]
    assert generations.tolist() == [3, 3, 3, 2]
    assert len(ring) == 1


def test_reserve_when_it_wraps_then_rows_follow_the_circle() -> None:
    ring, _ = make_ring()
    ring.commit(reserve(ring, 3))
    assert reserve(ring, 3).rows.tolist() == [3, 0, 1]


def test_reserve_when_a_write_was_aborted_then_the_next_writer_gets_its_rows() -> None:
    ring, generations = make_ring()
    ring.abort(reserve(ring, 2))
    assert generations.tolist() == [1, 1, 0, 0]
    reservation = reserve(ring, 3)
    assert reservation.rows.tolist() == [0, 1, 2]
    assert ring.commit(reservation).tolist() == [2, 2, 2]


def test_reserve_when_others_hold_too_many_rows_then_none_and_nothing_changes() -> None:
    ring, generations = make_ring()
    held = reserve(ring, 3)
    assert ring.reserve(2) is None
    assert generations.tolist() == [1, 1, 1, 0]
    ring.quarantine(held)
    assert ring.reserve(2) is None
    assert ring.num_reserved == 3
    ring.release(held)
    assert ring.reserve(2) is not None


def test_reserve_when_more_than_the_capacity_then_too_large() -> None:
    ring, _ = make_ring()
    with pytest.raises(TooLargeError) as caught:
        ring.reserve(5)
    assert (caught.value.asked, caught.value.free) == (5, 4)


@pytest.mark.parametrize("num_rows", [0, -1])
def test_reserve_when_nothing_is_asked_then_refused(num_rows: int) -> None:
    with pytest.raises(InvalidRequestError):
        make_ring()[0].reserve(num_rows)


def test_reserve_when_a_long_stretch_is_held_then_goes_past_it() -> None:
    ring, _ = make_ring(1_000_000)
    ring.quarantine(reserve(ring, 900_000))
    ring.commit(reserve(ring, 100_000))
    start_s = time.thread_time()
    assert reserve(ring, 3).rows.tolist() == [900_000, 900_001, 900_002]
    assert time.thread_time() - start_s < 0.5  # some passes over arrays: 2 ms; one step per row: seconds


def test_commit_when_quarantined_then_refused_and_names_the_state() -> None:
    ring, generations = make_ring()
    held = reserve(ring, 2)
    ring.quarantine(held)
    with pytest.raises(WrongStateError, match="quarantined"):
        ring.commit(held)
    assert generations.tolist() == [1, 1, 0, 0]
    assert ring.quarantined == (held,)


def test_commit_when_the_reservation_is_of_another_ring_then_refused() -> None:
    ring, other = make_ring()[0], make_ring()[0]
    reserve(ring, 1)
    with pytest.raises(WrongStateError):
        ring.commit(reserve(other, 1))


def test_free_when_rows_go_then_the_next_writer_gets_them_in_that_order() -> None:
    ring, generations = make_ring()
    ring.commit(reserve(ring, 4))
    ring.free(np.array([2, 0]))
    assert generations.tolist() == [3, 2, 3, 2]
    assert (len(ring), ring.num_free, ring.num_holes) == (2, 2, 2)
    reservation = reserve(ring, 3)
    assert reservation.rows.tolist() == [2, 0, 1]
    assert reservation.evicted.tolist() == [1]


def test_reserve_holes_when_rows_were_given_up_then_all_of_them_and_nobody_gets_them_meanwhile() -> None:
    ring, _ = make_ring()
    assert ring.reserve_holes() is None
    ring.commit(reserve(ring, 4))
    ring.free(np.array([2, 0]))
    ring.free(np.array([3]))
    taken = ring.reserve_holes()
    assert taken is not None
    assert taken.rows.tolist() == [2, 0, 3]
    assert (ring.num_holes, ring.num_reserved) == (0, 3)
    assert ring.reserve(2) is None
    ring.abort(taken)
    assert reserve(ring, 3).rows.tolist() == [2, 0, 3]


def test_restore_when_writers_may_live_then_their_rows_are_held_and_the_rest_are_holes() -> None:
    generations = np.array([2, 3, 1, 5, 0, 4], np.int64)
    reserved = [np.array([1, 5]), np.array([3])]  # row 5 was committed before the crash
    ring = Ring.restore(6, generations, {"cursor": 5, "inserts": 7}, now_reserved=reserved)
    assert [held.rows.tolist() for held in ring.quarantined] == [[1], [3]]
    assert (len(ring), ring.num_reserved, ring.num_holes, ring.inserts) == (2, 2, 1, 7)
    assert reserve(ring, 3).rows.tolist() == [2, 5, 0]
    ring.release(ring.quarantined[0])
    assert reserve(ring, 1).rows.tolist() == [1]


def test_restore_when_rows_were_reserved_after_the_state_was_stored_then_filling_them_evicts_none() -> None:
    ring, generations = make_ring(8)
    ring.commit(reserve(ring, 2))
    stored = ring.state()
    reserve(ring, 2)
    ring = Ring.restore(8, generations, stored)
    assert [reserve(ring, 2).rows.tolist() for _ in range(3)] == [[2, 3], [4, 5], [6, 7]]


@pytest.mark.parametrize("state", [{"cursor": 4}, {"cursor": -1}, {"inserts": -1}])
def test_restore_when_the_state_contradicts_then_corrupt(state: dict[str, int]) -> None:
    with pytest.raises(CorruptDataError):
        Ring.restore(4, np.zeros(4, np.int64), state)


def test_restore_when_a_generation_is_negative_then_corrupt() -> None:
    with pytest.raises(CorruptDataError):
        Ring.restore(2, np.array([0, -2], np.int64), {})


@pytest.mark.parametrize(("capacity", "num"), [(0, 0), (-1, 0), (3, 4)])
def test_ring_when_it_cannot_be_then_refused(capacity: int, num: int) -> None:
    with pytest.raises(InvalidRequestError):
        Ring(capacity, np.zeros(num, np.int64))


def test_ring_when_generations_are_of_another_dtype_then_refused() -> None:
    wrong: Any = np.zeros(2, np.int32)
    with pytest.raises(InvalidRequestError):
        Ring(2, wrong)


def test_num_used_when_the_ring_goes_round_then_all_rows_are() -> None:
    ring = Ring(8, np.zeros(8, np.int64))
    for num_rows, num_used in ((3, 3), (4, 7), (1, 8)):
        assert ring.reserve(num_rows) is not None
        assert ring.num_used == num_used


@pytest.mark.parametrize(("generations", "num_used"), [([2, 2, 0, 0], 2), ([2, 2, 2, 0], 4), ([2, 2, 1, 0], 3)])
def test_num_used_when_restored_then_the_rows_that_somebody_had(generations: list[int], num_used: int) -> None:
    ring = Ring.restore(4, np.array(generations), {"cursor": 2, "inserts": 2})
    assert ring.num_used == num_used
    assert all(number == 0 for number in generations[ring.num_used :])
